"""topk: of each gradient only the largest elements are sent, with their places; the others wait
(Lin et al. 2018).

Every rank has its own largest ones, so they are gathered, not added on the way: 8 bytes for each
element that is sent, to each of the other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.parallel.hooks._protocol import CompressionOptions, Gradient
from phalanx.parallel.wire import Wire

KEEPS_ERROR = True


class TopK:
    keeps_error = KEEPS_ERROR

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction

    def shared_slots(self, name: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        return {}

    def count_elements_to_send(self, num_elements: int) -> int:
        return max(1, round(self._fraction * num_elements))

    def reduce(self, gradients: Sequence[Gradient], wire: Wire) -> list[torch.Tensor]:
        counts = [self.count_elements_to_send(g.tensor.numel()) for g in gradients]
        flats = [g.tensor.reshape(-1) for g in gradients]
        places = [
            flat.abs().topk(count, sorted=False).indices
            for flat, count in zip(flats, counts, strict=True)
        ]
        values = wire.gather(
            torch.cat([flat[chosen] for flat, chosen in zip(flats, places, strict=True)])
        )
        # As int32 a place costs no more than an fp32 value.
        all_places = wire.gather(torch.cat(places).to(torch.int32))
        errors = [
            flat.index_fill(0, chosen, 0.0) for flat, chosen in zip(flats, places, strict=True)
        ]
        by_gradient = zip(
            gradients, values.split(counts, dim=1), all_places.split(counts, dim=1), strict=True
        )
        for gradient, rank_values, where in by_gradient:
            total = torch.zeros_like(gradient.tensor).view(-1)
            # One rank after the other: within a rank's values no place is there twice.
            for row, chosen in zip(rank_values, where.long(), strict=True):
                total[chosen] += row
            gradient.tensor.copy_(total.view_as(gradient.tensor)).div_(wire.num_ranks)
        return [k.view_as(g.tensor) for k, g in zip(errors, gradients, strict=True)]


def build(settings: CompressionOptions) -> TopK:
    return TopK(settings.fraction)
