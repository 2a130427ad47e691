"""Random bits by their place: element i of row r under a key is the same on any rank, device and
cut of the tensor.

A row's bits are a SplitMix64 sequence (Steele et al. 2014), whose i-th number needs none before it:
with all arithmetic modulo 2^64, mix the finaliser of SplitMix64 and G = 0x9E3779B97F4A7C15,

    row(r) = mix(key + (r + 1) G)        pair(r, i) = mix(row(r) + (i + 1) G)

and elements 2i and 2i + 1 of the row are the low and the high half of pair(r, i), as signed 32-bit
numbers. int64 wraps around in torch, so plain integer arithmetic gives the same bits on every
device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from phalanx.core.block_sizes import get_block_sizes
from phalanx.mesh.devices import is_cpu

# Less 2^64: int64 holds no numbers that large, and wraps around to the same bits.
_GOLDEN_RATIO_64 = 0x9E3779B97F4A7C15 - 2**64
_SPLITMIX64_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1))


def make_dropout_keep_mask(
    key: int,
    keep: float,
    sizes: Sequence[int],
    *,
    offsets: Sequence[int] | None = None,
    global_sizes: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Bool of shape `sizes`: True for the elements of a box of a tensor that are kept, each with
    probability `keep` (to 2^-32).

    Dimension 0 are the rows; an element's number in its row counts over the other dimensions of the
    whole tensor. The box begins at `offsets` of a tensor of `global_sizes` (of dimension 0 it does
    not matter); without them it is whole.
    """
    assert sizes, "there are no rows"
    offsets = tuple(offsets or (0,) * len(sizes))
    row_sizes, full_row_sizes = tuple(sizes[1:]), tuple((global_sizes or sizes)[1:])
    mask = torch.empty(tuple(sizes), dtype=torch.bool, device=device)
    if not mask.numel():
        return mask
    # Kept is what is at least this: 2^31 and more for none.
    threshold = 2**31 - round(keep * 2**32)
    if threshold >= 2**31:
        return mask.zero_()
    rows = torch.arange(1 + offsets[0], 1 + offsets[0] + sizes[0], dtype=torch.int64, device=device)
    rows = _apply_splitmix64_in_place(
        rows.mul_(_GOLDEN_RATIO_64).add_(_convert_to_signed_int64(key))
    )
    runs = _split_box_into_element_runs(
        row_sizes, tuple(offsets[1:]), full_row_sizes, torch.device(device)
    )
    lines = mask.view(sizes[0], runs.count, runs.length)
    for odd, (numbers, offsets_of_pairs) in enumerate(runs.by_parity):
        if offsets_of_pairs is None:
            continue
        bases = (rows[:, None] + offsets_of_pairs).view(-1)
        if numbers is None:
            _fill_lines_with_keep_mask(lines.view(-1, runs.length), bases, odd, threshold)
        else:
            part = torch.empty(len(bases), runs.length, dtype=torch.bool, device=device)
            _fill_lines_with_keep_mask(part, bases, odd, threshold)
            lines.index_copy_(1, numbers, part.view(sizes[0], len(numbers), runs.length))
    return mask


@dataclass(frozen=True)
class _ContiguousElementRuns:
    """A box of a row as `count` runs of `length` elements that follow one another.

    `by_parity`: of the runs that begin with the low half of a pair, and of those with the high one,
    (their numbers, what their first pairs add to a row's bits); numbers None: all of them; both
    None: there are none.
    """

    count: int
    length: int
    by_parity: tuple[tuple[torch.Tensor | None, torch.Tensor | None], ...]


# Every step asks for the same few boxes, and a copy to a GPU would wait for it.
@functools.lru_cache(maxsize=64)
def _split_box_into_element_runs(
    sizes: tuple[int, ...],
    offsets: tuple[int, ...],
    full_sizes: tuple[int, ...],
    device: torch.device,
) -> _ContiguousElementRuns:
    # Behind the last dimension that is cut, elements follow one another.
    cut = max((dim for dim in range(len(sizes)) if sizes[dim] != full_sizes[dim]), default=0)
    strides = [math.prod(full_sizes[dim + 1 :]) for dim in range(len(sizes))]
    start = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    starts = torch.full((1,), start, dtype=torch.int64)
    for size, stride in zip(sizes[:cut], strides, strict=False):
        starts = (starts[:, None] + torch.arange(0, size * stride, stride)).view(-1)
    by_parity: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []
    for odd in (0, 1):
        numbers = (starts % 2 == odd).nonzero().view(-1)
        if len(numbers) == 0:
            by_parity.append((None, None))
            continue
        pairs = (starts[numbers] // 2).mul_(_GOLDEN_RATIO_64).to(device)
        if len(numbers) == len(starts):
            by_parity.append((None, pairs))
        else:
            by_parity.append((numbers.to(device), pairs))
    return _ContiguousElementRuns(len(starts), math.prod(sizes[cut:]), tuple(by_parity))


def _fill_lines_with_keep_mask(
    lines: torch.Tensor, bases: torch.Tensor, odd: int, threshold: int
) -> None:
    """`lines` [N, run]: of each line the elements from `odd` on of the pairs that follow its
    base."""
    run = lines.shape[1]
    num_pairs, chunk = (run + odd + 1) // 2, _get_max_pairs_per_chunk(lines.device)
    # From 1 on, for pair i adds (i + 1) G.
    steps = torch.arange(1, min(chunk, num_pairs) + 1, dtype=torch.int64, device=lines.device)
    steps.mul_(_GOLDEN_RATIO_64)
    scratch = torch.empty(
        2, min(chunk, len(lines) * num_pairs), dtype=torch.int64, device=lines.device
    )
    for first, last, start, stop in _split_pairs_into_chunks(len(lines), num_pairs, chunk):
        shape = (last - first, stop - start)
        bits, spare = (buffer[: math.prod(shape)].view(shape) for buffer in scratch)
        torch.add(bases[first:last, None], steps[: shape[1]], out=bits)
        if start:
            bits.add_(_convert_to_signed_int64(start * _GOLDEN_RATIO_64))
        _apply_splitmix64_in_place(bits, spare)
        # Element 0 of a line is half `odd` of its first pair. As int32 a pair has its low half
        # first on machines that are little-endian.
        low, high = max(0, 2 * start - odd), min(run, 2 * stop - odd)
        halves = bits.view(torch.int32)[:, low + odd - 2 * start : high + odd - 2 * start]
        torch.ge(halves, threshold, out=lines[first:last, low:high])


def _get_max_pairs_per_chunk(device: torch.device) -> int:
    if is_cpu(device):
        return get_block_sizes().cpu_dropout_pairs
    return get_block_sizes().gpu_dropout_pairs


def _split_pairs_into_chunks(
    num_lines: int, num_pairs: int, chunk: int
) -> Iterator[tuple[int, int, int, int]]:
    """Blocks of at most `chunk` pairs: (first line, last line, first pair, last pair)."""
    at_once = max(1, chunk // num_pairs)
    for first in range(0, num_lines, at_once):
        for start in range(0, num_pairs, chunk):
            yield first, min(num_lines, first + at_once), start, min(num_pairs, start + chunk)


def _apply_splitmix64_in_place(
    values: torch.Tensor, spare: torch.Tensor | None = None
) -> torch.Tensor:
    """The finaliser of SplitMix64, in place. `spare` is scratch of the same shape."""
    if spare is None:
        spare = torch.empty_like(values)
    for shift, factor in _SPLITMIX64_ROUNDS:
        torch.bitwise_right_shift(values, shift, out=spare)
        # torch's shift of int64 copies the sign, and SplitMix64's shifts in zeros.
        values.bitwise_xor_(spare.bitwise_and_((1 << (64 - shift)) - 1))
        if factor != 1:
            values.mul_(factor)
    return values


def _convert_to_signed_int64(value: int) -> int:
    """A number modulo 2^64, as torch's int64 has it."""
    return (value + 2**63) % 2**64 - 2**63
