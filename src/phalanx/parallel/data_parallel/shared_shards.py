"""FSDP2 between ranks that share memory: shards lie where the other ranks read them, and a unit's
parameters are gathered by one copy of each, straight to where its modules use them.

FSDP2 itself copies a shard into a message, gathers messages, and copies parameters out of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from phalanx.core.phases import PhaseTimer
from phalanx.mesh.compat import list_fsdp_parameters
from phalanx.mesh.shared_memory.in_place import GatheredTensor, PlacesOfAllRanks
from phalanx.mesh.shared_memory.opening import current_transport, find_transport_in_place
from phalanx.mesh.shared_memory.transport import SharedMemoryTransport
from phalanx.mesh.shared_memory.work import SharedMemoryWork


@torch.no_grad()
def move_shards_to_shared_memory(root: nn.Module, group: dist.ProcessGroup) -> None:
    """Have the shards of this rank lie where others read them, if there is such memory. Before
    anybody keeps a view of one."""
    transport = find_transport_in_place(group)
    if transport is None:
        return
    for parameter in list_fsdp_parameters(root):
        flat, local = parameter._sharded_param_data, parameter._sharded_local_tensor
        if not _is_plain(parameter) or not flat.is_cpu:
            continue
        shared = transport.make_tensor(flat.numel(), flat.dtype)
        if shared is None:
            return
        shared.copy_(flat)
        # Both are views of one storage: the shard with its padding, and without.
        for view in (local, flat):
            offset = view.storage_offset() - flat.storage_offset()
            view.data = torch.as_strided(shared, view.shape, view.stride(), offset)


class UnchangedShards:
    """The shards of all ranks in forward and backward of a microbatch: nobody changes them.

    Ranks wait for each other before the first gather of a process group, and tell where their
    shards lie; after that each reads the others' when it needs them. A rank changes its shards
    after the last reduction of gradients, which waits for all ranks and so for all that they read.
    Units with a frozen parameter are waited for each time: a module that averages another one's
    weights writes them in its forward.
    """

    def __init__(self, root: nn.Module, phases: PhaseTimer) -> None:
        self._root, self._phases, self._is_open = root, phases, False
        self._reductions: list[SharedMemoryWork] = []
        # By name of the process group.
        self._places: dict[str, PlacesOfAllRanks] = {}
        # By the identity of FSDP's parameters, which are listed once.
        self._shards: list[Any] = []
        self._indices: dict[int, int] = {}

    @contextmanager
    def in_microbatch(self) -> Iterator[None]:
        """Forward and backward of a microbatch; all of its reductions have ended then."""
        self._is_open = True
        try:
            yield
            self.wait_for_reductions()
        finally:
            self._is_open = False
            self._places.clear()
            self._forget_reductions()

    @torch.no_grad()
    def post_gather(
        self, parameters: Sequence[Any], group: dist.ProcessGroup
    ) -> SharedMemoryWork | None:
        """Begin to gather FSDP's `parameters` to where their modules use them; None if ranks of
        `group` do not share memory, or one of them is no plain shard."""
        transport = find_transport_in_place(group)
        if transport is None or not all(_is_shard(each) for each in parameters):
            return None
        gathered = []
        for parameter in parameters:
            shard = parameter._sharded_param_data
            dtype = parameter.param_dtype or shard.dtype
            parameter.init_all_gather_outputs([shard.numel()], [dtype], group.size(), shard.device)
            parameter.alloc_all_gather_outputs()
            rows = _list_rows(parameter, group.size())
            gathered.append(GatheredTensor(shard, rows, [0] * group.size()))
        if self._is_open and not any(_may_change_within_step(each) for each in parameters):
            places = self._find_places(transport, group)
            indices = [self._indices[id(parameter)] for parameter in parameters]
            if places.are_seen(indices):
                return transport.gather_without_waiting(group, gathered, places, indices)
        return transport.gather_in_place(group, gathered)

    def _find_places(
        self, transport: SharedMemoryTransport, group: dist.ProcessGroup
    ) -> PlacesOfAllRanks:
        if not self._shards:
            self._shards = list_fsdp_parameters(self._root)
            self._indices = {id(parameter): at for at, parameter in enumerate(self._shards)}
        places = self._places.get(group.group_name)
        if places is None:
            # Of all units at once, also of those over other groups: who asks needs no list of each.
            data = [parameter._sharded_param_data for parameter in self._shards]
            places = self._places[group.group_name] = transport.find_places_of_all_ranks(
                group, data
            )
        return places

    def keep_open(self, reduction: SharedMemoryWork) -> bool:
        """Leave a reduction of gradients open until the next one, or the end of the microbatch;
        False where somebody may want its result at once."""
        if not self._is_open:
            return False
        self._reductions.append(reduction)
        return True

    def wait_for_reductions(self) -> None:
        """Return when all that were left open have ended."""
        if not self._reductions:
            return
        with self._phases.collective("reduce_scatter gradients", axis="dp"):
            while self._reductions:
                self._reductions.pop(0).wait()

    def _forget_reductions(self) -> None:
        """After an error: what is still open may end later, and write to gradients."""
        if not self._reductions:
            return
        self._reductions.clear()
        for parameter in self._shards:
            parameter.sharded_param.grad = None


class ScatteredMessages:
    """The messages that FSDP fills with a unit's gradients and has scattered: they lie where other
    ranks read them."""

    def __init__(self, shards: UnchangedShards) -> None:
        self._shards = shards
        # FSDP asks for the message and then for its result.
        self._is_message_made = False

    def make_message(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Memory for a message that others see; None for its result, and where there is none."""
        self._is_message_made = not self._is_message_made
        transport = current_transport()
        if transport is None or not transport.shows_tensors or not self._is_message_made:
            return None
        return transport.make_tensor(num_elements, dtype, is_reused=True)

    def reduce_scatter(
        self,
        result: torch.Tensor,
        message: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        *,
        may_end_later: bool,
    ) -> bool:
        """Reduce this rank's part of all messages into `result`, which is filled when this returns,
        or if it `may_end_later` at the end of the microbatch. False, and nothing is done, if ranks
        of `group` do not share memory."""
        self._is_message_made = False
        transport = find_transport_in_place(group)
        if transport is None:
            return False
        reduce_op = "avg" if op == dist.ReduceOp.AVG else "sum"
        rows = message.view(group.size(), -1)
        work = transport.reduce_scatter_in_place(group, result, rows, reduce_op)
        if not may_end_later or not self._shards.keep_open(work):
            work.wait()
        return True


def _list_rows(parameter: Any, num_ranks: int) -> list[torch.Tensor]:
    """The part of each rank in the whole parameter, which FSDP keeps flat."""
    # Its version says to autograd whether somebody has changed it: to gather it changes nothing.
    full_parameter = parameter.all_gather_outputs[0].data
    dim = parameter.fsdp_placement.dim
    if dim == 0:
        return list(full_parameter.view(num_ranks, -1))
    shape = list(parameter.padded_sharded_param_size)
    shape[dim] *= num_ranks
    return list(full_parameter.view(shape).chunk(num_ranks, dim=dim))


def _may_change_within_step(parameter: Any) -> bool:
    """True for a parameter that a module's forward may write, or a hook after its gradient."""
    sharded = parameter.sharded_param
    return not sharded.requires_grad or bool(getattr(sharded, "_post_accumulate_grad_hooks", None))


def _is_shard(parameter: Any) -> bool:
    return _is_plain(parameter) and parameter.sharded_state.name == "SHARDED"


def _is_plain(parameter: Any) -> bool:
    """False for tensors that say themselves how they are gathered, and for those on the host of an
    accelerator."""
    local = parameter._sharded_local_tensor
    return (
        type(local) is torch.Tensor
        and not parameter.offload_to_cpu
        and not hasattr(local, "fsdp_pre_all_gather")
    )
