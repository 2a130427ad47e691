"""Digests of the bits of tensors, made where the tensors are, without waiting for the device."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

# Elements whose products exist at once: they stay in a core's cache; a GPU takes more at a time.
CHUNK_ELEMENTS_BY_DEVICE_TYPE = {"cpu": 1 << 15, "cuda": 1 << 20}
_INT_DTYPE_OF_ITEM_BYTES = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_DIGEST_MULTIPLIER = 0x2545F4914F6CDD1D


def compute_bit_digest(tensor: torch.Tensor) -> torch.Tensor:
    """A 64-bit digest of the bits of `tensor`: a 0-d int64 tensor on its device.

    The sum, modulo 2^64, of 4-byte words (or of elements that are smaller), each times an odd
    number of its place. A word that changes, in one bit or in all of them, changes the digest: its
    difference is less than 2^32, and its factor has an inverse modulo 2^64. If several words
    change, the digest stays the same with a probability of about 2^-63 as long as the lowest bits
    of mantissas are among them, and of 2^-32 if nothing but highest bits change.
    """
    words = _view_bits_as_integers(tensor.detach())
    size = CHUNK_ELEMENTS_BY_DEVICE_TYPE.get(
        tensor.device.type, CHUNK_ELEMENTS_BY_DEVICE_TYPE["cuda"]
    )
    factors = _make_position_factors(size, tensor.device)
    if words.numel() <= size:
        return (words * factors[: words.numel()]).sum()
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in words.split(size):
        # Times an odd number for each chunk that follows: equal chunks in another order differ.
        total = total * _DIGEST_MULTIPLIER + (chunk * factors[: chunk.numel()]).sum()
    return total


def list_unequal_digests(
    before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]
) -> list[str]:
    """Names whose digests differ, in the order of `before`; not those that one of them lacks, or
    has on another device. Waits for the devices."""
    is_same: dict[str, bool] = {}
    # Some may be in the host's memory where others are on a GPU.
    for device in {digest.device for digest in before.values()}:
        names = [name for name, digest in before.items() if digest.device == device]
        names = [name for name in names if name in after and after[name].device == device]
        if names:
            flags = torch.stack([before[name] == after[name] for name in names])
            is_same.update(zip(names, flags.tolist(), strict=True))
    return [name for name in before if not is_same.get(name, True)]


def _view_bits_as_integers(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.contiguous().flatten()
    return flat.view(_INT_DTYPE_OF_ITEM_BYTES.get(flat.element_size(), torch.int32))


@functools.lru_cache(maxsize=4)
def _make_position_factors(count: int, device: torch.device) -> torch.Tensor:
    """`count` odd int64 numbers that do not repeat (splitmix64 of their place)."""
    mixed = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _convert_to_signed_int64(
        0x9E3779B97F4A7C15
    )
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = _xor_with_unsigned_right_shift(mixed, shift) * _convert_to_signed_int64(factor)
    return _xor_with_unsigned_right_shift(mixed, 31) | 1


def _xor_with_unsigned_right_shift(numbers: torch.Tensor, shift: int) -> torch.Tensor:
    # torch shifts the sign in, splitmix64 zeros.
    return numbers ^ ((numbers >> shift) & ((1 << (64 - shift)) - 1))


def _convert_to_signed_int64(number: int) -> int:
    """The int64 of the same bits as an unsigned `number` below 2^64."""
    if number >= 1 << 63:
        return number - (1 << 64)
    return number
