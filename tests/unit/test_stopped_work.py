"""How long the rows of a comparison still take, as far as those before them tell."""

from __future__ import annotations

from phalanx.verify.progress import RowTimes

WORK = [
    ("float64", "ddp"),
    ("float64", "zero3"),
    ("float64", "trainer-ddp"),
    ("float32", "ddp"),
    ("float32", "zero3"),
]


def test_rows_of_a_kind_take_as_long_as_those_before_them() -> None:
    now = 0.0
    times = RowTimes(WORK, clock=lambda: now)
    assert times.read().left_s is None
    assert times.read().running == "ddp in float64"
    for took in (4.0, 2.0, 10.0, 1.0):
        now += took
        times.finish_row()
    now += 0.25
    progress = times.read()
    assert (progress.num_done, progress.num_rows, progress.running) == (4, 5, "zero3 in float32")
    assert progress.left_s == 0.75


def test_a_kind_that_had_no_row_yet_takes_as_long_as_the_others() -> None:
    now = 0.0
    times = RowTimes(WORK, clock=lambda: now)
    now += 3.0
    times.finish_row()
    assert times.read().left_s == 4 * 3.0


def test_rows_that_were_there_before_take_no_time() -> None:
    now = 0.0
    times = RowTimes(WORK, 4, clock=lambda: now)
    assert times.read().left_s is None
    now += 2.0
    times.finish_row()
    progress = times.read()
    assert (progress.num_done, progress.running, progress.left_s) == (5, "", 0.0)
