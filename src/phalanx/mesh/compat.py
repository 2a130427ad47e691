"""What differs between torch 2.11 and 2.13, and what torch says too loudly.

The only file that asks for a version.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import debug as tensor_debug
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

_SELECTIVE_RECOMPUTE_MODES = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)
_fsdp_gathers_in_place = False
TORCH_VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def silence_torch_warnings() -> None:
    """Hide warnings that torch raises about its own internals and that a user can do nothing
    about."""
    for message in (
        # Torch 2.13 has new names for these two and warns of the old ones; 2.11 has the old ones
        # only.
        r".*all_gather_into_tensor.*",
        r".*reduce_scatter_tensor.*",
        # No device_id is given, on purpose: see `rendezvous.open_default_group`.
        r".*(No device id is provided|barrier\(\): using the device).*",
    ):
        warnings.filterwarnings("ignore", message=message, module=r"torch\.")


def clear_dtensor_caches() -> None:
    """Forget what DTensor has found out about operators on device meshes, and so the meshes."""
    tensor_debug._clear_sharding_prop_cache()


@contextlib.contextmanager
def using_default_group_timeout(timeout: datetime.timedelta) -> Iterator[None]:
    """Process groups that are opened in the body without a timeout of their own get this one.

    Torch gives them 30 minutes (NCCL 10), whatever the default group has, and device meshes, which
    open most of them, take no timeout. These are the two private names that it reads for each new
    group.
    """
    names = ("default_pg_timeout", "default_pg_nccl_timeout")
    before = {name: getattr(distributed_c10d, name) for name in names}
    for name in names:
        setattr(distributed_c10d, name, timeout)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(distributed_c10d, name, value)


def set_timeout_of_mesh_groups(mesh: DeviceMesh, timeout: datetime.timedelta) -> None:
    """Give every group of `mesh`, and of what was flattened of it, this timeout for a
    collective."""
    groups = [*mesh.get_all_groups()]
    for flattened in mesh._flatten_mapping.values():
        groups += flattened.get_all_groups()
    for group in groups:
        distributed_c10d._set_pg_timeout(timeout, group)


def build_ddp_buffer_option(sync: bool) -> dict[str, bool]:
    """DDP's switch for copying rank 0's buffers at each forward; torch 2.13 renamed it and warns
    about the old name."""
    name = "forward_sync_buffers"
    if name not in inspect.signature(DistributedDataParallel.__init__).parameters:
        name = "broadcast_buffers"
    return {name: sync}


def make_fsdp_reduce_unused_parameters(root: torch.nn.Module) -> None:
    """Have FSDP2 reduce zeros for a trained parameter below `root` without a gradient, which other
    ranks may have used.

    Torch 2.11 cannot, and aborts in the reduce-scatter when ranks disagree. Torch 2.13 can, but its
    zeros have the type of the weights: it refuses them beside gradients of several microbatches,
    which have the type of the reduction.
    """
    _get_fsdp_state(root)._state_ctx.all_states = _EachOnce()
    for group in _list_fsdp_groups_below(root):
        group.post_backward = functools.partial(
            _fill_gradients_and_continue, group, group.post_backward
        )


class _EachOnce(list[Any]):
    """FSDP2's list of units, which it fills in its first forward. Torch 2.11 lists one of several
    modules once for each, and would end its backward, with a reduction of zeros, as often."""

    def append(self, unit: Any) -> None:
        if unit not in self:
            super().append(unit)


def _fill_gradients_and_continue(group: Any, post_backward: Any, *args: Any) -> None:
    if group.reduce_grads:
        # FSDP makes its whole parameter when it first gathers one.
        trained = [
            parameter
            for parameter in group.fsdp_params
            if parameter.sharded_param.requires_grad and hasattr(parameter, "_unsharded_param")
        ]
        is_accumulated = any(each.unsharded_accumulated_grad is not None for each in trained)
        for parameter in trained:
            if _get_unsharded_fsdp_gradient(parameter) is None:
                whole = parameter._unsharded_param
                whole.grad = torch.zeros_like(whole)
            if is_accumulated and parameter.unsharded_accumulated_grad is None:
                parameter.to_accumulated_grad_if_needed()
    post_backward(*args)


def watch_fsdp_gradients(
    root: torch.nn.Module, note: Callable[[torch.nn.Parameter, bool], None]
) -> None:
    """Call `note(parameter, has_gradient)` for each trained parameter below `root` when FSDP2 is
    about to reduce or to keep the gradients of its unit: zeros stand for what is not there.

    The method of a unit's parameters that FSDP calls after a backward, private in torch (2.11 to
    2.13).
    """
    for group in _list_fsdp_groups_below(root):
        group.post_backward = functools.partial(
            _note_gradients_and_continue, group, group.post_backward, note
        )


def _note_gradients_and_continue(
    group: Any, post_backward: Any, note: Callable[[torch.nn.Parameter, bool], None], *args: Any
) -> None:
    for parameter in group.fsdp_params:
        if parameter.sharded_param.requires_grad:
            note(parameter.sharded_param, _get_unsharded_fsdp_gradient(parameter) is not None)
    post_backward(*args)


def watch_fsdp_places_of_parameters(
    root: torch.nn.Module, note: Callable[[torch.nn.Module, str], None]
) -> None:
    """Call `note(module, name)` for each trained parameter below `root` that is not FSDP2's own
    where FSDP2 sets it in its module, as it does before and after each use.

    The methods of a unit's parameters that do so, private in torch (2.11 to 2.13).
    """
    for group in _list_fsdp_groups_below(root):
        _FsdpPlaces(group, note).watch()


def list_fsdp_places_of_others(root: torch.nn.Module) -> list[tuple[torch.nn.Module, str]]:
    """(module, name in it) of trained parameters below `root` that are not FSDP2's own now."""
    return [
        (module, name)
        for group in _list_fsdp_groups_below(root)
        for _, module, name in _list_foreign_places(_list_fsdp_places(group))
    ]


# One of FSDP's parameters, and a place of it: (module, name in it). Tied ones have several.
_FsdpPlace: TypeAlias = tuple[Any, torch.nn.Module, str]


class _FsdpPlaces:
    """The places of the parameters of FSDP2's `group`, looked at when it sets others in them:
    several times a step, for each parameter."""

    def __init__(self, group: Any, note: Callable[[torch.nn.Module, str], None]) -> None:
        self._group, self._note = group, note
        self._places = _list_fsdp_places(group)
        self._set_unsharded, self._set_sharded = group._to_unsharded, group._to_sharded

    def watch(self) -> None:
        self._group._to_unsharded = self._look_and_set_unsharded
        self._group._to_sharded = self._look_and_set_sharded

    def _look_and_set_unsharded(self) -> None:
        suspects: list[_FsdpPlace] = []
        try:
            if not self._group.is_unsharded:
                suspects = [
                    (parameter, module, name)
                    for parameter, module, name in self._places
                    if module._parameters.get(name) is not parameter.sharded_param
                ]
        except Exception:
            # What a user's module makes of its table is no reason to end a training.
            pass
        self._set_and_note(self._set_unsharded, suspects)

    def _look_and_set_sharded(self) -> None:
        suspects: list[_FsdpPlace] = []
        try:
            if not self._group.is_sharded:
                suspects = [
                    (parameter, module, name)
                    for parameter, module, name in self._places
                    if module._parameters.get(name) is not parameter._unsharded_param
                ]
        except Exception:
            pass
        self._set_and_note(self._set_sharded, suspects)

    def _set_and_note(self, set_in_modules: Any, suspects: list[_FsdpPlace]) -> None:
        if not suspects:
            set_in_modules()
            return
        foreign = _list_foreign_places(suspects)
        set_in_modules()
        for parameter, module, name in foreign:
            # A module with its own way to set attributes may keep FSDP's elsewhere: what was found
            # has then taken the place of nothing.
            if _is_set_by_fsdp(parameter, _find_attribute(module, name)):
                self._note(module, name)


def _list_fsdp_places(group: Any) -> list[_FsdpPlace]:
    """All places of the parameters of a group, without those in modules of torch.jit, which keep
    parameters outside of Python."""
    places = []
    for parameter in group.fsdp_params:
        info = parameter._module_info
        shared = zip(info.shared_modules, info.shared_param_names, strict=True)
        for module, name in [(info.module, info.param_name), *shared]:
            if isinstance(vars(module).get("_parameters"), dict):
                places.append((parameter, module, name))
    return places


def _list_foreign_places(places: list[_FsdpPlace]) -> list[_FsdpPlace]:
    """Those in which something else than FSDP's own is, where either is trained."""
    foreign = []
    for parameter, module, name in places:
        value = _find_attribute(module, name)
        is_trained = parameter.sharded_param.requires_grad or (
            isinstance(value, torch.Tensor) and value.requires_grad
        )
        if is_trained and not _is_set_by_fsdp(parameter, value):
            foreign.append((parameter, module, name))
    return foreign


def _find_attribute(module: torch.nn.Module, name: str) -> Any:
    """What a module has under `name`, without computing a property. None if that is not known."""
    table = vars(module).get("_parameters")
    return vars(module).get(name, table.get(name) if isinstance(table, dict) else None)


def _is_set_by_fsdp(parameter: Any, value: Any) -> bool:
    names = ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")
    # Some are made when they are needed first.
    return any(value is getattr(parameter, name, parameter) for name in names)


def get_fsdp_communication_classes() -> tuple[type, type]:
    """FSDP2's exchangeable communication, to be subclassed: (all-gather, reduce-scatter).

    A private module in torch.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
        DefaultAllGather,
        DefaultReduceScatter,
    )

    return DefaultAllGather, DefaultReduceScatter


def list_fsdp_parameters(root: torch.nn.Module) -> list[Any]:
    """FSDP2's own parameters of all units below `root`, in the order of modules. Private in torch.

    By modules: the list of units that FSDP2 itself keeps is empty until the first forward.
    """
    return [p for group in _list_fsdp_groups_below(root) for p in group.fsdp_params]


def _list_fsdp_groups_below(root: torch.nn.Module) -> list[Any]:
    states = [_get_fsdp_state(each) for each in root.modules() if isinstance(each, FSDPModule)]
    # Modules that are one unit have one state.
    units = dict.fromkeys(states)
    return [group for unit in units for group in _list_groups_of_fsdp_state(unit)]


def let_fsdp_gather_in_place() -> None:
    """Have FSDP2 ask the all-gather of a unit first whether it can fill the unit's parameters by
    itself: one with a method `post_in_place(parameters, group)`, which returns a Work, or None
    where it cannot.

    FSDP's exchangeable all-gather fills a message, and FSDP copies parameters out of that; so the
    two functions that do this are wrapped where FSDP looks them up (2.11 to 2.13).
    """
    global _fsdp_gathers_in_place
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult

    if _fsdp_gathers_in_place:
        return
    _fsdp_gathers_in_place = True

    gather, copy_out = (
        _fsdp_param_group.foreach_all_gather,
        _fsdp_param_group.foreach_all_gather_copy_out,
    )

    class PostedInPlace(AllGatherResult):
        pass

    @functools.wraps(gather)
    def gather_in_place_or_by_message(
        fsdp_params: list[Any], group: Any, async_op: bool, *rest: Any
    ) -> Any:
        post = getattr(rest[-1], "post_in_place", None)
        work = None if post is None else post(fsdp_params, group)
        if work is None:
            return gather(fsdp_params, group, async_op, *rest)
        return PostedInPlace(torch.empty(0), None, work, [], [], [])

    @functools.wraps(copy_out)
    def wait_or_copy_out(result: Any, fsdp_params: list[Any], group: Any) -> None:
        if isinstance(result, PostedInPlace):
            result.all_gather_work.wait()
        else:
            copy_out(result, fsdp_params, group)

    _fsdp_param_group.foreach_all_gather = gather_in_place_or_by_message
    _fsdp_param_group.foreach_all_gather_copy_out = wait_or_copy_out


def run_fsdp_post_backward(root: torch.nn.Module) -> None:
    """Reduce and free what FSDP2 has kept whole over several backwards, as its own hooks do after a
    last one.

    torch's pipelining calls the same private methods (PipelineStage.perform_reduce_grad).
    """
    state = _get_fsdp_state(root)
    for group in _list_fsdp_parameter_groups(state):
        group.post_backward()
    state._root_post_backward_final_callback()


def add_written_gradients_to_fsdp(root: torch.nn.Module) -> None:
    """Add gradients that were written by hand to those that FSDP2 accumulates, in the type it
    reduces in."""
    for group in _list_fsdp_parameter_groups(_get_fsdp_state(root)):
        for parameter in group.fsdp_params:
            # FSDP makes it when it first gathers a parameter.
            if hasattr(parameter, "_unsharded_param"):
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()


def adds_to_fsdp_gradients(unit: torch.nn.Module, dtype: torch.dtype) -> bool:
    """True if FSDP2 computes something of a unit's reduced gradients of type `dtype`: adds them to
    others, casts them, or calls hooks of a parameter."""
    for group in list_fsdp_groups(unit):
        for parameter in group.fsdp_params:
            sharded = parameter.sharded_param
            if sharded.grad is not None or parameter.orig_dtype != dtype:
                return True
            if getattr(sharded, "_post_accumulate_grad_hooks", None):
                return True
    return False


def reduces_over_fsdp_copies(unit: torch.nn.Module) -> bool:
    """True if the next reduction of a unit's gradients goes over the copies of its shards, too;
    where there are any."""
    return any(each.all_reduce_grads for each in list_fsdp_groups(unit))


def list_unsharded_fsdp_gradients(root: torch.nn.Module) -> list[torch.Tensor]:
    """Gradients that FSDP2 keeps whole between backwards, for a reduction that comes later."""
    gradients = []
    for group in _list_fsdp_parameter_groups(_get_fsdp_state(root)):
        for parameter in group.fsdp_params:
            gradient = _get_unsharded_fsdp_gradient(parameter)
            if gradient is not None:
                gradients.append(gradient)
    return gradients


def _get_unsharded_fsdp_gradient(parameter: Any) -> torch.Tensor | None:
    gradient: torch.Tensor | None = parameter.unsharded_accumulated_grad
    if gradient is None and hasattr(parameter, "_unsharded_param"):
        gradient = parameter._unsharded_param.grad
    return gradient


def _get_fsdp_state(root: torch.nn.Module) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard.state(root)  # type: ignore[attr-defined]


def _list_fsdp_parameter_groups(state: Any) -> Iterator[Any]:
    for unit in state._state_ctx.all_states:
        yield from _list_groups_of_fsdp_state(unit)


def list_fsdp_groups(unit: torch.nn.Module) -> list[Any]:
    """FSDP2's own groups of parameters of a unit. Private in torch."""
    return _list_groups_of_fsdp_state(_get_fsdp_state(unit))


def _list_groups_of_fsdp_state(state: Any) -> list[Any]:
    """torch 2.13 may have several groups of parameters per unit, 2.11 has one or none."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return list(groups)


def cut_and_concatenate_chunks(tensors: Sequence[torch.Tensor], num_chunks: int) -> torch.Tensor:
    """[chunks, elements]: row r has chunk r of each of `tensors`, cut along their first dimension
    as torch.chunk cuts, and filled up with zeros to the size of the first chunk."""
    return torch._chunk_cat(list(tensors), dim=0, num_chunks=num_chunks)


def wrap_local_as_dtensor(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], like: torch.Tensor
) -> DTensor:
    """A DTensor of the global shape of `like` around `local`, which is neither copied nor moved to
    the mesh's device (`DTensor.from_local` would: here it may lie on the host)."""
    spec = DTensorSpec(
        mesh, tuple(placements), tensor_meta=TensorMeta(like.shape, like.stride(), like.dtype)
    )
    return DTensor(local, spec, requires_grad=local.requires_grad)


def wrap_local_with_same_placements(like: DTensor, local: torch.Tensor) -> DTensor:
    """The same parts of another tensor (a gradient, say)."""
    return wrap_local_as_dtensor(local, like.device_mesh, like.placements, like)


def hide_fsdp_hooks_from_recompute(unit: FSDPModule) -> None:
    """Hide FSDP's hooks of a unit from torch's selective recomputation, inside of a block that is
    recomputed in part: the recomputation then does not count their operations. Every other mode,
    that of a dry run too, sees them.

    Hooks in a module's own tables, which torch fills (2.11 to 2.13).
    """
    assert isinstance(unit, torch.nn.Module)
    for table in (unit._forward_pre_hooks, unit._forward_hooks):
        for key, hook in table.items():
            # FSDP's hooks are methods of its state; hooks of the user's own stay visible.
            if type(getattr(hook, "__self__", None)).__name__ == "FSDPState":
                table[key] = _run_hook_without_recompute_modes(hook)


def _run_hook_without_recompute_modes(hook: Any) -> Any:
    @functools.wraps(hook)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _without_modes_of_selective_recompute():
            return hook(*args, **kwargs)

    return run


@contextlib.contextmanager
def _without_modes_of_selective_recompute() -> Iterator[None]:
    """Inside, the modes that torch's selective checkpointing has entered are not there; the other
    modes are, in their order."""
    modes = _get_current_dispatch_mode_stack()
    other_modes = [mode for mode in modes if not isinstance(mode, _SELECTIVE_RECOMPUTE_MODES)]
    if len(other_modes) == len(modes):
        yield
        return
    _replace_modes(modes, other_modes)
    try:
        yield
    finally:
        _replace_modes(other_modes, modes)


def _replace_modes(before: Sequence[TorchDispatchMode], after: Sequence[TorchDispatchMode]) -> None:
    for _ in before:
        _pop_mode()
    for mode in after:
        _push_mode(mode)
