"""Digests of tensors see every bit: the reference is the bytes themselves."""

from __future__ import annotations

import pytest
import torch

from phalanx.mesh import bit_digest
from phalanx.mesh.bit_digest import compute_bit_digest

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8]


def flip(tensor: torch.Tensor, place: int) -> torch.Tensor:
    """A copy with bit `place` of its memory turned over."""
    raw = tensor.clone().flatten().view(torch.uint8)
    raw[place // 8] ^= 1 << place % 8
    return raw.view(tensor.dtype).view(tensor.shape)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_any_bit_changes_the_digest(dtype: torch.dtype) -> None:
    tensor = (100 * torch.randn(3, 5, generator=torch.Generator().manual_seed(1))).to(dtype)
    digest = int(compute_bit_digest(tensor))
    assert int(compute_bit_digest(tensor.clone())) == digest
    num_bits = tensor.numel() * tensor.element_size() * 8
    digests = {int(compute_bit_digest(flip(tensor, place))) for place in range(num_bits)}
    assert len(digests) == num_bits
    assert digest not in digests


def test_any_bit_of_a_late_chunk_changes_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bit_digest, "CHUNK_ELEMENTS_BY_DEVICE_TYPE", {"cpu": 4, "cuda": 4})
    tensor = torch.randn(11, generator=torch.Generator().manual_seed(2))
    digests = {int(compute_bit_digest(flip(tensor, place))) for place in range(11 * 32)}
    assert len(digests | {int(compute_bit_digest(tensor))}) == 11 * 32 + 1


def test_what_sums_of_bits_do_not_see_changes_it() -> None:
    """Elements that change places, chunks that do, and two signs that turn."""
    tensor = torch.randn(1 << 16, generator=torch.Generator().manual_seed(3))
    signs = tensor.clone()
    signs[:2] *= -1
    swapped = tensor.clone()
    swapped[[7, 8]] = tensor[[8, 7]]
    variants = [tensor, signs, swapped, tensor.roll(1 << 15), -tensor]
    assert len({int(compute_bit_digest(variant)) for variant in variants}) == len(variants)


def test_it_is_of_values_and_not_of_their_place_in_memory() -> None:
    wide = torch.randn(6, 8, generator=torch.Generator().manual_seed(4))
    part = wide[1:4, 3:8]
    assert int(compute_bit_digest(part)) == int(compute_bit_digest(part.contiguous()))
    assert int(compute_bit_digest(part)) != int(compute_bit_digest(part.t()))
    assert int(compute_bit_digest(wide[:0])) == 0
