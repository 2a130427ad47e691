"""bf16: gradients are rounded to bfloat16 and added up in it.

Half the bytes; three digits, the range of fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.parallel.hooks._protocol import CompressionOptions, Gradient
from phalanx.parallel.wire import Wire


class Bf16:
    keeps_error = False

    def shared_slots(self, name: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        return {}

    def reduce(self, gradients: Sequence[Gradient], wire: Wire) -> list[torch.Tensor]:
        rounded = torch.cat([g.tensor.reshape(-1).to(torch.bfloat16) for g in gradients])
        wire.sum_over_ranks(rounded)
        parts = rounded.split([g.tensor.numel() for g in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.tensor.copy_(part.view_as(gradient.tensor)).div_(wire.num_ranks)
        return []


def build(settings: CompressionOptions) -> Bf16:
    return Bf16()
