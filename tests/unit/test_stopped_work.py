"""How long the rows of a comparison still take, and what of a stopped one is taken over."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.job.schema import Job
from phalanx.verify.choose import Selection, select_layout_cases
from phalanx.verify.progress import RowTimeEstimator
from phalanx.verify.row import Row
from phalanx.verify.stopped_work import open_resumable_verify_work

WORK = [
    ("float64", "ddp"),
    ("float64", "zero3"),
    ("float64", "trainer-ddp"),
    ("float32", "ddp"),
    ("float32", "zero3"),
]


def test_rows_of_a_kind_take_as_long_as_those_before_them() -> None:
    now = 0.0
    times = RowTimeEstimator(WORK, clock=lambda: now)
    assert times.read().left_s is None
    assert times.read().running == "ddp in float64"
    for took in (4.0, 2.0, 10.0, 1.0):
        now += took
        times.count_finished_row()
    now += 0.25
    progress = times.read()
    assert (progress.num_done, progress.num_rows, progress.running) == (4, 5, "zero3 in float32")
    assert progress.left_s == 0.75


def test_a_kind_that_had_no_row_yet_takes_as_long_as_the_others() -> None:
    now = 0.0
    times = RowTimeEstimator(WORK, clock=lambda: now)
    now += 3.0
    times.count_finished_row()
    assert times.read().left_s == 4 * 3.0


def test_rows_that_were_there_before_take_no_time() -> None:
    now = 0.0
    times = RowTimeEstimator(WORK, 4, clock=lambda: now)
    assert times.read().left_s is None
    now += 2.0
    times.count_finished_row()
    progress = times.read()
    assert (progress.num_done, progress.running, progress.left_s) == (5, "", 0.0)


@pytest.fixture
def selection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Selection:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    job = Job.model_validate({})
    return select_layout_cases(job, "ddp,zero1", ranks=2, steps=6, shrink=True, types="float64")


def build_row_without_comparison(selection: Selection, index: int, crashed: str = "") -> Row:
    dtype, case = selection.work[index]
    return selection.build_row_without_comparison(case, dtype=dtype, crashed=crashed)


def interrupt(selection: Selection) -> None:
    with open_resumable_verify_work(selection, resume=True) as work:
        for name in ("reference-float64-3", "trainer-reference-3", "trainer-ddp"):
            (work.scratch.directory / name).mkdir()
        work.keep_row(build_row_without_comparison(selection, 0))
        raise KeyboardInterrupt


def test_an_error_and_a_stop_leave_rows_and_references_but_no_run_of_the_trainer(
    selection: Selection,
) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupt(selection)
    with open_resumable_verify_work(selection, resume=True) as work:
        assert [row.layout for row in work.earlier_rows] == ["ddp"]
        names = sorted(path.name for path in work.scratch.directory.iterdir())
        assert names == ["kept-rows.jsonl", "reference-float64-3", "trainer-reference-3"]
        work.stays = False
    assert not work.scratch.directory.exists()


def test_a_row_that_crashed_and_a_damaged_one_are_judged_again(selection: Selection) -> None:
    with open_resumable_verify_work(selection, resume=True) as work:
        work.keep_row(build_row_without_comparison(selection, 0, crashed="rank 1 ended"))
    with open_resumable_verify_work(selection, resume=True) as work:
        assert work.earlier_rows == ()
        work.keep_row(build_row_without_comparison(selection, 0))
        (work.scratch.directory / "kept-rows.jsonl").write_text("{}\n")
    with open_resumable_verify_work(selection, resume=True) as work:
        assert work.earlier_rows == ()
        work.stays = False


def test_a_directory_in_use_is_left_to_whoever_uses_it(selection: Selection) -> None:
    with open_resumable_verify_work(selection, resume=True) as first:
        first.keep_row(build_row_without_comparison(selection, 0))
        with open_resumable_verify_work(selection, resume=True) as second:
            assert second.scratch.directory != first.scratch.directory
            assert not second.stays
            assert second.earlier_rows == ()
        assert first.scratch.directory.exists()
        first.stays = False


def test_rows_of_another_torch_are_not_taken_over(
    selection: Selection, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_resumable_verify_work(selection, resume=True) as work:
        work.keep_row(build_row_without_comparison(selection, 0))
    with monkeypatch.context() as other:
        other.setattr("phalanx.verify.stopped_work.version", lambda package: "0.0")
        with open_resumable_verify_work(selection, resume=True) as work:
            assert work.earlier_rows == ()
            work.stays = False
    with open_resumable_verify_work(selection, resume=True) as work:
        assert len(work.earlier_rows) == 1
        work.stays = False


def test_rows_of_code_that_changed_meanwhile_are_not_kept(
    selection: Selection, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_resumable_verify_work(selection, resume=True) as work:
        with monkeypatch.context() as other:
            other.setattr("phalanx.verify.stopped_work.version", lambda package: "0.0")
            work.keep_row(build_row_without_comparison(selection, 0))
        work.keep_row(build_row_without_comparison(selection, 1))
    with open_resumable_verify_work(selection, resume=True) as work:
        assert work.earlier_rows == ()
        work.stays = False
