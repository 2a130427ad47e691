"""Bits of one floating-point type as bits of another. The only part of exports that needs torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from phalanx.checkpoint.reading.full_tensors import Bits, bits_type

_HOLDERS: dict[int, Any] = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def cast_bits(bits: Bits, dtype: str, wanted: str) -> Bits:
    """`bits` of torch's `dtype`, rounded to nearest in `wanted`."""
    held = torch.from_numpy(np.ascontiguousarray(bits)).reshape(-1)
    numbers = held.view(getattr(torch, dtype)).to(getattr(torch, wanted))
    cast: Bits = numbers.view(_HOLDERS[numbers.element_size()]).numpy()
    whole: Bits = cast.view(bits_type(wanted)).reshape(bits.shape)
    return whole
