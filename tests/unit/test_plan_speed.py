"""Shortcuts of planning give what the long way gives: kinds of blocks, groups of rows, and moves of
blocks between stages that are not rated."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys

import numpy as np
import pytest

from phalanx.core.blas_threads import import_numpy_without_threads
from phalanx.core.garbage import pausing_garbage_collection
from phalanx.job.load import load_job
from phalanx.job.model import build_model_shape
from phalanx.plan.memory import _count_segment_saved_and_redone_bytes, count_segment_bytes
from phalanx.plan.pipeline.cut import LayerCosts, _CutRater
from phalanx.plan.search.equal_rows import group_equal_rows
from phalanx.plan.segments import Segment
from phalanx.plan.workload import Workload


@pytest.mark.parametrize("preset", ["llama3-8b", "deepseek-v3", "gemma3-1b", "vit-l16"])
def test_blocks_of_one_kind_have_equal_bytes(preset: str) -> None:
    shape = build_model_shape(load_job(None, [f"model.preset={preset}"]), 1000)
    activations, work = shape.activations, Workload(2, 2048, "bf16", "none", 1024, tp=2)
    assert activations is not None
    kinds = activations.list_block_kinds(work)
    assert len(kinds) == shape.num_layers
    first = {kind: layer for layer, kind in reversed(list(enumerate(kinds)))}
    for layer, kind in enumerate(kinds):
        assert activations.block(layer, work) == activations.block(first[kind], work)


@pytest.mark.parametrize("preset", ["llama3-8b", "deepseek-moe-16b"])
def test_bytes_of_segments_are_those_of_each_counted_by_itself(preset: str) -> None:
    shape = build_model_shape(load_job(None, [f"model.preset={preset}"]), 1000)
    segments = (Segment(0, 3, "full"), Segment(3, 4, "selective"), Segment(7, 9, "full"))
    work = Workload(1, 512, "bf16", "none", 1024, segments=segments)
    expected, layer = [], 0
    for segment in [*segments, None]:
        until = segment.start if segment else shape.num_layers
        while layer < until:
            plain = Segment(layer, layer + 1, "none")
            expected.append(_count_segment_saved_and_redone_bytes(shape, work, plain))
            layer += 1
        if segment:
            expected.append(_count_segment_saved_and_redone_bytes(shape, work, segment))
            layer = segment.stop
    saved, redone = count_segment_bytes(shape, work)
    assert list(zip(saved, redone, strict=True)) == expected


def test_equal_rows_are_grouped_as_by_numpy() -> None:
    draw = np.random.default_rng(0)
    columns = [draw.choice([1, 2, 4, 8, 96], 500), draw.integers(0, 3, 500), np.full(500, 7)]
    rows, inverse = group_equal_rows(columns)
    expected, expected_inverse = np.unique(np.stack(columns, 1), axis=0, return_inverse=True)
    assert rows == list(map(tuple, expected.tolist()))
    assert inverse.tolist() == expected_inverse.reshape(-1).tolist()


def test_the_best_move_is_that_of_all_moves_rated() -> None:
    draw = random.Random(1)
    for _ in range(40):
        placement = (0, 1, 2, 2, 1, 0)
        blocks = tuple(draw.choice([1.0, 1.1, 4 / 3, draw.random()]) for _ in range(14))
        costs = LayerCosts(draw.choice([0, 0.4]), blocks, draw.choice([0, 1.7]))
        counts = (2, 3, 2, 3, 2, 2)
        rater = _CutRater(costs, placement)
        rating, best = rater.rate(counts), None
        found = rater.find_best_move(counts, rating)
        for giver in range(6):
            for taker in range(6):
                moved = list(counts)
                moved[giver] -= 1
                moved[taker] += 1
                if giver != taker and rater.rate(moved) < rating:
                    best, rating = tuple(moved), rater.rate(moved)
        assert found == (best, rating)


def test_collections_pause_and_go_on() -> None:
    assert gc.isenabled()
    with pausing_garbage_collection():
        assert not gc.isenabled()
        with pausing_garbage_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_was_made_while_collection_rested_is_not_gone_through_later() -> None:
    with pausing_garbage_collection():
        made: list[list[int]] = [[] for _ in range(2000)]
    try:
        assert gc.get_freeze_count() >= len(made)
        assert not any(item is made[0] for item in gc.get_objects())
    finally:
        gc.unfreeze()


def run_plan_and_print_threads() -> list[str]:
    """What a process says after a search: its threads, and the variable that OpenBLAS reads."""
    program = (
        "import os, sys; from phalanx.cli._app import run_command_line;"
        "run_command_line(['plan', '--model=gpt2', '--gpu=h100-sxm', '--nodes=1']);"
        "print(len(os.listdir('/proc/self/task')), os.environ.get('OPENBLAS_NUM_THREADS'))"
    )
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()[-1].split()


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_a_search_starts_no_threads_and_hands_on_no_number_of_them() -> None:
    assert run_plan_and_print_threads() == ["1", "None"]


def test_threads_that_the_user_asked_for_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    import_numpy_without_threads()
    assert os.environ["OPENBLAS_NUM_THREADS"] == "3"
