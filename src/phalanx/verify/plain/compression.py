"""Compressed gradients by their papers' definitions: what should be sent, and what may stay
behind."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

MAX_INT8_LEVEL = 127
ELEMENTS_PER_INT8_SCALE = 256
ROUNDING_MARGIN = 1e-3  # relative: scales travel in float32
LARGEST_FP16_SUM = 2.0**15
_SENT_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}


def plain_topk_excess(gradient: torch.Tensor, residual: torch.Tensor, fraction: float) -> float:
    """The excess of the largest element that stays behind over the smallest that is sent,
    relative to the largest of all; at most 0 where the largest are sent (Lin et al. 2018).

    `gradient`: with what was kept before. Infinite where another number of elements is sent than
    `fraction` of them, at least one.
    """
    flat, rest = gradient.flatten().abs(), residual.flatten()
    is_sent = (rest == 0) & (flat != 0)
    num_sent = int(is_sent.sum())
    num_expected = min(count_topk_elements(len(flat), fraction), int((flat != 0).sum()))
    if num_sent != num_expected:
        return float("inf")
    if num_sent == 0 or num_sent == len(flat):
        return 0.0
    excess = flat[~is_sent].max() - flat[is_sent].min()
    return float(excess / flat.max())


def count_topk_elements(num_elements: int, fraction: float) -> int:
    """The number of elements of a gradient that a rank sends."""
    return max(1, round(fraction * num_elements))


def round_to_16_bits(
    gradient: torch.Tensor, kind: str, largest: float, num_ranks: int
) -> torch.Tensor:
    """The gradient of a rank as it sends it, in float64: rounded once, to "bf16" as it is, to
    "fp16" times a power of two. `largest`: element of all ranks' gradients."""
    scale = _find_sent_scale(kind, largest, num_ranks)
    return (gradient * scale).to(_SENT_DTYPE[kind]).double() / scale


def plain_cast_excess(
    arrived: torch.Tensor,
    expected: torch.Tensor,
    size: torch.Tensor,
    kind: str,
    largest: float,
    num_ranks: int,
) -> float:
    """How much further an element that arrives is from the mean of rounded gradients than adding
    them up in 16 bits takes it, relative to the largest of all; at most 0 where none is.

    `expected`: the mean over ranks of what `round_to_16_bits` says; `size`: that of its absolute
    values.
    """
    finest = torch.finfo(_SENT_DTYPE[kind])
    smallest_step = finest.smallest_normal * finest.eps / _find_sent_scale(kind, largest, num_ranks)
    # Half a rounding in each sum of two, of at most the sum of absolute values.
    allowed = num_ranks * (finest.eps / 2 * size + smallest_step)
    excess = (arrived.double() - expected).abs() - (1 + ROUNDING_MARGIN) * allowed
    return float(excess.max() / (largest or 1.0))


def _find_sent_scale(kind: str, largest: float, num_ranks: int) -> float:
    """The largest power of two by which the sum over ranks of `largest` stays within half of what
    fp16 holds; 1 for bf16, which holds as much as float32."""
    if kind == "bf16" or not 0 < largest < math.inf:
        return 1.0
    return float(2.0 ** math.floor(math.log2(LARGEST_FP16_SUM / num_ranks / largest)))


def plain_int8_excess(
    gradient: torch.Tensor,
    mean: torch.Tensor,
    mean_half_level: torch.Tensor,
    residual: torch.Tensor,
    num_ranks: int,
) -> float:
    """How much larger an element that a rank keeps is than what rounding to 255 levels leaves,
    relative to the largest element of both gradients; at most 0 where none is.

    `gradient`: of this rank, with what it kept before; `residual`: what it keeps of that;
    `mean`: of those of all ranks; `mean_half_level`: of what `find_half_int8_levels` says of each
    rank's. The elements are dealt out to the ranks in equal runs; each run has equal blocks of at
    most 256 elements, and each block one scale. A rank rounds its own gradient and, of its own run,
    the mean, whose error counts once for each rank.
    """
    # What is rounded is the mean of rounded gradients: a block of it may be larger by half a level
    # of these in the mean, those of other ranks too.
    rounded_half_level = find_half_int8_levels(mean, num_ranks)
    rounded_half_level += mean_half_level / MAX_INT8_LEVEL / 2
    allowed = find_half_int8_levels(gradient, num_ranks) + num_ranks * rounded_half_level
    excess = residual.flatten().abs().double() - (1 + ROUNDING_MARGIN) * allowed
    # A rank without a gradient of its own keeps what rounding of the mean loses.
    largest = torch.maximum(gradient.abs().max(), mean.abs().max()).double()
    if not largest:
        return float(residual.abs().max())
    return float(excess.max() / largest)


def find_half_int8_levels(gradient: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Of each element, flattened, in float64: half of the distance between two levels of its
    block."""
    flat = gradient.flatten().abs().double()
    run = -(-len(flat) // num_ranks)
    num_blocks = -(-run // ELEMENTS_PER_INT8_SCALE)
    block = -(-run // num_blocks)
    half_level = torch.empty_like(flat)
    for first in range(0, len(flat), run):
        last = min(first + run, len(flat))
        for start in range(first, last, block):
            end = min(start + block, last)
            half_level[start:end] = flat[start:end].max() / MAX_INT8_LEVEL / 2
    return half_level


def plain_powersgd_width(sizes: Sequence[int], rank: int) -> int:
    """The number of columns that a gradient of `sizes` travels as, `rank` or 0: vectors travel
    whole, and matrices for which `rank` columns of both factors are no fewer elements."""
    if len(sizes) < 2:
        return 0
    num_rows, num_columns = sizes[0], math.prod(sizes[1:])
    is_smaller = rank * (num_rows + num_columns) < num_rows * num_columns
    return rank if is_smaller and rank <= min(num_rows, num_columns) else 0


def plain_powersgd_step(
    mean: torch.Tensor, q: torch.Tensor, rank_norm: float
) -> tuple[torch.Tensor, float]:
    """(what is sent of the matrix `mean` [n, m], how far rounding may take it, relative to `mean`),
    in float64.

    One step of power iteration from `q` [m, rank]: `mean` projected on the span of mean q (Vogels
    et al. 2019, algorithm 1). `mean`: of the gradients of all ranks, with what each kept before;
    `rank_norm`: the mean of the ranks' norms, more than that of `mean` where they cancel.
    """
    wide, wide_q = mean.double(), q.double()
    basis, singular, _ = torch.linalg.svd(wide @ wide_q, full_matrices=False)
    sent = basis @ (wide.T @ basis).T
    smallest, size = float(singular.min()), float(wide.norm())
    if not smallest or not size:
        return sent, float("inf")
    # Ranks round their parts of mean q, and of the second product. By norms, so that it is what
    # rounding may do at worst: what it did was a sixteenth of this, or less.
    roundings = rank_norm * (float(wide_q.norm()) / smallest + 1 / size)
    return sent, torch.finfo(mean.dtype).eps * roundings


def plain_powersgd_matrix_error(sent: torch.Tensor, next_q: torch.Tensor) -> float:
    """The part of `sent` [n, m], relative to it, that lies outside the span of `next_q` [m, rank]:
    none if that is the matrix from which the next step has to begin."""
    wide = sent.double()
    size = float(wide.norm())
    if not size:
        return 0.0
    basis, _ = torch.linalg.qr(next_q.double())
    return float((wide - (wide @ basis) @ basis.T).norm()) / size
