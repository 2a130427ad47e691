"""Which blocks are recomputed, and how: a plan's choice as data, one stretch of blocks after the
other.

Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.core.errors import LayoutError


@dataclass(frozen=True)
class Segment:
    """Blocks start to stop - 1, counted from 0, that are recomputed together; in no segment: kept.

    full: the input of the first is kept. selective: of each block besides what its matmuls and its
    attention make.
    """

    start: int
    stop: int
    mode: str  # "selective" | "full"

    @property
    def num_blocks(self) -> int:
        return self.stop - self.start

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Segment:
        return cls(body["start"], body["stop"], body["mode"])


def list_recompute_segments(
    recompute: str, num_blocks: int, interval: int = 1
) -> tuple[Segment, ...]:
    """The segments that a mode of `train.recompute` means for a model of `num_blocks` blocks.

    full and selective: each block by itself. every-k: the blocks k, 2k, ..., counted from 1; mixed:
    these in full, the others selectively. sqrt: stretches of ceil(sqrt(num_blocks)) blocks (Chen et
    al. 2016, arXiv 1604.06174). Raises LayoutError if k is larger than `num_blocks`.
    """
    if recompute in ("full", "selective"):
        return tuple(Segment(block, block + 1, recompute) for block in range(num_blocks))
    if recompute in ("every-k", "mixed"):
        if interval > num_blocks:
            raise LayoutError(
                f"train.recompute_every {interval} recomputes nothing in full: the model has"
                f" {num_blocks} blocks",
                fix=f"set train.recompute_every to {num_blocks} at most",
            )
        full = [block % interval == interval - 1 for block in range(num_blocks)]
        return tuple(
            Segment(block, block + 1, "full" if is_full else "selective")
            for block, is_full in enumerate(full)
            if is_full or recompute == "mixed"
        )
    if recompute == "sqrt":
        # The ceiling of the root in whole numbers: no rounding of floats.
        length = 1
        if num_blocks:
            length = math.isqrt(num_blocks - 1) + 1
        starts = range(0, num_blocks, length)
        return tuple(Segment(start, min(start + length, num_blocks), "full") for start in starts)
    assert recompute == "none", recompute
    return ()


def mix_recompute_modes(num_blocks: int, num_selective: int, num_full: int) -> tuple[Segment, ...]:
    """The first `num_full` blocks in full, the next `num_selective` selectively, the rest kept."""
    # The first ones, because what the last blocks keep is freed before these are recomputed.
    modes = ["full"] * num_full + ["selective"] * min(num_selective, num_blocks - num_full)
    return tuple(Segment(block, block + 1, mode) for block, mode in enumerate(modes))
