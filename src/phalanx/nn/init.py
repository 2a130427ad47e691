"""Initial weights that do not depend on the layout: each element is a function of (seed, name,
global index).

Random numbers come from Philox, a counter-based generator that can start anywhere, so a rank
generates exactly the blocks it holds. One 64-bit draw gives two 23-bit uniforms, turned into
normals by the inverse error function.
"""

from __future__ import annotations

import contextlib
import fnmatch
import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from phalanx.core.block_sizes import get_block_sizes
from phalanx.core.digest import hash_to_stable_64_bits
from phalanx.mesh.logical import LogicalShard

# In elements of a run: fewer are made before threads have started.
MIN_THREADED_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class InitRule:
    """The initial values of tensors whose name matches `pattern`: normal with `std`, or a constant
    when `std` is 0."""

    pattern: str
    std: float = 0.0
    constant: float = 0.0


def initialize_shards(
    shards: Mapping[str, LogicalShard], rules: Sequence[InitRule], seed: int
) -> None:
    """Fill every shard's local tensor by the first rule that matches its name.

    A name without a rule is a bug.
    """
    for name, shard in shards.items():
        rule = _find_first_matching_rule(rules, name)
        if rule.std == 0.0:
            shard.tensor.fill_(rule.constant)
        else:
            _fill_with_normals(shard, rule.std, hash_to_stable_64_bits("init", seed, name))


def _find_first_matching_rule(rules: Sequence[InitRule], name: str) -> InitRule:
    for rule in rules:
        # Not fnmatch, which ignores case on some systems.
        if fnmatch.fnmatchcase(name, rule.pattern):
            return rule
    raise AssertionError(f"no initialisation rule for {name}")


def _fill_with_normals(shard: LogicalShard, std: float, key: int) -> None:
    for box in shard.boxes:
        if not math.prod(box.size):
            continue
        if box.size == shard.global_shape or not box.size:
            values = make_standard_normals(key, 0, math.prod(box.size))
            shard.tensor.copy_(values.view(shard.tensor.shape).mul_(std))
            continue
        # Contiguous runs: every dimension before the last that is cut is walked, the rest is one
        # run.
        cut = len(box.size) - 1
        while box.size[cut] == shard.global_shape[cut]:
            cut -= 1
        strides = [math.prod(shard.global_shape[dim + 1 :]) for dim in range(len(box.size))]
        first = sum(map(operator.mul, box.global_offset, strides))
        run = box.size[cut] * strides[cut]
        target = shard.tensor
        for dim, (offset, size) in enumerate(zip(box.local_offset, box.size, strict=True)):
            target = target.narrow(dim, offset, size)
        if cut == 0:
            target.copy_(make_standard_normals(key, first, run).view(target.shape).mul_(std))
            continue
        # Runs of one slice of the dimension before the cut are equally far apart: a matrix is one
        # slice of rows.
        for index in itertools.product(*map(range, box.size[: cut - 1])):
            start = first + sum(map(operator.mul, index, strides))
            _fill_strided_runs_with_normals(
                target[index], std, key, start, pitch=strides[cut - 1], run=run
            )


def _fill_strided_runs_with_normals(
    target: torch.Tensor, std: float, key: int, start: int, *, pitch: int, run: int
) -> None:
    """Fill target[i] with the elements from start + i * pitch on, `run` of them."""
    count, chunk = len(target), get_block_sizes().init_elements
    if run >= chunk:
        for i in range(count):
            target[i].copy_(
                make_standard_normals(key, start + i * pitch, run).view(target[i].shape).mul_(std)
            )
        return
    at_once = chunk // run
    firsts = range(0, count, at_once)

    def draw_at_once(first: int) -> torch.Tensor:
        starts = range(start + first * pitch, start + min(first + at_once, count) * pitch, pitch)
        return _make_normals_of_runs(key, starts, run)

    with contextlib.ExitStack() as opened:
        threads = torch.get_num_threads()
        draws: Iterator[torch.Tensor] = map(draw_at_once, firsts)
        if threads > 1 and count * run >= MIN_THREADED_ELEMENTS:
            draws = opened.enter_context(ThreadPoolExecutor(threads)).map(draw_at_once, firsts)
        for first, values in zip(firsts, draws, strict=True):
            part = target[first : first + at_once]
            part.copy_(values.view(part.shape).mul_(std))


def make_standard_normals(key: int, start: int, count: int) -> torch.Tensor:
    """Elements [start, start + count) of the endless fp32 sequence of standard normals named by
    `key`."""
    out, chunk = torch.empty(count, dtype=torch.float32), get_block_sizes().init_elements

    def draw_at_once(done: int) -> None:
        piece = min(chunk, count - done)
        out[done : done + piece] = _make_standard_normals_in_one_piece(key, start + done, piece)

    threads = torch.get_num_threads()
    if threads == 1 or count < MIN_THREADED_ELEMENTS:
        for done in range(0, count, chunk):
            draw_at_once(done)
        return out
    # Numpy draws without Python's lock, and so does torch compute.
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(draw_at_once, range(0, count, chunk)))
    return out


def _make_standard_normals_in_one_piece(key: int, start: int, count: int) -> torch.Tensor:
    return _make_normals_of_runs(key, range(start, start + 1), count)


def _make_normals_of_runs(key: int, starts: Sequence[int], run: int) -> torch.Tensor:
    """Elements [start, start + run) of the sequence for each start, one run behind the other."""
    generator, counter = np.random.Philox(key=key), 0
    halves = np.empty((len(starts), run), np.uint32)
    for row, start in zip(halves, starts, strict=True):
        first_draw = start // 2
        # One counter gives four 64-bit draws.
        generator.advance(first_draw // 4 - counter)
        skip = first_draw % 4
        draws = generator.random_raw(skip + (start + run + 1) // 2 - first_draw)
        counter = first_draw // 4 + -(-len(draws) // 4)
        # A draw is two halves of 32 bits: an odd start begins with the second one.
        row[:] = draws[skip:].view(np.uint32)[start % 2 :][:run]
    halves >>= np.uint32(9)
    bits = torch.from_numpy(halves.reshape(-1).astype(np.float32))
    # (bits + 0.5) / 2^23 lies strictly inside (0, 1) and is exact in fp32; map it to (-1, 1).
    return bits.add_(0.5).mul_(2.0**-22).sub_(1.0).erfinv_().mul_(math.sqrt(2.0))
