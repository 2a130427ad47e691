"""Initial weights that do not depend on the layout: each element is a function of (seed, name, global index).

Random numbers come from Philox, a counter-based generator that can start anywhere, so a rank generates exactly the
blocks it holds. One 64-bit draw gives two 23-bit uniforms, turned into normals by the inverse error function.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from phalanx.core.digest import stable_hash64
from phalanx.mesh.logical import LogicalShard

CHUNK = 1 << 15  # elements: scratch memory of a quarter MiB, and few enough that torch starts no threads of its own
THREADS_FROM = 1 << 20  # elements of a run, from which on threads are worth their start


@dataclass(frozen=True)
class InitRule:
    """How tensors whose name matches `pattern` begin: normal with `std`, or a constant when `std` is 0."""

    pattern: str
    std: float = 0.0
    constant: float = 0.0


def initialize_shards(shards: Mapping[str, LogicalShard], rules: Sequence[InitRule], seed: int) -> None:
    """Fill every shard's local tensor by the first rule that matches its name. A name without a rule is a bug."""
    for name, shard in shards.items():
        rule = next((r for r in rules if fnmatch.fnmatchcase(name, r.pattern)), None)
        assert rule is not None, f"no initialisation rule for {name}"
        if rule.std == 0.0:
            shard.tensor.fill_(rule.constant)
        else:
            _fill_normal(shard, rule.std, stable_hash64("init", seed, name))


def _fill_normal(shard: LogicalShard, std: float, key: int) -> None:
    for box in shard.boxes:
        if box.size == shard.global_shape or not box.size:
            values = standard_normal(key, 0, math.prod(box.size))
            shard.tensor.copy_(values.view(shard.tensor.shape).mul_(std))
            continue
        # Contiguous runs: every dimension before the last that is cut is walked, the rest is one run.
        cut = max(d for d, (s, g) in enumerate(zip(box.size, shard.global_shape, strict=True)) if s != g)
        strides = [math.prod(shard.global_shape[d + 1 :]) for d in range(len(box.size))]
        run = box.size[cut] * strides[cut]
        for place in itertools.product(*(range(n) for n in box.size[:cut])):
            start = sum((box.global_offset[d] + i) * strides[d] for d, i in enumerate(place))
            start += box.global_offset[cut] * strides[cut]
            target = shard.tensor
            for d, i in enumerate(place):
                target = target[box.local_offset[d] + i]
            target = target.narrow(0, box.local_offset[cut], box.size[cut])
            target.copy_(standard_normal(key, start, run).view(target.shape).mul_(std))


def standard_normal(key: int, start: int, count: int) -> torch.Tensor:
    """Elements [start, start + count) of the endless fp32 sequence of standard normals named by `key`."""
    out = torch.empty(count, dtype=torch.float32)

    def draw(done: int) -> None:
        piece = min(CHUNK, count - done)
        out[done : done + piece] = _normals(key, start + done, piece)

    threads = torch.get_num_threads()
    if threads == 1 or count < THREADS_FROM:
        for done in range(0, count, CHUNK):
            draw(done)
        return out
    with ThreadPoolExecutor(threads) as pool:  # numpy draws without Python's lock, and so does torch compute
        list(pool.map(draw, range(0, count, CHUNK)))
    return out


def _normals(key: int, start: int, count: int) -> torch.Tensor:
    first_draw = start // 2
    generator = np.random.Philox(key=key)
    generator.advance(first_draw // 4)  # one counter gives four 64-bit draws
    skip = first_draw % 4
    draws = generator.random_raw(skip + (start + count + 1) // 2 - first_draw)[skip:]
    halves = draws.view(np.uint32)[start % 2 :][:count]
    bits = torch.from_numpy((halves >> np.uint32(9)).astype(np.float32))
    # (bits + 0.5) / 2^23 lies strictly inside (0, 1) and is exact in fp32; map it to (-1, 1).
    return bits.add_(0.5).mul_(2.0**-22).sub_(1.0).erfinv_().mul_(math.sqrt(2.0))
