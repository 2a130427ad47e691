"""Initial weights, element by element: which random number each one is."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch


class PlainNormals:
    """The endless sequence of standard normals that the parameter `name` is drawn from, in float32.

    Philox with a key of seed and name gives numbers of 64 bits; the lower and the upper half of
    each are two elements. The first 23 of its 32 bits are a number u in (-1, 1), and the element is
    the normal of which as large a part lies below, sqrt(2) erfinv(u).
    """

    def __init__(self, seed: int, name: str, count: int) -> None:
        """`count`: elements that may be asked for."""
        text = "\x1f".join(("init", str(seed), name)).encode()
        key = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        draws = np.random.Philox(key=key).random_raw(-(-count // 2))
        self._halves = np.stack((draws & 0xFFFFFFFF, draws >> 32), axis=1).reshape(-1)

    def take(self, indices: torch.Tensor) -> torch.Tensor:
        """The elements of these indices, in their shape."""
        halves = torch.from_numpy((self._halves[indices.numpy()] >> 9).astype(np.float32))
        return torch.erfinv((halves + 0.5) / 2**22 - 1) * math.sqrt(2)
