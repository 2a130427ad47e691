"""A proposed cut is tried in one process: each rank's part of a module in turn, what their rows
make added up."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from phalanx.core.errors import LayoutError
from phalanx.core.phases import PhaseTimer
from phalanx.mesh.logical import full_name
from phalanx.mesh.tensor_group import TensorParallelGroup
from phalanx.parallel.tensor.sharder import shard_module_by_rules
from phalanx.plan.rules import parse_sharding_rules
from phalanx.suggest.cutting import CutProposal
from phalanx.suggest.visit import RecordedModuleCall

# Relative: float32, where the module has no float64, keeps about seven digits.
RELATIVE_TOLERANCE = 1e-6
MAX_TRIED_COUNTS = 7  # each set of them is tried: 128 at most


class _SingleRankGroup(TensorParallelGroup):
    """One rank of a group whose others are not there: nothing is added up."""

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return x


@dataclass(frozen=True)
class CutTrialResult:
    """The result of a trial: which counts of the module must be divided, or why it cannot be
    cut."""

    divide: tuple[str, ...] = ()
    refused: str = ""


def try_cutting(
    home: nn.Module, names: Sequence[str], cutting: CutProposal, visit: RecordedModuleCall
) -> CutTrialResult:
    """`home` holds the columns and, last, the row: `names` are theirs within it.

    `visit` is a call of it.
    """
    texts = dict(zip(names, (*cutting.columns, cutting.row), strict=True))
    refused = ""
    for counts in _list_choices_of_counts(home, cutting):
        try:
            if all(
                _is_sharded_sum_equal(home, names[-1], texts, counts, tp, visit)
                for tp in cutting.degrees
            ):
                return CutTrialResult(counts)
            refused = refused or "what the parts make does not add up to the whole"
        except LayoutError as error:
            refused = refused or str(error)
        except Exception as error:  # the user's forward, with a part of its features
            refused = (
                refused
                or f"its forward fails with a part of them: {str(error).splitlines()[0][:120]}"
            )
    # The first refusal is told: that of the module as it is, with no count divided.
    return CutTrialResult(refused=refused)


def _list_choices_of_counts(home: nn.Module, cutting: CutProposal) -> Iterator[tuple[str, ...]]:
    """Sets of counts to divide, the smallest first."""
    integers = [
        (path, value) for path, value in _list_integer_attributes(home) if value in cutting.counts
    ]
    # Those that are called after heads are tried first.
    integers.sort(key=lambda item: "head" not in item[0])
    words = []
    for path, value in integers[:MAX_TRIED_COUNTS]:
        heads = cutting.counts[value]
        words.append(f"{path}/{heads}" if heads and heads != cutting.num_heads else path)
    for size in range(len(words) + 1):
        yield from itertools.combinations(words, size)


def _list_integer_attributes(home: nn.Module) -> Iterator[tuple[str, int]]:
    """The integers that modules inside keep, and those of the settings that they keep (a
    `config`)."""
    for prefix, part in home.named_modules():
        if hasattr(part, "weight"):
            continue
        owners: list[tuple[tuple[str, ...], dict[str, Any]]] = [((), vars(part))]
        for name, value in vars(part).items():
            if _is_settings_object(name, value):
                owners.append(((name,), vars(value)))
        for steps, owner in owners:
            for name, value in owner.items():
                # bool is an int in Python.
                is_integer = isinstance(value, int) and not isinstance(value, bool)
                if is_integer and not name.startswith("_"):
                    yield ".".join(filter(None, (full_name(prefix), *steps, name))), value


def _is_settings_object(name: str, value: Any) -> bool:
    return (
        not name.startswith("_")
        and hasattr(value, "__dict__")
        and not isinstance(value, type | torch.Tensor)
    )


@torch.no_grad()
def _is_sharded_sum_equal(
    home: nn.Module,
    row: str,
    texts: Mapping[str, str],
    counts: Sequence[str],
    tp: int,
    visit: RecordedModuleCall,
) -> bool:
    total: torch.Tensor | None = None
    bias: Any = 0.0
    for rank in range(tp):
        # Sharding changes a module in place: each rank's part is made of a copy.
        part = copy.deepcopy(home)
        home_rule = "replicate"
        if counts:
            home_rule += f" divide={','.join(counts)}"
        rules = {**texts, "": home_rule}
        group = _SingleRankGroup(name="", rank=rank, size=tp, phases=PhaseTimer())
        shard_module_by_rules(part, group, parse_sharding_rules(rules))
        outputs: list[torch.Tensor] = []
        part.get_submodule(row).register_forward_hook(
            lambda part, args, out, outputs=outputs: outputs.append(out)
        )
        bias = getattr(part.get_submodule(row), "bias", None)
        part(*visit.args, **visit.kwargs)
        total = outputs[0] if total is None else total + outputs[0]
    assert total is not None
    assert visit.row_output is not None
    # Each rank's row has added the whole bias.
    if isinstance(bias, torch.Tensor):
        total = total - (tp - 1) * bias
    if total.shape != visit.row_output.shape:
        return False
    return bool((total - visit.row_output).norm() <= RELATIVE_TOLERANCE * visit.row_output.norm())
