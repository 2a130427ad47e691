"""fp16: gradients are rounded to half precision and added up in it.

Half the bytes; four digits, a small range.

So each gradient is first brought into that range by a power of two that all ranks agree on: as the
mean over many tokens its elements are often below 6e-8, which fp16 makes zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.parallel.hooks._protocol import CompressionOptions, Gradient
from phalanx.parallel.wire import Wire

# The sum over ranks stays below this; fp16 ends at 65504.
MAX_FP16_SUM_MAGNITUDE = 2.0**15


class Fp16GradientCompression:
    keeps_error = False

    def shared_slots(self, name: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        return {}

    def reduce(self, gradients: Sequence[Gradient], wire: Wire) -> list[torch.Tensor]:
        limits = torch.stack([_compute_largest_magnitude(g.tensor) for g in gradients])
        wire.max_over_ranks(limits)
        # A gradient of zeros gets a large scale, not an infinite one; an infinite limit makes the
        # scale 0, and the gradient NaN on all ranks.
        scales = torch.exp2(
            torch.floor(
                torch.log2(MAX_FP16_SUM_MAGNITUDE / wire.num_ranks / limits.clamp(min=2.0**-100))
            )
        )
        rounded = torch.cat(
            [(g.tensor * s).reshape(-1).half() for g, s in zip(gradients, scales, strict=True)]
        )
        wire.sum_over_ranks(rounded)
        parts = rounded.split([g.tensor.numel() for g in gradients])
        for gradient, part, scale in zip(gradients, parts, scales, strict=True):
            gradient.tensor.copy_(part.view_as(gradient.tensor)).div_(scale * wire.num_ranks)
        return []


def _compute_largest_magnitude(tensor: torch.Tensor) -> torch.Tensor:
    """The largest magnitude; infinite for one that is not a number, which a maximum over ranks
    would lose."""
    largest = tensor.abs().amax().float()
    return torch.where(largest.isfinite(), largest, torch.inf)


def build(settings: CompressionOptions) -> Fp16GradientCompression:
    return Fp16GradientCompression()
