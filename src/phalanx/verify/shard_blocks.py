"""The blocks of tensors that a rank holds, beside the reference's and by their bits."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import xxhash

from phalanx.mesh.logical import LogicalShard
from phalanx.verify.trace import TraceTensorReader
from phalanx.verify.trace_facts import Trace

Dots = tuple[float, float, float, float, float]
"""Over the elements a rank holds: |a - r|^2, |a|^2, a.r, |r|^2, with `a` the layout's and `r` the
reference's.

The last is |r|^2 again, of a block that several ranks hold while they differ in others (fused keys)
its share. A block of another shape than its place has: infinite, and |a|^2 is -inf.
"""
BlockDigest = tuple[tuple[int, ...], tuple[int, ...], str]
"""(offset and size of a block in the whole tensor, digest of its bits)."""


def compute_block_dots(
    trace: Trace, kind: str, shards: Mapping[str, LogicalShard], *, since: str | None = None
) -> dict[str, Dots]:
    """Dots of each tensor that the reference has, over the blocks of this rank; of the differences
    to the set `since`, if there is one."""
    dots_of: dict[str, Dots] = {}
    with (
        TraceTensorReader(trace, kind) as reader,
        TraceTensorReader(trace, since or kind) as earlier,
    ):
        for name in trace.sizes[kind]:
            if name not in shards:
                continue
            shard, dots = shards[name], torch.zeros(5, dtype=torch.float64)
            for box in shard.boxes:
                actual = shard.tensor[box.slices_in_local_tensor].double().cpu()
                reference_block = reader.block(name, box.global_offset, box.size).double()
                if actual.shape != reference_block.shape:
                    # It stands where no such block is: its size is told as less than nothing.
                    dots += torch.tensor((math.inf, -math.inf, 0.0, 0.0, 0.0), dtype=torch.float64)
                    continue
                if since is not None:
                    before = earlier.block(name, box.global_offset, box.size).double()
                    actual, reference_block = actual - before, reference_block - before
                pairs = (
                    (actual - reference_block, actual - reference_block),
                    (actual, actual),
                    (actual, reference_block),
                    (reference_block, reference_block),
                )
                sums = [(a * b).sum() for a, b in pairs]
                dots += torch.stack((*sums, sums[3] / box.num_replicas))
            dots_of[name] = tuple(dots.tolist())
    return dots_of


def compute_relative_distance(dots: Mapping[str, Dots]) -> float:
    """The error |a - r| / |r| over all tensors."""
    error, size = (sum(values[i] for values in dots.values()) for i in (0, 3))
    if size:
        return float((error / size) ** 0.5)
    return 0.0


def hash_block_bits(shards: Mapping[str, LogicalShard]) -> dict[str, list[BlockDigest]]:
    """A digest of the bits of each block, for each tensor."""
    return {
        name: [
            (
                box.global_offset,
                box.size,
                _hash_tensor_bits(shard.tensor[box.slices_in_local_tensor]),
            )
            for box in shard.boxes
        ]
        for name, shard in shards.items()
    }


def _hash_tensor_bits(tensor: torch.Tensor) -> str:
    # As bytes, for numpy has no bfloat16. torch views only contiguous memory with a dimension so.
    return xxhash.xxh3_64_hexdigest(
        tensor.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().data
    )


def list_shard_boxes(
    shards: Mapping[str, LogicalShard],
) -> dict[str, list[tuple[tuple[int, ...], tuple[int, ...], int]]]:
    """The blocks of each shard, as `RankObservations.boxes` has them."""
    return {
        name: [(box.global_offset, box.size, box.num_replicas) for box in shard.boxes]
        for name, shard in shards.items()
    }


def describe_held_part(shard: LogicalShard) -> str:
    """The part of a tensor that a shard holds: "whole", "nothing", or "[0:16, :] of [64, 32]"."""
    if not shard.boxes:
        return "nothing"
    if len(shard.boxes) == 1 and shard.boxes[0].size == shard.global_shape:
        return "whole"
    parts = []
    for box in shard.boxes:
        spans = [
            ":" if size == length else f"{start}:{start + size}"
            for start, size, length in zip(
                box.global_offset, box.size, shard.global_shape, strict=True
            )
        ]
        parts.append(f"[{', '.join(spans)}]")
    return f"{' and '.join(parts)} of {list(shard.global_shape)}"
