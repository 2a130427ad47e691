"""int8: blocks of up to 256 elements share a scale; the sum is made in two exchanges of bytes.

A quarter of the bytes.

Each rank quantises its gradient and sends the r-th part to rank r, which adds the parts up in full
precision, quantises the mean, and gathers it to all. So a number crosses the wire twice, as a byte
each time, however many ranks there are. What both roundings lose is kept: the second one's by the
rank that made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from phalanx.parallel.hooks._protocol import CompressionOptions, Gradient
from phalanx.parallel.wire import Wire

BLOCK_ELEMENTS = 256
# On either side of 0: -128 is not used, so that levels are symmetric.
MAX_LEVEL = 127
SCALE_DTYPE = torch.float32
KEEPS_ERROR = True


@dataclass(frozen=True)
class ElementShares:
    """Shares of one gradient's elements: one for each rank, padded to blocks of equal size."""

    num_elements: int
    num_ranks: int

    @property
    def share(self) -> int:
        return -(-self.num_elements // self.num_ranks)

    @property
    def num_blocks(self) -> int:
        return -(-self.share // BLOCK_ELEMENTS)

    @property
    def block(self) -> int:
        return -(-self.share // self.num_blocks)

    def split_into_blocks(self, flat: torch.Tensor) -> torch.Tensor:
        """[elements] -> [ranks, blocks, block], zeros where there is nothing."""
        shares = F.pad(flat, (0, self.num_ranks * self.share - self.num_elements)).view(
            self.num_ranks, self.share
        )
        padded = F.pad(shares, (0, self.num_blocks * self.block - self.share))
        return padded.view(self.num_ranks, self.num_blocks, self.block)

    def flatten_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """The inverse of `blocks`."""
        return blocks.reshape(self.num_ranks, -1)[:, : self.share].reshape(-1)[: self.num_elements]


class Int8:
    keeps_error = KEEPS_ERROR

    def shared_slots(self, name: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        return {}

    def reduce(self, gradients: Sequence[Gradient], wire: Wire) -> list[torch.Tensor]:
        cuts = [ElementShares(g.tensor.numel(), wire.num_ranks) for g in gradients]
        blocks = [
            cut.split_into_blocks(g.tensor.reshape(-1))
            for cut, g in zip(cuts, gradients, strict=True)
        ]
        sent = [_quantise(b) for b in blocks]
        errors = [b - _dequantise(*q, b.dtype) for b, q in zip(blocks, sent, strict=True)]

        arrived = wire.exchange(
            _pack(sent)
        )  # [ranks, bytes]: this rank's share of what each of them has
        shares = _unpack(arrived, cuts)
        means = [_dequantise(*q, b.dtype).mean(0) for b, q in zip(blocks, shares, strict=True)]

        finals = [_quantise(mean[None]) for mean in means]
        for k, mean, final in zip(errors, means, finals, strict=True):
            # In the next step errors are averaged over the ranks: one that a single rank keeps
            # counts so many times.
            k[wire.rank] += wire.num_ranks * (mean - _dequantise(*final, mean.dtype)[0])
        gathered = wire.gather(_pack(finals)[0])
        for gradient, cut, final in zip(gradients, cuts, _unpack(gathered, cuts), strict=True):
            mean = cut.flatten_blocks(_dequantise(*final, gradient.tensor.dtype))
            gradient.tensor.copy_(mean.view_as(gradient.tensor))
        return [
            cut.flatten_blocks(k).view_as(g.tensor)
            for cut, k, g in zip(cuts, errors, gradients, strict=True)
        ]


Quantised = tuple[torch.Tensor, torch.Tensor]
"""(int8 [rows, blocks, block], scales [rows, blocks])."""


def _quantise(blocks: torch.Tensor) -> Quantised:
    """To the nearest of 255 levels.

    A block with anything that is not finite has a scale that is not.
    """
    scales = (blocks.abs().amax(-1) / MAX_LEVEL).to(SCALE_DTYPE)
    # A block of zeros has a scale of 0: it is divided by something else, and stays zero.
    steps = blocks / scales[..., None].to(blocks.dtype).clamp(min=torch.finfo(SCALE_DTYPE).tiny)
    return steps.round().clamp(-MAX_LEVEL, MAX_LEVEL).nan_to_num(0.0).to(torch.int8), scales


def _dequantise(numbers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    wide = scales[..., None].to(dtype)
    return torch.where(wide.isfinite(), numbers.to(dtype) * wide, torch.nan)


def _pack(quantised: Sequence[Quantised]) -> torch.Tensor:
    """[rows, bytes]: all scales, then all numbers."""
    scales = torch.cat([s for _, s in quantised], dim=1).contiguous().view(torch.uint8)
    numbers = torch.cat([n.flatten(1) for n, _ in quantised], dim=1).contiguous().view(torch.uint8)
    return torch.cat((scales, numbers), dim=1)


def _unpack(packed: torch.Tensor, cuts: Sequence[ElementShares]) -> list[Quantised]:
    """The inverse of `_pack`."""
    counts = [cut.num_blocks for cut in cuts]
    edge = sum(counts) * SCALE_DTYPE.itemsize
    scales = packed[:, :edge].contiguous().view(SCALE_DTYPE).split(counts, dim=1)
    numbers = packed[:, edge:].contiguous().view(torch.int8)
    parts = numbers.split([cut.num_blocks * cut.block for cut in cuts], dim=1)
    return [
        (part.reshape(len(packed), cut.num_blocks, cut.block), scale)
        for part, scale, cut in zip(parts, scales, cuts, strict=True)
    ]


def build(settings: CompressionOptions) -> Int8:
    return Int8()
