"""Casts bits of one floating-point type to bits of another: the only part of exports that needs
torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from phalanx.checkpoint.reading.full_tensors import Bits, choose_unsigned_bits_dtype

# numpy has no bfloat16: bits come and go as unsigned integers of the same width.
_UNSIGNED_DTYPE_OF_ITEM_BYTES: dict[int, Any] = {
    1: torch.uint8,
    2: torch.uint16,
    4: torch.uint32,
    8: torch.uint64,
}


def round_float_bits_to_dtype(bits: Bits, dtype: str, new_dtype: str) -> Bits:
    """`bits` of torch's `dtype`, rounded to nearest in `new_dtype`."""
    raw = torch.from_numpy(np.ascontiguousarray(bits)).reshape(-1)
    numbers = raw.view(getattr(torch, dtype)).to(getattr(torch, new_dtype))
    cast: Bits = numbers.view(_UNSIGNED_DTYPE_OF_ITEM_BYTES[numbers.element_size()]).numpy()
    in_shape: Bits = cast.view(choose_unsigned_bits_dtype(new_dtype)).reshape(bits.shape)
    return in_shape
