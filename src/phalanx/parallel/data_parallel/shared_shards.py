"""FSDP2 between ranks that share memory: shards lie where the other ranks read them, and a unit's
parameters are gathered by one copy of each, straight to where its modules use them.

FSDP2 itself copies a shard into a message, gathers messages, and copies parameters out of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from phalanx.mesh.compat import list_fsdp_parameters
from phalanx.mesh.shared_memory.in_place import GatheredTensor
from phalanx.mesh.shared_memory.opening import current_transport, find_transport_in_place
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


@torch.no_grad()
def post_in_place_gather(
    parameters: Sequence[Any], group: dist.ProcessGroup
) -> SharedMemoryWork | None:
    """Begin to gather FSDP's `parameters` to where their modules use them; None if ranks of `group`
    do not share memory, or one of them is no plain shard."""
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
    return transport.gather_in_place(group, gathered)


class ScatteredMessages:
    """The messages that FSDP fills with a unit's gradients and has scattered: they lie where other
    ranks read them."""

    def __init__(self) -> None:
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
        self, result: torch.Tensor, message: torch.Tensor, group: dist.ProcessGroup, op: Any
    ) -> bool:
        """Reduce this rank's part of all messages into `result`. False, and nothing is done, if
        ranks of `group` do not share memory."""
        self._is_message_made = False
        transport = find_transport_in_place(group)
        if transport is None:
            return False
        reduce_op = "avg" if op == dist.ReduceOp.AVG else "sum"
        rows = message.view(group.size(), -1)
        transport.reduce_scatter_in_place(group, result, rows, reduce_op).wait()
        return True


def _list_rows(parameter: Any, num_ranks: int) -> list[torch.Tensor]:
    """The part of each rank in the whole parameter, which FSDP keeps flat."""
    # Its version says to autograd whether somebody has changed it: to gather it changes nothing.
    whole = parameter.all_gather_outputs[0].data
    dim = parameter.fsdp_placement.dim
    if dim == 0:
        return list(whole.view(num_ranks, -1))
    shape = list(parameter.padded_sharded_param_size)
    shape[dim] *= num_ranks
    return list(whole.view(shape).chunk(num_ranks, dim=dim))


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
