"""State of an optimizer besides the tensors that were there when it was built.

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
from phalanx.mesh.logical import LogicalShard, full_name, make_logical_shard

NamedParameters = Iterable[tuple[str, nn.Parameter]]
RestoreState = Callable[[], None]
UndoRestore = Callable[[], None]
GetStateDict = Callable[[], dict[Any, Any]]
# The learning rate is a function of the step, so there is nothing to store.
_JOB_OWNED_KEYS = ("params", "lr")
# JSON has lists only: a tuple is stored under this key.
_JSON_TUPLE_KEY = "tuple"
# Equal to nothing: a value that cannot be compared counts as changed.
_UNCOMPARABLE = object()


class StoredTensorSpec(Protocol):
    """Shape and type of a stored tensor. `dtype` is torch's name of it."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...


@dataclass(frozen=True)
class OptimizerValue:
    """One value in an optimizer: its path in a checkpoint, and the dictionary and key that hold
    it."""

    path: str
    holder: dict[Any, Any]
    key: Any
    value: Any


def copy_group_values(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The values of the optimizer's groups now, besides tensors, by path: copies that later changes
    do not reach."""
    values = {}
    for entry in _iterate_group_entries(optimizer):
        if not _is_tensor(entry.value):
            values[entry.path] = _deepcopy_if_possible(entry.value)
    return values


def collect_trained_numbers(
    optimizer: torch.optim.Optimizer, named_parameters: NamedParameters, built: Mapping[str, Any]
) -> dict[str, Any]:
    """Values that training made or changed and that are no tensors, as JSON by path.

    Values of groups that are still as `built` are left out. Raises CheckpointError for state that
    is neither tensor, nor finite number, nor a list of such numbers.
    """
    numbers = {}
    for entry in _list_optimizer_values(optimizer, named_parameters):
        is_of_group = entry.path.startswith("group/")
        if _is_tensor(entry.value) or (entry.value is None and not is_of_group):
            continue
        if is_of_group and entry.path in built and _is_equal_value(built[entry.path], entry.value):
            continue
        try:
            numbers[entry.path] = _encode_value_as_json(entry.value)
        except ValueError:
            raise _build_unsaveable_value_error(
                optimizer, f"{entry.path} = {reprlib.repr(entry.value)}"
            ) from None
    return numbers


def collect_parameterless_tensors(
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters,
    *,
    rank: int,
    world_size: int,
) -> dict[str, LogicalShard]:
    """Tensors that belong to no parameter, as `optim/<path>`.

    They are the same on every rank, as such numbers are.
    """
    shards = {}
    for entry in _list_optimizer_values(optimizer, named_parameters):
        if _is_tensor(entry.value) and not entry.path.startswith("state/"):
            name = f"optim/{entry.path}"
            shards[name] = make_logical_shard(
                name, entry.value, replica=rank, num_replicas=world_size
            )
    return shards


def build_restore_functions(
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters,
    numbers: Mapping[str, Any],
    *,
    elsewhere: Container[str] = (),
) -> list[RestoreState]:
    """Return functions that each set one of the `numbers`, which `collect_trained_numbers` took
    from another optimizer, in this one.

    Values of parameters that only other ranks have (`elsewhere`) are left out. Raises
    CheckpointError if this optimizer has no place for a value.
    """
    parameters = {full_name(name): parameter for name, parameter in named_parameters}
    restores: list[RestoreState] = []
    for path, value in numbers.items():
        owner = ""
        if path.startswith("state/"):
            owner = path.removeprefix("state/").rpartition("/")[0]
        if owner not in parameters and owner in elsewhere:
            continue
        try:
            # Nothing is set yet: a checkpoint that does not fit must leave the optimizer as it is.
            holder, key = _build_dictionary_getter(optimizer, parameters, path)
            restores.append(partial(_set_value, holder, key, _decode_value_from_json(value)))
        except (KeyError, IndexError, ValueError, TypeError):
            raise CheckpointError(
                f"it was written by an optimizer with {path}, and {type(optimizer).__name__} has no"
                " such place",
                fix="use the optimizer it was written by",
            ) from None
    return restores


def make_missing_slots(
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters,
    stored: Mapping[str, StoredTensorSpec],
    full_shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> list[UndoRestore]:
    """Make the tensors of state that a checkpoint holds and the optimizer does not have yet.

    Returns functions that each undo one. Their values are to be loaded. An optimizer that makes its
    state at the first step finds it there. `full_shapes`: shapes of parameters before tensor
    parallelism has cut them, which the tensors do not show.
    """
    parameters = {full_name(name): parameter for name, parameter in named_parameters}
    undos: list[UndoRestore] = []
    for name, facts in stored.items():
        path = name.removeprefix("optim/")
        if path == name or not hasattr(torch, facts.dtype):
            continue
        owner_name = path.rpartition("/")[0]
        owner = parameters.get(owner_name)
        if owner is not None:
            path = f"state/{path}"
        try:
            get_holder, key = _build_dictionary_getter(optimizer, parameters, path)
        except (KeyError, IndexError, ValueError):
            # A tensor of another optimizer: loading reports it as a mismatch.
            continue
        holder = get_holder()
        if not _is_tensor(holder.get(key)):
            undos.append(_build_undo_function(optimizer, holder, key))
            full_shape = (full_shapes or {}).get(owner_name)
            holder[key] = _make_zero_slot(optimizer, owner, full_shape, facts)
    return undos


def _list_optimizer_values(
    optimizer: torch.optim.Optimizer, named_parameters: NamedParameters
) -> Iterator[OptimizerValue]:
    """All values of the optimizer. Raises CheckpointError for one that no checkpoint could name."""
    yield from _iterate_group_entries(optimizer)
    names = {id(parameter): full_name(name) for name, parameter in named_parameters}
    for owner, value in optimizer.state.items():
        if isinstance(owner, torch.Tensor):
            if id(owner) not in names:
                raise _build_unsaveable_value_error(
                    optimizer,
                    f"state of a {list(owner.shape)} tensor that is no parameter of the model",
                )
            yield from _iterate_slots(optimizer, f"state/{names[id(owner)]}", value)
        elif not isinstance(owner, str) or "/" in owner:
            raise _build_unsaveable_value_error(
                optimizer, f"state[{reprlib.repr(owner)}], whose key is no plain name"
            )
        elif isinstance(value, dict):
            yield from _iterate_slots(optimizer, f"own/{owner}", value)
        else:
            yield OptimizerValue(f"own/{owner}", optimizer.state, owner, value)


def _iterate_group_entries(optimizer: torch.optim.Optimizer) -> Iterator[OptimizerValue]:
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key not in _JOB_OWNED_KEYS:
                yield OptimizerValue(f"group/{index}/{key}", group, key, value)


def _iterate_slots(
    optimizer: torch.optim.Optimizer, path: str, slots: dict[Any, Any]
) -> Iterator[OptimizerValue]:
    for slot, value in slots.items():
        if not isinstance(slot, str) or "/" in slot:
            raise _build_unsaveable_value_error(
                optimizer, f"{path}[{reprlib.repr(slot)}], whose key is no plain name"
            )
        yield OptimizerValue(f"{path}/{slot}", slots, slot, value)


def _build_dictionary_getter(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], path: str
) -> tuple[GetStateDict, str]:
    """A function that returns (and makes) the dictionary that `path` means, and the key in it.

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
    if not owner:
        return lambda: optimizer.state, slot
    return lambda: optimizer.state.setdefault(owner, {}), slot


def _set_value(holder: GetStateDict, key: str, value: Any) -> None:
    holder()[key] = value


def _build_undo_function(
    optimizer: torch.optim.Optimizer, holder: dict[Any, Any], key: str
) -> UndoRestore:
    had_key, before = key in holder, holder.get(key)

    def undo() -> None:
        if had_key:
            holder[key] = before
        else:
            del holder[key]
        if holder:
            return
        # An optimizer may ask only whether it has a dictionary for a parameter, and take an empty
        # one for its state.
        for owner in [owner for owner, slots in optimizer.state.items() if slots is holder]:
            del optimizer.state[owner]

    return undo


def _make_zero_slot(
    optimizer: torch.optim.Optimizer,
    owner: nn.Parameter | None,
    full_shape: tuple[int, ...] | None,
    facts: StoredTensorSpec,
) -> torch.Tensor:
    """A tensor of zeros for a slot: cut as its parameter is if the stored one has the parameter's
    `full_shape`, else not cut. Single numbers lie on the device where torch would have put them."""
    dtype = getattr(torch, facts.dtype)
    shape = tuple(facts.shape)
    if owner is not None and shape and shape == (full_shape or tuple(owner.shape)):
        return torch.zeros_like(owner, dtype=dtype, requires_grad=False)
    groups = optimizer.param_groups
    group = next((g for g in groups if any(p is owner for p in g["params"])), groups[0])
    device = torch.device("cpu")
    # torch's optimizers count steps on the CPU, but for kernels that read the count on the GPU.
    if facts.shape or group.get("fused") or group.get("capturable"):
        device = group["params"][0].device
    return torch.zeros(facts.shape, dtype=dtype, device=device)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _encode_value_as_json(value: Any) -> Any:
    """`value` as JSON, from which `_decode_value_from_json` makes an equal one. Raises
    ValueError."""
    if value is None:
        return None
    return _encode_item_as_json(value)


def _encode_item_as_json(value: Any) -> Any:
    # JSON has no NaN and no infinities.
    if isinstance(value, int | float) and math.isfinite(value):
        return value
    if isinstance(value, list):
        return list(map(_encode_item_as_json, value))
    if isinstance(value, tuple):
        return {_JSON_TUPLE_KEY: list(map(_encode_item_as_json, value))}
    raise ValueError


def _decode_value_from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(map(_decode_value_from_json, value[_JSON_TUPLE_KEY]))
    if isinstance(value, list):
        return list(map(_decode_value_from_json, value))
    return value


def _build_unsaveable_value_error(optimizer: torch.optim.Optimizer, value: str) -> CheckpointError:
    return CheckpointError(
        f"{type(optimizer).__name__} keeps {value}",
        why="a checkpoint holds tensors, finite numbers, and lists of such numbers",
        fix="keep it as one of these, under the optimizer's parameters or under names",
    )


def _deepcopy_if_possible(value: Any) -> Any:
    """A deep copy of `value`; _UNCOMPARABLE if it holds tensors or cannot be copied."""
    if _holds_tensor(value):
        return _UNCOMPARABLE
    try:
        return copy.deepcopy(value)
    # An object of the user's own may raise anything when it is copied.
    except Exception:
        return _UNCOMPARABLE


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_tensor, value.values()))
    return _is_tensor(value) or (
        isinstance(value, list | tuple | set) and any(map(_holds_tensor, value))
    )


def _is_equal_value(before: Any, now: Any) -> bool:
    try:
        return bool(before == now)
    # An object of the user's own may raise anything when it is compared, too.
    except Exception:
        return False
