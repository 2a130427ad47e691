"""What a Hugging Face config.json says, looked at before a library is asked: a setting that cannot
be is refused by its file, its name, its value and what is wanted.

Torch-free. What transformers alone knows is refused in `phalanx.nn.hugging_face.refusals`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from phalanx.core.errors import LayoutError
from phalanx.job.limits import MAX_LAYERS, MAX_MODEL_SIZE

SIZE_KEYS = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "vocab_size", "n_layer", "n_embd", "n_head"),
)
"""Keys of config.json, in several families, of what a model has at least one of."""
# Lengths are written as 8192.0, too; and a head_dim of 0 is one that a family derives.
_LENGTH_KEYS = ("max_position_embeddings", "n_positions")
LAYER_KEYS = ("num_hidden_layers", "n_layer")
# Endings of keys whose numbers a model computes with; limits on a number may be infinite
# (time_step_limit of Mamba 2).
FINITE_KEY_ENDINGS = (
    *("_theta", "_base_freq", "_eps", "_epsilon", "factor", "_range", "_multiplier", "_scale"),
    *("dropout", "_pdrop", "_scaling"),
)
# Of these, the ones that are never words.
_NUMBER_KEY_ENDINGS = ("_theta", "_base_freq", "_eps", "_epsilon", "factor", "_range", "_pdrop")
_PROBABILITY_KEY_ENDINGS = ("dropout", "_pdrop", "_dropout_prob")
_ROPE_KEYS = ("rope_scaling", "rope_parameters")
# (a number that counts things, the number that it must be divided by)
_DIVIDED_KEYS = (("num_attention_heads", "num_key_value_heads"),)
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
_CHOSEN_EXPERT_KEYS = ("num_experts_per_tok", "num_experts_per_token")


def require_possible_settings(
    path: Path, values: Mapping[str, Any], args: Mapping[str, Any]
) -> None:
    """Raise LayoutError for a setting of the config.json `path`, or of model.args, that no model
    has. `values` are those of the file; `args` stand before them."""
    settings = _Settings(path, values, args)
    settings.require_sizes()
    settings.require_numbers()
    settings.require_forms()
    settings.require_that_they_go_together()


class _Settings:
    """The settings that hold, and where each is said."""

    def __init__(self, path: Path, values: Mapping[str, Any], args: Mapping[str, Any]) -> None:
        self._path, self._args = path, args
        self._settings = {**values, **args}

    def require_sizes(self) -> None:
        head_dim = self._settings.get("head_dim")
        if isinstance(head_dim, str) or (isinstance(head_dim, int) and head_dim < 0):
            self._refuse("head_dim", head_dim, "give a whole number from 1 on")
        for key in (*SIZE_KEYS, *_LENGTH_KEYS):
            size = self._settings.get(key)
            if key in _LENGTH_KEYS and isinstance(size, float) and size.is_integer():
                size = int(size)
            # transformers takes some of them, and builds a model without blocks, say. Lists have a
            # size for each block.
            if isinstance(size, str | bool | float) or (isinstance(size, int) and size < 1):
                self._refuse(key, size, "give a whole number from 1 on")
            most = MAX_LAYERS if key in LAYER_KEYS else MAX_MODEL_SIZE
            if isinstance(size, int) and size > most:
                raise LayoutError(
                    f"{self._name(key)} is {size:,}"[:200], fix=f"give at most {most:,}"
                )

    def require_numbers(self) -> None:
        for name, value in _iterate_leaves(self._settings):
            key = name.rpartition(".")[2]
            if isinstance(value, str) and key.endswith(_NUMBER_KEY_ENDINGS):
                self._refuse(name, value, "give a number, without quotation marks")
            if not isinstance(value, int | float) or isinstance(value, bool):
                continue
            is_limit = not math.isnan(value) and not key.endswith(FINITE_KEY_ENDINGS)
            if isinstance(value, float) and not math.isfinite(value) and not is_limit:
                raise LayoutError(f"{self._name(name)} is {value}", fix="give a finite number")
            if key.endswith(_PROBABILITY_KEY_ENDINGS) and not 0 <= value <= 1:
                self._refuse(name, value, "give a probability from 0 to 1")
            if key == "rope_theta" and value <= 0:
                self._refuse(name, value, "give a number above 0")

    def require_forms(self) -> None:
        for key in _ROPE_KEYS:
            value = self._settings.get(key)
            if value is not None and not isinstance(value, dict):
                self._refuse(
                    key,
                    value,
                    'give an object, {"rope_type": "linear", "factor": 2.0} say, or null',
                )
        architectures = self._settings.get("architectures")
        if architectures is not None and not (
            isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
        ):
            self._refuse("architectures", architectures, 'give a list, ["LlamaForCausalLM"] say')

    def require_that_they_go_together(self) -> None:
        for key, divisor_key in _DIVIDED_KEYS:
            count, divisor = self._find_count(key), self._find_count(divisor_key)
            if count and divisor and count % divisor:
                raise LayoutError(
                    f"{self._name(divisor_key)} is {divisor}, which does not divide {key}, {count}",
                    fix=f"give a divisor of {count}",
                )
        num_chosen = max(map(self._find_count, _CHOSEN_EXPERT_KEYS))
        for key in _EXPERT_KEYS:
            num_experts = self._settings.get(key)
            if not isinstance(num_experts, int) or not num_chosen:
                continue
            # Families that have blocks without experts say 0 by other names.
            if num_experts < 0 or (key == "num_local_experts" and not num_experts):
                self._refuse(key, num_experts, "give a whole number from 1 on")
            if 0 < num_experts < num_chosen:
                chosen_key = max(_CHOSEN_EXPERT_KEYS, key=self._find_count)
                raise LayoutError(
                    f"{self._name(chosen_key)} is {num_chosen}, and {key} is {num_experts}",
                    fix=f"give at most {num_experts}",
                )

    def _find_count(self, key: str) -> int:
        value = self._settings.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        return 0

    def _name(self, name: str) -> str:
        """Where a setting, or a part of one by its dotted name, is said, and its name."""
        if name.partition(".")[0] in self._args:
            return f"model.args: {name}"
        return f"{self._path}: {name}"

    def _refuse(self, name: str, value: object, fix: str) -> NoReturn:
        raise LayoutError(f"{self._name(name)} is {format_setting(value)}", fix=fix)


def format_setting(value: object) -> str:
    """A value of config.json as it is written there, cut if it is long."""
    return f"{json.dumps(value, default=str):.60}"


def _iterate_leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of each value in JSON that is no object and no list; those of a list
    have the list's name."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _iterate_leaves(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for item in value:
            yield from _iterate_leaves(item, name)
    else:
        yield name, value
