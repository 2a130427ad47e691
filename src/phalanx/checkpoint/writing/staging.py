"""Memory for one copy of what a rank writes: training changes its tensors while a thread writes
the copy."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace

import torch

from phalanx.mesh.logical import Box, LogicalShard

# Bytes. torch views memory as another dtype only from a multiple of its item size on.
_ALIGNMENT_BYTES = 64


class HostStagingMemory:
    """One block of host memory, pinned where copies come from a GPU, kept from save to save.

    Nothing is allocated before the first copy, and nothing again while the state keeps its size.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        return self._memory.numel()

    def reserve_for_shards(self, shards: Mapping[str, LogicalShard]) -> None:
        """Make room for the blocks of `shards`. Raises MemoryError."""
        needed = sum(
            _round_up_to_alignment(_count_bounding_block_bytes(shard)) for shard in shards.values()
        )
        if needed == self.num_bytes:
            return
        # Released first: two copies at a time may be more than there is memory for.
        self.release()
        try:
            # Pinned: only then does a copy from a GPU not wait for each tensor.
            self._memory = torch.empty(
                needed, dtype=torch.uint8, pin_memory=self._device.type == "cuda"
            )
        except RuntimeError as error:
            # torch raises RuntimeError where the host has no memory.
            raise MemoryError(str(error).splitlines()[0]) from None

    def release(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def copy_shards(self, shards: Mapping[str, LogicalShard]) -> dict[str, LogicalShard]:
        """Copy the blocks to memory that training does not touch; valid until the next copy.

        `reserve` comes before. A shard without blocks gets no storage either, so that no code can
        read by mistake what is still being changed.
        """
        staged, position = {}, 0
        for name, shard in shards.items():
            if not shard.boxes:
                staged[name] = replace(shard, tensor=torch.empty(0, dtype=shard.tensor.dtype))
                continue
            source, boxes = _find_bounding_block(shard)
            num_bytes = source.numel() * source.element_size()
            target = (
                self._memory[position : position + num_bytes].view(source.dtype).view(source.shape)
            )
            # All copies are queued, and waited for once below.
            target.copy_(source, non_blocking=True)
            staged[name] = replace(shard, tensor=target, boxes=boxes)
            position += _round_up_to_alignment(num_bytes)
        # Training may change the tensors as soon as this returns.
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return staged


def _find_bounding_block(shard: LogicalShard) -> tuple[torch.Tensor, tuple[Box, ...]]:
    """The smallest block of the local tensor that holds all boxes, and the boxes relative to it."""
    low, high = _compute_box_bounds(shard)
    part = shard.tensor[tuple(map(slice, low, high))]
    boxes = []
    for box in shard.boxes:
        offset = tuple(map(operator.sub, box.local_offset, low))
        boxes.append(replace(box, local_offset=offset))
    return part, tuple(boxes)


def _compute_box_bounds(shard: LogicalShard) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first and the last index, exclusive, of all boxes in each dimension."""
    low, high = [], []
    for dim in range(len(shard.global_shape)):
        low.append(min(box.local_offset[dim] for box in shard.boxes))
        high.append(max(box.local_offset[dim] + box.size[dim] for box in shard.boxes))
    return tuple(low), tuple(high)


def _count_bounding_block_bytes(shard: LogicalShard) -> int:
    if not shard.boxes:
        return 0
    volume = shard.tensor.element_size()
    for start, stop in zip(*_compute_box_bounds(shard), strict=True):
        volume *= stop - start
    return volume


def _round_up_to_alignment(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
