"""Hugging Face's families as data: job/presets/names/*.toml has the names of their tensors and
settings."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from phalanx.checkpoint.exchange.tensor_readers import name_stack_element
from phalanx.core.errors import LayoutError, format_nearest_word_hint

NAME_INDEX_PATTERNS = {
    "layer": r"(?P<layer>\d+)",
    "expert": r"(?P<expert>\d+)",
    "part": r"(?P<part>weight|bias)",
}

# Why a similar family cannot be imported: a part that phalanx's models do not compute.
UNSUPPORTED_FAMILY_REASONS = {
    "qwen2_moe": "its shared expert has a gate, and phalanx's none",
    "gpt_oss": "its experts have biases, and phalanx's none",
    "olmoe": "it normalizes queries and keys over all heads, and phalanx head by head",
}


# A shape that several families can describe is exported as the first of these.
_FAMILY_NAMES_SIMPLEST_FIRST = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma3",
    "gpt2",
    "mixtral",
    "qwen3_moe",
    "deepseek_v3",
)


@dataclass(frozen=True)
class TensorNameRule:
    """The rule for one tensor of Hugging Face: phalanx's tensors stacked along the first dimension,
    then transposed, then with dimensions of 1 in front.

    Names are patterns: `up.weight[{expert}]` is an element of a stack of tensors, on either side.
    """

    their_pattern: str
    our_patterns: tuple[str, ...]
    transposed: bool = False
    ones: int = 0

    def translate_to_hugging_face_name(self, our_name: str) -> str | None:
        """Hugging Face's name of the tensor that holds `our_name`; None if the rule does not
        apply."""
        for pattern in self.our_patterns:
            if (fields := _match_name_pattern(pattern, our_name)) is not None:
                return _fill_name_pattern(self.their_pattern, fields)
        return None

    def translate_to_phalanx_names(self, their_name: str) -> list[str]:
        """Phalanx's names of the parts of Hugging Face's tensor, in its order; empty if the rule
        does not apply."""
        fields = _match_name_pattern(self.their_pattern, their_name)
        if fields is None:
            return []
        return [_fill_name_pattern(pattern, fields) for pattern in self.our_patterns]


@dataclass(frozen=True)
class HuggingFaceFamily:
    """A family as its file of names describes it.

    `always` are keys of a shape; `required`, `written` and `defaults` keys of config.json.
    `also`: other names that config.json may have for a key. `activations`: activations that the
    family computes as another one. `note`: a note for a person who exports a model. `nullable`:
    keys whose null is a value.
    """

    model_type: str
    architecture: str
    widths: Mapping[str, str]
    activation: str
    rules: tuple[TensorNameRule, ...]
    always: Mapping[str, Any]
    required: Mapping[str, Any]
    written: Mapping[str, Any]
    defaults: Mapping[str, Any]
    also: Mapping[str, str]
    activations: Mapping[str, str]
    prefix: str = "model."
    rope: str = ""
    window: str = ""
    scores_by: str = ""
    biases: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    note: str = ""
    heads_divide_dim: bool = False
    latent: bool = False
    nullable: tuple[str, ...] = ()

    def is_stack_of_expert_matrices(self, name: str, shape: tuple[int, ...]) -> bool:
        """True if Hugging Face's tensor `name` holds one matrix of each expert: it is read element
        by element."""
        if len(shape) != 3 or 0 in shape:
            return False
        first = name_stack_element(name, 0)
        for rule in self.rules:
            if rule.translate_to_phalanx_names(first) or rule.translate_to_phalanx_names(
                self.prefix + first
            ):
                return True
        return False

    @property
    def has_gated_feed_forward(self) -> bool:
        """True if its feed-forwards have three matrices."""
        return any(".gate." in pattern for rule in self.rules for pattern in rule.our_patterns)

    @property
    def auto_class(self) -> str:
        """The class of transformers that opens it."""
        if self.always.get("kind") == "vit":
            return "AutoModelForImageClassification"
        return "AutoModelForCausalLM"


def list_hugging_face_families() -> list[HuggingFaceFamily]:
    """All families; of several that can describe a shape the earlier one describes it more
    simply."""
    rest = sorted(_read_family_toml_texts().keys() - set(_FAMILY_NAMES_SIMPLEST_FIRST))
    return [_load_family_from_toml(name) for name in (*_FAMILY_NAMES_SIMPLEST_FIRST, *rest)]


def find_family_of_model_type(model_type: str) -> HuggingFaceFamily:
    """The family of config.json's `model_type`. Raises LayoutError that lists the known ones."""
    known = {family.model_type: family for family in list_hugging_face_families()}
    if model_type not in known:
        raise LayoutError(
            f"models of type {model_type!r} cannot be imported",
            why=UNSUPPORTED_FAMILY_REASONS.get(model_type) or f"known: {', '.join(known)}",
            fix=format_nearest_word_hint(model_type, list(known)) or None,
        )
    return known[model_type]


@cache
def _read_family_toml_texts() -> dict[str, str]:
    folder = resources.files("phalanx.job.presets") / "names"
    texts = {}
    for file in folder.iterdir():
        if file.name.endswith(".toml"):
            texts[file.name.removesuffix(".toml")] = file.read_text(encoding="utf-8")
    return texts


@cache
def _load_family_from_toml(name: str) -> HuggingFaceFamily:
    table = _read_merged_family_table(name)
    rules = []
    for their_pattern, entry in table.pop("tensors").items():
        rules.append(_parse_name_rule(their_pattern, entry))
    for key in ("biases", "ignored", "nullable"):
        table[key] = tuple(table.get(key, ()))
    for key in ("widths", "always", "required", "written", "defaults", "also", "activations"):
        table.setdefault(key, {})
    # TOML has no null: required it is a value, and as a default there is none.
    for key, value in list(table["required"].items()):
        if value == "none":
            table["required"][key] = None
    for key, value in list(table["defaults"].items()):
        if value == "none":
            del table["defaults"][key]
    return HuggingFaceFamily(rules=tuple(rules), **table)


def _parse_name_rule(their_pattern: str, entry: str | Mapping[str, Any]) -> TensorNameRule:
    if isinstance(entry, str):
        return TensorNameRule(their_pattern, (entry,))
    transposed, ones = entry.get("transposed", False), entry.get("ones", 0)
    return TensorNameRule(their_pattern, tuple(entry["ours"]), transposed, ones)


def _read_merged_family_table(name: str) -> dict[str, Any]:
    """The table of a file, on top of the file it is the `same_as`: sections are merged, other keys
    replaced."""
    table = tomllib.loads(_read_family_toml_texts()[name])
    if "same_as" not in table:
        return table
    base = _read_merged_family_table(table.pop("same_as"))
    for key, value in table.items():
        if isinstance(value, dict):
            base[key] = {**base.get(key, {}), **value}
        else:
            base[key] = value
    return base


@cache
def _compile_name_pattern(text: str) -> re.Pattern[str]:
    # Text and names of places in turn.
    parts = re.split(r"\{(\w+)\}", text)
    for index, part in enumerate(parts):
        if index % 2 == 0:
            parts[index] = re.escape(part)
        else:
            parts[index] = NAME_INDEX_PATTERNS[part]
    return re.compile("".join(parts))


def _match_name_pattern(pattern: str, name: str) -> dict[str, str] | None:
    match = _compile_name_pattern(pattern).fullmatch(name)
    if match is None:
        return None
    return match.groupdict()


def _fill_name_pattern(pattern: str, fields: Mapping[str, str]) -> str:
    return pattern.format_map(fields)
