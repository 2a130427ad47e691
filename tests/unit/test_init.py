"""Initial weights are a function of (seed, name, global index): any part of a tensor is a part
of the whole's bits."""

from __future__ import annotations

import itertools
import math
import threading
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.mesh.logical import Box, LogicalShard
from phalanx.nn import init
from phalanx.nn.init import InitRule, initialize_shards, make_standard_normals
from ranks import run_ranks

RULES = (InitRule("*norm*", constant=1.0), InitRule("zero", constant=0.0), InitRule("*", std=0.02))


def filled(
    name: str, shape: tuple[int, ...], boxes: list[Box], local: tuple[int, ...], seed: int
) -> torch.Tensor:
    tensor = torch.full(local, math.nan)
    initialize_shards(
        {name: LogicalShard(name, shape, "float32", tuple(boxes), tensor)}, RULES, seed
    )
    return tensor


def whole(name: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    zero = (0,) * len(shape)
    return filled(name, shape, [Box(zero, zero, shape)], shape, seed)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_box_has_the_bits_of_the_whole(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    offset = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    size = tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True))
    found = filled("w", shape, [Box(offset, (0,) * len(shape), size)], size, 3)
    wanted = whole("w", shape, 3)[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
    assert torch.equal(found, wanted)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 20), st.integers(1, 6), st.data())
def test_several_boxes_of_one_local_tensor(rows: int, columns: int, data: st.DataObject) -> None:
    """Rows dealt out in runs and stacked in another order, as interleaved shards hold them."""
    cuts = sorted(data.draw(st.sets(st.integers(0, rows), max_size=5)) | {0, rows})
    runs = data.draw(st.permutations([(a, b) for a, b in itertools.pairwise(cuts)]))
    boxes, at = [], 0
    for start, stop in runs:
        boxes.append(Box((start, 0), (at, 0), (stop - start, columns)))
        at += stop - start
    found = filled("w", (rows, columns), boxes, (rows, columns), 0)
    wanted = torch.cat([whole("w", (rows, columns))[start:stop] for start, stop in runs])
    assert torch.equal(found, wanted)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**40), st.integers(1, 200), st.data())
def test_any_run_of_the_sequence(start: int, count: int, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, count))
    parts = [
        make_standard_normals(9, start, cut),
        make_standard_normals(9, start + cut, count - cut),
    ]
    assert torch.equal(torch.cat(parts), make_standard_normals(9, start, count))


def test_runs_across_the_scratch_chunks_and_threads() -> None:
    """Generated 2^20 at a time, with one thread or two: the same bits."""
    across = make_standard_normals(4, 0, (1 << 20) + 300)
    assert torch.equal(make_standard_normals(4, (1 << 20) - 300, 600), across[-600:])
    torch.set_num_threads(2)
    assert torch.equal(make_standard_normals(4, 0, (1 << 20) + 300), across)


class Copies(TorchDispatchMode):
    """Counts how often a tensor is copied into another one."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("shape", "offset", "size"),
    [
        ((3000, 40), (0, 13), (3000, 7)),
        ((3000, 40), (1700, 20), (900, 20)),
        ((4, 900, 11), (1, 3, 5), (2, 800, 3)),
    ],
)
def test_rows_that_are_cut_are_written_many_at_a_time(
    shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...]
) -> None:
    """As tensor parallelism cuts a matrix along its second dimension, with the bits of the whole
    one."""
    wanted = whole("w", shape, 3)[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
    with Copies() as copies:
        found = filled("w", shape, [Box(offset, (0,) * len(shape), size)], size, 3)
    assert torch.equal(found, wanted)
    assert copies.count <= 4, "not one for each row"


def test_rows_that_are_cut_are_drawn_on_all_threads_with_the_same_bits() -> None:
    shape, offset, size = (
        (init.MIN_THREADED_ELEMENTS // 128 + 5, 256),
        (0, 100),
        (init.MIN_THREADED_ELEMENTS // 128 + 5, 129),
    )
    before = torch.get_num_threads()
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(filled("w", shape, [Box(offset, (0, 0), size)], size, 3))
    torch.set_num_threads(before)
    assert torch.equal(*found)
    assert torch.equal(found[0], whole("w", shape, 3)[:, 100:229])


def test_a_rank_without_a_row_has_nothing_to_draw() -> None:
    assert filled("w", (3, 4), [Box((3, 0), (0, 0), (0, 4))], (0, 4), 0).shape == (0, 4)
    assert filled("w", (3, 4), [Box((0, 4), (0, 0), (3, 0))], (3, 0), 0).shape == (3, 0)


def test_scalars_and_constants() -> None:
    assert whole("norm", (3,)).tolist() == [1.0] * 3
    assert whole("zero", (2, 2)).tolist() == [[0.0, 0.0]] * 2
    assert whole("w", ()).item() == pytest.approx(0.02 * standard_normal_of("w"))


def standard_normal_of(name: str) -> float:
    return (whole(name, (1,)) / 0.02).item()


def test_a_name_without_a_rule_is_a_bug() -> None:
    shard = LogicalShard("w", (1,), "float32", (Box((0,), (0,), (1,)),), torch.zeros(1))
    with pytest.raises(AssertionError, match="w"):
        initialize_shards({"w": shard}, (InitRule("x"),), 0)


def test_the_numbers_are_standard_normal() -> None:
    """200,000 of them: mean, deviation, and Kolmogorov's distance (1.95/sqrt(n): p = 0.001)."""
    count = 200_000
    values = make_standard_normals(1, 0, count).double().sort().values
    assert abs(values.mean().item()) < 4 / count**0.5
    assert abs(values.std().item() - 1) < 4 / (2 * count) ** 0.5
    steps = torch.arange(1, count + 1, dtype=torch.float64) / count
    assert (torch.special.ndtr(values) - steps).abs().max().item() < 1.95 / count**0.5
    assert values.isfinite().all()
    assert len(values.unique()) > 0.98 * count


def test_names_and_seeds_give_independent_numbers() -> None:
    base, name, seed = whole("a", (5000,)), whole("b", (5000,)), whole("a", (5000,), seed=1)
    for other in (name, seed, base.roll(1)):
        assert abs(torch.corrcoef(torch.stack((base, other)))[0, 1].item()) < 4 / 5000**0.5


def test_golden_values() -> None:
    """Pinned: a checkpoint's run.seed must mean the same weights in the next release."""
    found = whole("blocks.0.attention.q.weight", (2, 3), seed=42).flatten().tolist()
    assert found == pytest.approx(
        [-0.026435709, 0.043467935, -0.0047785603, 0.018751951, -0.048709061, 0.024317138], rel=1e-6
    )


def test_numbers_are_philox_bits_through_the_inverse_normal_distribution() -> None:
    """Against the standard library in fp64: 23 bits of each half of a draw, centred in their
    interval."""
    halves = np.random.Philox(key=77).random_raw(500).view(np.uint32)
    wanted = [NormalDist().inv_cdf((int(half >> 9) + 0.5) / 2**23) for half in halves]
    assert make_standard_normals(77, 0, 1000).tolist() == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def drawn_on(rank: int, threads: int) -> tuple[torch.Tensor, int]:
    """A run of many chunks with an odd start and end, and on how many threads it was drawn."""
    torch.set_num_threads(threads)
    names: set[str] = set()
    draw = init._make_standard_normals_in_one_piece

    def watched(key: int, start: int, count: int) -> torch.Tensor:
        names.add(threading.current_thread().name)
        return draw(key, start, count)

    init._make_standard_normals_in_one_piece = watched
    return make_standard_normals(7, 12_345, init.MIN_THREADED_ELEMENTS + 4_321), len(names)


def test_large_runs_are_drawn_on_all_threads_with_the_same_bits() -> None:
    ((alone, one),) = run_ranks(1, drawn_on, 1)
    ((together, several),) = run_ranks(1, drawn_on, 4)
    assert one == 1
    assert several > 1
    assert torch.equal(alone, together)
