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

ELEMENTS_PER_SCALE = 256
# On either side of 0: -128 is not used, so that levels are symmetric.
MAX_QUANTISED_LEVEL = 127
SCALE_DTYPE = torch.float32
KEEPS_ERROR = True


@dataclass(frozen=True)
class PaddedElementShares:
    """Shares of one gradient's elements: one for each rank, padded to blocks of equal size."""

    num_elements: int
    num_ranks: int

    @property
    def share_elements(self) -> int:
        return -(-self.num_elements // self.num_ranks)

    @property
    def blocks_per_share(self) -> int:
        return -(-self.share_elements // ELEMENTS_PER_SCALE)

    @property
    def block_elements(self) -> int:
        return -(-self.share_elements // self.blocks_per_share)

    def split_into_blocks(self, flat: torch.Tensor) -> torch.Tensor:
        """[elements] -> [ranks, blocks, block], zeros where there is nothing."""
        missing = self.num_ranks * self.share_elements - self.num_elements
        shares = F.pad(flat, (0, missing)).view(self.num_ranks, self.share_elements)
        missing_in_share = self.blocks_per_share * self.block_elements - self.share_elements
        padded = F.pad(shares, (0, missing_in_share))
        return padded.view(self.num_ranks, self.blocks_per_share, self.block_elements)

    def flatten_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """[ranks, blocks, block] -> [elements]: the inverse of `split_into_blocks`."""
        shares = blocks.reshape(self.num_ranks, -1)[:, : self.share_elements].reshape(-1)
        return shares[: self.num_elements]


class Int8:
    keeps_error = KEEPS_ERROR

    def shared_slots(self, name: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        return {}

    def reduce(self, gradients: Sequence[Gradient], wire: Wire) -> list[torch.Tensor]:
        cuts = [PaddedElementShares(g.tensor.numel(), wire.num_ranks) for g in gradients]
        blocks = [
            cut.split_into_blocks(g.tensor.reshape(-1))
            for cut, g in zip(cuts, gradients, strict=True)
        ]
        sent = [_quantise_blocks_to_int8(b) for b in blocks]
        errors = [
            b - _dequantise_int8_blocks(*q, b.dtype) for b, q in zip(blocks, sent, strict=True)
        ]

        arrived = wire.exchange(
            _pack_scales_and_levels(sent)
        )  # [ranks, bytes]: this rank's share of what each of them has
        shares = _unpack_scales_and_levels(arrived, cuts)
        means = [
            _dequantise_int8_blocks(*q, b.dtype).mean(0)
            for b, q in zip(blocks, shares, strict=True)
        ]

        finals = [_quantise_blocks_to_int8(mean[None]) for mean in means]
        for k, mean, final in zip(errors, means, finals, strict=True):
            # In the next step errors are averaged over the ranks: one that a single rank keeps
            # counts so many times.
            k[wire.rank] += wire.num_ranks * (mean - _dequantise_int8_blocks(*final, mean.dtype)[0])
        gathered = wire.gather(_pack_scales_and_levels(finals)[0])
        for gradient, cut, final in zip(
            gradients, cuts, _unpack_scales_and_levels(gathered, cuts), strict=True
        ):
            mean = cut.flatten_blocks(_dequantise_int8_blocks(*final, gradient.tensor.dtype))
            gradient.tensor.copy_(mean.view_as(gradient.tensor))
        return [
            cut.flatten_blocks(k).view_as(g.tensor)
            for cut, k, g in zip(cuts, errors, gradients, strict=True)
        ]


Quantised = tuple[torch.Tensor, torch.Tensor]
"""(int8 [rows, blocks, block], scales [rows, blocks])."""


def _quantise_blocks_to_int8(blocks: torch.Tensor) -> Quantised:
    """To the nearest of 255 levels.

    A block with anything that is not finite has a scale that is not.
    """
    scales = (blocks.abs().amax(-1) / MAX_QUANTISED_LEVEL).to(SCALE_DTYPE)
    # A block of zeros has a scale of 0: it is divided by something else, and stays zero.
    steps = blocks / scales[..., None].to(blocks.dtype).clamp(min=torch.finfo(SCALE_DTYPE).tiny)
    return steps.round().clamp(-MAX_QUANTISED_LEVEL, MAX_QUANTISED_LEVEL).nan_to_num(0.0).to(
        torch.int8
    ), scales


def _dequantise_int8_blocks(
    numbers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    wide = scales[..., None].to(dtype)
    return torch.where(wide.isfinite(), numbers.to(dtype) * wide, torch.nan)


def _pack_scales_and_levels(quantised: Sequence[Quantised]) -> torch.Tensor:
    """[rows, bytes]: all scales, then all numbers."""
    scales = torch.cat([s for _, s in quantised], dim=1).contiguous().view(torch.uint8)
    numbers = torch.cat([n.flatten(1) for n, _ in quantised], dim=1).contiguous().view(torch.uint8)
    return torch.cat((scales, numbers), dim=1)


def _unpack_scales_and_levels(
    packed: torch.Tensor, cuts: Sequence[PaddedElementShares]
) -> list[Quantised]:
    """The inverse of `_pack_scales_and_levels`."""
    counts = [cut.blocks_per_share for cut in cuts]
    edge = sum(counts) * SCALE_DTYPE.itemsize
    scales = packed[:, :edge].contiguous().view(SCALE_DTYPE).split(counts, dim=1)
    numbers = packed[:, edge:].contiguous().view(torch.int8)
    parts = numbers.split([cut.blocks_per_share * cut.block_elements for cut in cuts], dim=1)
    return [
        (part.reshape(len(packed), cut.blocks_per_share, cut.block_elements), scale)
        for part, scale, cut in zip(parts, scales, cuts, strict=True)
    ]


def build(settings: CompressionOptions) -> Int8:
    return Int8()
