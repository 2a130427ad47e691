"""What an optimizer keeps besides the tensors that were there when it was built.

Many optimizers make their state at the first step, count in plain numbers, change values of their
groups as they go, or keep something of the whole run under a name of its own. A run that is
continued needs all of it. In a checkpoint it is called `group/<index>/<key>`,
`state/<parameter>/<slot>`, and `own/<name>` or `own/<name>/<slot>`.
"""

from __future__ import annotations

import copy
import math
import reprlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from phalanx.core.errors import CheckpointError
from phalanx.mesh.logical import LogicalShard, full_name, shard_of

Named = Iterable[tuple[str, nn.Parameter]]
Put = Callable[[], None]
Undo = Callable[[], None]
Holder = Callable[[], dict[Any, Any]]
_SET_BY_THE_JOB = ("params", "lr")  # lr is a function of the step
_TUPLE = "tuple"  # JSON has lists only
_UNKNOWN = object()  # equal to nothing: a value of which nobody could say whether it changed


class Stored(Protocol):
    """What a checkpoint says of a tensor. `dtype` is torch's name of it."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...


@dataclass(frozen=True)
class Kept:
    """One value that an optimizer keeps, what a checkpoint calls it, and where it is kept."""

    path: str
    holder: dict[Any, Any]
    key: Any
    value: Any


def group_values(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the optimizer's groups hold now, besides tensors, by path: nothing that changes later
    changes it."""
    return {
        kept.path: _remembered(kept.value)
        for kept in _in_groups(optimizer)
        if not _is_tensor(kept.value)
    }


def numbers_of(
    optimizer: torch.optim.Optimizer, named_parameters: Named, built: Mapping[str, Any]
) -> dict[str, Any]:
    """What training made or changed and is no tensor, as JSON by path; of groups what was `built`
    otherwise.

    Raises CheckpointError for state that is neither tensor, nor finite number, nor a list of such
    numbers.
    """
    found = {}
    for kept in _everything(optimizer, named_parameters):
        is_of_group = kept.path.startswith("group/")
        if _is_tensor(kept.value) or (kept.value is None and not is_of_group):
            continue
        if is_of_group and kept.path in built and _is_same(built[kept.path], kept.value):
            continue
        try:
            found[kept.path] = None if kept.value is None else _to_json(kept.value)
        except ValueError:
            raise _refusal(optimizer, f"{kept.path} = {reprlib.repr(kept.value)}") from None
    return found


def tensors_of(
    optimizer: torch.optim.Optimizer, named_parameters: Named, *, rank: int, world_size: int
) -> dict[str, LogicalShard]:
    """Tensors that belong to no parameter, as `optim/<path>`.

    They are the same on every rank, as such numbers are.
    """
    return {
        f"optim/{kept.path}": shard_of(
            f"optim/{kept.path}", kept.value, replica=rank, num_replicas=world_size
        )
        for kept in _everything(optimizer, named_parameters)
        if _is_tensor(kept.value) and not kept.path.startswith("state/")
    }


def places_of(
    optimizer: torch.optim.Optimizer,
    named_parameters: Named,
    numbers: Mapping[str, Any],
    *,
    elsewhere: Container[str] = (),
) -> list[Put]:
    """What puts each of the values that `numbers_of` found in another optimizer where it belongs in
    this one.

    Those of parameters that are `elsewhere`, on other ranks, and not here are left out. Raises
    CheckpointError if it has no such place.
    """
    parameters = {full_name(name): parameter for name, parameter in named_parameters}
    puts: list[Callable[[], None]] = []
    for path, value in numbers.items():
        owner = path.removeprefix("state/").rpartition("/")[0] if path.startswith("state/") else ""
        if owner not in parameters and owner in elsewhere:
            continue
        try:
            holder, key = _place(optimizer, parameters, path)
            puts.append(partial(_put, holder, key, _from_json(value)))
        except (KeyError, IndexError, ValueError, TypeError):
            raise CheckpointError(
                f"it was written by an optimizer with {path}, and {type(optimizer).__name__} has no"
                " such place",
                fix="use the optimizer it was written by",
            ) from None
    return puts


def make_slots(
    optimizer: torch.optim.Optimizer,
    named_parameters: Named,
    stored: Mapping[str, Stored],
    whole: Mapping[str, tuple[int, ...]] | None = None,
) -> list[Undo]:
    """Make the tensors of state that a checkpoint holds and the optimizer does not have yet; what
    undoes each.

    `whole`: shapes of parameters before tensor parallelism has cut them, which the tensors do not
    show. Their values are to be loaded. An optimizer that makes its state at the first step finds
    it there.
    """
    parameters = {full_name(name): parameter for name, parameter in named_parameters}
    made: list[Undo] = []
    for name, facts in stored.items():
        path = name.removeprefix("optim/")
        if path == name or not hasattr(torch, facts.dtype):
            continue
        owner = parameters.get(path.rpartition("/")[0])
        try:
            place, key = _place(optimizer, parameters, path if owner is None else f"state/{path}")
        except (KeyError, IndexError, ValueError):
            continue  # a tensor of another optimizer: it is said that it does not fit
        holder = place()
        if not _is_tensor(holder.get(key)):
            made.append(_undo(optimizer, holder, key))
            shape = (whole or {}).get(path.rpartition("/")[0])
            holder[key] = _empty_slot(optimizer, owner, shape, facts)
    return made


def _everything(optimizer: torch.optim.Optimizer, named_parameters: Named) -> Iterator[Kept]:
    """Raises CheckpointError for what no checkpoint could name."""
    yield from _in_groups(optimizer)
    names = {id(parameter): full_name(name) for name, parameter in named_parameters}
    for owner, value in optimizer.state.items():
        if isinstance(owner, torch.Tensor):
            if id(owner) not in names:
                raise _refusal(
                    optimizer,
                    f"state of a {list(owner.shape)} tensor that is no parameter of the model",
                )
            yield from _slots(optimizer, f"state/{names[id(owner)]}", value)
        elif not isinstance(owner, str) or "/" in owner:
            raise _refusal(optimizer, f"state[{reprlib.repr(owner)}], whose key is no plain name")
        elif isinstance(value, dict):
            yield from _slots(optimizer, f"own/{owner}", value)
        else:
            yield Kept(f"own/{owner}", optimizer.state, owner, value)


def _in_groups(optimizer: torch.optim.Optimizer) -> Iterator[Kept]:
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key not in _SET_BY_THE_JOB:
                yield Kept(f"group/{index}/{key}", group, key, value)


def _slots(optimizer: torch.optim.Optimizer, path: str, slots: dict[Any, Any]) -> Iterator[Kept]:
    for slot, value in slots.items():
        if not isinstance(slot, str) or "/" in slot:
            raise _refusal(optimizer, f"{path}[{reprlib.repr(slot)}], whose key is no plain name")
        yield Kept(f"{path}/{slot}", slots, slot, value)


def _place(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], path: str
) -> tuple[Holder, str]:
    """What gives (and makes) the dictionary that a path means, and the key in it.

    Raises KeyError, IndexError or ValueError if there is none.
    """
    kind, _, rest = path.partition("/")
    owner, _, slot = rest.rpartition("/")
    if kind == "group":
        group = optimizer.param_groups[int(owner)]
        return lambda: group, slot
    if kind == "state":
        parameter = parameters[owner]
        return lambda: optimizer.state.setdefault(parameter, {}), slot
    if kind != "own" or not isinstance(optimizer.state.get(owner, {}), dict):
        raise KeyError(path)
    return lambda: optimizer.state.setdefault(owner, {}) if owner else optimizer.state, slot


def _put(holder: Holder, key: str, value: Any) -> None:
    holder()[key] = value


def _undo(optimizer: torch.optim.Optimizer, holder: dict[Any, Any], key: str) -> Undo:
    had, before = key in holder, holder.get(key)

    def undo() -> None:
        if had:
            holder[key] = before
        else:
            del holder[key]
        for owner in [
            owner for owner, slots in optimizer.state.items() if slots is holder and not slots
        ]:
            del optimizer.state[owner]

    return undo


def _empty_slot(
    optimizer: torch.optim.Optimizer,
    owner: nn.Parameter | None,
    whole: tuple[int, ...] | None,
    facts: Stored,
) -> torch.Tensor:
    """Cut as the parameter is, if it has the shape of the `whole` one; else whole.

    Single numbers lie where torch would have put them.
    """
    dtype = getattr(torch, facts.dtype)
    if owner is not None and facts.shape and tuple(facts.shape) == (whole or tuple(owner.shape)):
        return torch.zeros_like(owner, dtype=dtype, requires_grad=False)
    groups = optimizer.param_groups
    group = next((g for g in groups if any(p is owner for p in g["params"])), groups[0])
    on_device = bool(facts.shape) or group.get("fused") or group.get("capturable")
    return torch.zeros(
        facts.shape, dtype=dtype, device=group["params"][0].device if on_device else "cpu"
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _to_json(value: Any) -> Any:
    """Raises ValueError."""
    if isinstance(value, int | float) and math.isfinite(value):
        return value
    if isinstance(value, list | tuple):
        items = [_to_json(item) for item in value]
        return items if isinstance(value, list) else {_TUPLE: items}
    raise ValueError


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(_from_json(item) for item in value[_TUPLE])
    return [_from_json(item) for item in value] if isinstance(value, list) else value


def _refusal(optimizer: torch.optim.Optimizer, what: str) -> CheckpointError:
    return CheckpointError(
        f"{type(optimizer).__name__} keeps {what}",
        why="a checkpoint holds tensors, finite numbers, and lists of such numbers",
        fix="keep it as one of these, under the optimizer's parameters or under names",
    )


def _remembered(value: Any) -> Any:
    """A copy that shares nothing that changes; of what holds tensors there is none."""
    if _holds_tensor(value):
        return _UNKNOWN
    try:
        return copy.deepcopy(value)
    except Exception:  # an object of somebody's own may do anything
        return _UNKNOWN


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_tensor, value.values()))
    return _is_tensor(value) or (
        isinstance(value, list | tuple | set) and any(map(_holds_tensor, value))
    )


def _is_same(before: Any, now: Any) -> bool:
    try:
        return bool(before == now)
    except Exception:  # as above
        return False
