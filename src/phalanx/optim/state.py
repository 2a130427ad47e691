"""What an optimizer keeps besides the tensors that were there when it was built.

Many optimizers make their state at the first step, count in plain numbers, or change numbers of their groups as they
go. A run that is continued needs all of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from phalanx.core.errors import CheckpointError
from phalanx.mesh.logical import full_name

Named = Iterable[tuple[str, nn.Parameter]]
_SET_BY_THE_JOB = ("params", "lr")  # lr is a function of the step


class Stored(Protocol):
    """What a checkpoint says of a tensor. `dtype` is torch's name of it."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...


def group_numbers(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The numbers of the optimizer's groups, by `group/<index>/<key>`."""
    return {
        f"group/{index}/{key}": value
        for index, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key not in _SET_BY_THE_JOB and isinstance(value, int | float)
    }


def numbers_of(optimizer: torch.optim.Optimizer, named_parameters: Named, built: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers that training made or changed: beside a parameter's tensors, and in groups that were `built` otherwise.

    Raises CheckpointError for state that is neither number nor tensor.
    """
    found = {key: value for key, value in group_numbers(optimizer).items() if key not in built or built[key] != value}
    for raw_name, parameter in named_parameters:
        for slot, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, torch.Tensor) and value is not None:
                found[f"state/{full_name(raw_name)}/{slot}"] = value
    for key, value in found.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps {key} = {value!r}",
                why="a checkpoint holds tensors and finite numbers",
                fix="keep it as one of these in the optimizer's state",
            )
    return found


def places_of(
    optimizer: torch.optim.Optimizer, named_parameters: Named, numbers: Mapping[str, Any]
) -> list[tuple[dict[str, Any], str, Any]]:
    """Where what `numbers_of` found in another optimizer belongs in this one: (dictionary, key, value).

    Raises CheckpointError if it has no such place.
    """
    parameters = {full_name(name): parameter for name, parameter in named_parameters}
    found = []
    for key, value in numbers.items():
        kind, _, rest = key.partition("/")
        owner, _, slot = rest.rpartition("/")
        try:
            place = optimizer.param_groups[int(owner)] if kind == "group" else optimizer.state[parameters[owner]]
        except (KeyError, IndexError, ValueError):
            raise CheckpointError(
                f"it was written by an optimizer with {key}, and {type(optimizer).__name__} has no such place",
                fix="use the optimizer it was written by",
            ) from None
        found.append((place, slot, value))
    return found


def make_slots(
    optimizer: torch.optim.Optimizer, named_parameters: Named, stored: Mapping[str, Stored]
) -> list[tuple[nn.Parameter, str]]:
    """Make the tensors of state that a checkpoint holds and the optimizer does not have yet; which were made.

    Their values are to be loaded. An optimizer that makes its state at the first step finds it there.
    """
    parameters = {full_name(name): parameter for name, parameter in named_parameters}
    made = []
    for key, facts in stored.items():
        owner, _, slot = key.removeprefix("optim/").rpartition("/")
        parameter = parameters.get(owner) if key.startswith("optim/") else None
        if parameter is None or slot in optimizer.state.get(parameter, {}) or not hasattr(torch, facts.dtype):
            continue
        optimizer.state[parameter][slot] = _empty_slot(optimizer, parameter, facts)
        made.append((parameter, slot))
    return made


def drop_slots(optimizer: torch.optim.Optimizer, made: Iterable[tuple[nn.Parameter, str]]) -> None:
    """Undo `make_slots`."""
    for parameter, slot in made:
        del optimizer.state[parameter][slot]
        if not optimizer.state[parameter]:
            del optimizer.state[parameter]


def _empty_slot(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, facts: Stored) -> torch.Tensor:
    """Cut as the parameter is, if it has its shape; else whole. Single numbers lie where torch would have put them."""
    dtype = getattr(torch, facts.dtype)
    if facts.shape and tuple(facts.shape) == tuple(parameter.shape):
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    group = next(group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))
    on_device = bool(facts.shape) or group.get("fused") or group.get("capturable")
    return torch.zeros(facts.shape, dtype=dtype, device=parameter.device if on_device else "cpu")
