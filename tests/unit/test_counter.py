"""Masks by their place: against a definition in plain Python, and as good as what they stand in
for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from phalanx.core.block_sizes import BlockSizes, use_block_sizes
from phalanx.mesh.counter_rng import make_dropout_keep_mask
from ranks import run_ranks

GOLDEN, WORD = 0x9E3779B97F4A7C15, 2**64 - 1


def mixed(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & WORD
    return value ^ (value >> 31)


def is_kept(key: int, keep: float, row: int, number: int) -> bool:
    """The definition, of one element."""
    pair = mixed((mixed((key + (row + 1) * GOLDEN) & WORD) + (number // 2 + 1) * GOLDEN) & WORD)
    half = (pair >> 32 if number % 2 else pair) & 0xFFFFFFFF
    signed = half - 2**32 if half >= 2**31 else half
    return signed >= 2**31 - round(keep * 2**32)


def defined(
    key: int, keep: float, sizes: Sequence[int], offsets: Sequence[int], whole: Sequence[int]
) -> list[bool]:
    strides = [math.prod(whole[d + 1 :]) for d in range(len(sizes))]
    places = itertools.product(*(range(o, o + n) for o, n in zip(offsets, sizes, strict=True)))
    return [
        is_kept(key, keep, p[0], sum(i * s for i, s in zip(p[1:], strides[1:], strict=True)))
        for p in places
    ]


CASES = [
    # sizes, offsets, whole
    ((3, 10), (0, 0), (3, 10)),
    ((3, 7), (4, 0), (9, 7)),
    ((2, 3, 5), (1, 0, 0), (2, 3, 5)),
    ((2, 3, 5), (1, 2, 3), (2, 7, 9)),  # rows of odd length: lines begin at even and odd places
    ((2, 4, 6), (0, 4, 0), (2, 8, 6)),
    ((1, 2, 3, 4), (7, 1, 2, 0), (8, 3, 5, 4)),
    ((5,), (2,), (9,)),
    ((2, 0, 3), (0, 0, 0), (2, 0, 3)),
    ((2, 40), (0, 3), (2, 50)),  # longer than a chunk
]


def masks_of(rank: int, chunk: int) -> list[list[bool]]:
    with use_block_sizes(BlockSizes(cpu_dropout_pairs=chunk)):
        return [
            make_dropout_keep_mask(key, 0.6, sizes, offsets=offsets, global_sizes=whole)
            .flatten()
            .tolist()
            for (sizes, offsets, whole), key in itertools.product(CASES, (5, WORD - 3))
        ]


@pytest.mark.parametrize("chunk", [3, 1 << 16])
def test_masks_are_those_of_the_definition_however_they_are_cut(chunk: int) -> None:
    """Reference: the definition, element by element, in Python's integers."""
    (found,) = run_ranks(1, masks_of, chunk)
    wanted = [defined(key, 0.6, *case) for case, key in itertools.product(CASES, (5, WORD - 3))]
    assert found == wanted


def statistics(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for keep in (0.9, 0.5):
        mask = make_dropout_keep_mask(11, keep, (512, 4096)).double() - keep
        variance = keep * (1 - keep)
        apart = {
            "next element": (mask[:, 1:], mask[:, :-1]),
            "element after": (mask[:, 2:], mask[:, :-2]),
            "next row": (mask[1:], mask[:-1]),
            "next key": (mask, make_dropout_keep_mask(12, keep, (512, 4096)).double() - keep),
            "far key": (
                mask,
                make_dropout_keep_mask(11 + 2**32, keep, (512, 4096)).double() - keep,
            ),
        }
        # Each in standard deviations of what independent elements would give.
        found[f"mean {keep}"] = float(mask.sum() / (variance * mask.numel()) ** 0.5)
        for what, (a, b) in apart.items():
            found[f"{what} {keep}"] = float((a * b).sum() / variance / a.numel() ** 0.5)
    # How many of 64 in a row are kept, against the binomial distribution: chi-square over the sums
    # that are likely.
    for what, mask in {
        "along": make_dropout_keep_mask(3, 0.5, (512, 4096)).view(-1, 64),
        "across rows": make_dropout_keep_mask(3, 0.5, (4096, 512)).T.reshape(-1, 64),
        "across keys": torch.stack(
            [make_dropout_keep_mask(key, 0.5, (1, 1 << 15))[0] for key in range(64)], 1
        ),
    }.items():
        sums = torch.bincount(mask.sum(1), minlength=65)[22:43].double()
        expected = torch.tensor(
            [math.comb(64, k) / 2**64 for k in range(22, 43)], dtype=torch.float64
        ) * len(mask)
        found[f"chi-square {what}"] = float(
            (((sums - expected) ** 2 / expected).sum() - 21) / 42**0.5
        )
    ones = (
        make_dropout_keep_mask(1, 1.0, (64, 1 << 12)),
        make_dropout_keep_mask(1, 0.0, (64, 1 << 12)),
    )
    found["certain"] = (bool(ones[0].all()), bool(ones[1].any()))
    rare = make_dropout_keep_mask(9, 1 - 1e-4, (64, 1 << 16))
    found["rare"] = float(((~rare).sum() - 1e-4 * rare.numel()) / (1e-4 * rare.numel()) ** 0.5)
    return found


def test_masks_are_as_good_as_independent_draws() -> None:
    """Mean, correlation of neighbours (elements, rows, keys) and distribution of sums, in
    standard deviations."""
    (found,) = run_ranks(1, statistics)
    assert found.pop("certain") == (True, False)
    assert {what: value for what, value in found.items() if not abs(value) < 4} == {}
