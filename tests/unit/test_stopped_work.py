"""How long the rows of a comparison still take, and what of a stopped one is taken over."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from phalanx.job.schema import Job
from phalanx.verify.choose import Selection, select_layout_cases
from phalanx.verify.progress import RowTimeEstimator
from phalanx.verify.read_files import (
    READ_FILES_NAME,
    are_read_files_unchanged,
    recording_read_files,
)
from phalanx.verify.row import Row
from phalanx.verify.stopped_work import VerifyWork, open_resumable_verify_work

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


def keep_row(work: VerifyWork, row: Row, *names: Path) -> None:
    """As ranks do: first the files that they have read."""
    with recording_read_files(work.scratch.directory) as read_files:
        for name in names:
            name.read_bytes()
    read_files.write()
    work.keep_row(row)


def interrupt(selection: Selection) -> None:
    with open_resumable_verify_work(selection, resume=True) as work:
        for name in ("reference-float64-3", "trainer-reference-3", "trainer-ddp"):
            (work.scratch.directory / name).mkdir()
        keep_row(work, build_row_without_comparison(selection, 0))
        raise KeyboardInterrupt


def test_an_error_and_a_stop_leave_rows_and_references_but_no_run_of_the_trainer(
    selection: Selection,
) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupt(selection)
    with open_resumable_verify_work(selection, resume=True) as work:
        assert [row.layout for row in work.earlier_rows] == ["ddp"]
        names = sorted(path.name for path in work.scratch.directory.iterdir())
        assert names == [
            *("kept-rows.jsonl", "read-files.json"),
            *("reference-float64-3", "trainer-reference-3"),
        ]
        work.stays = False
    assert not work.scratch.directory.exists()


def test_a_row_that_crashed_and_a_damaged_one_are_judged_again(selection: Selection) -> None:
    with open_resumable_verify_work(selection, resume=True) as work:
        keep_row(work, build_row_without_comparison(selection, 0, crashed="rank 1 ended"))
    with open_resumable_verify_work(selection, resume=True) as work:
        assert work.earlier_rows == ()
        keep_row(work, build_row_without_comparison(selection, 0))
        (work.scratch.directory / "kept-rows.jsonl").write_text("{}\n")
    with open_resumable_verify_work(selection, resume=True) as work:
        assert work.earlier_rows == ()
        keep_row(work, build_row_without_comparison(selection, 0))
        kept = work.scratch.directory / "kept-rows.jsonl"
        assert '"wall_s": 0.0' in kept.read_text()
        kept.write_text(kept.read_text().replace('"wall_s": 0.0', '"wall_s": 0.1'))
    with open_resumable_verify_work(selection, resume=True) as work:
        assert work.earlier_rows == (), "a bit of it has changed"
        work.stays = False


def test_a_directory_in_use_is_left_to_whoever_uses_it(selection: Selection) -> None:
    with open_resumable_verify_work(selection, resume=True) as first:
        keep_row(first, build_row_without_comparison(selection, 0))
        with open_resumable_verify_work(selection, resume=True) as second:
            assert second.scratch.directory != first.scratch.directory
            assert not second.stays
            assert second.earlier_rows == ()
        assert first.scratch.directory.exists()
        first.stays = False


def test_rows_of_a_job_that_asked_for_another_type_are_not_taken_over(
    selection: Selection,
) -> None:
    """It is judged alike; its rows say of that type that nobody judged it."""
    job = Job.model_validate({"precision": {"compute": "bf16"}})
    narrow = select_layout_cases(job, "ddp,zero1", ranks=2, steps=6, shrink=True, types="float64")
    assert narrow.job == selection.job
    with open_resumable_verify_work(narrow, resume=True) as work:
        keep_row(work, build_row_without_comparison(narrow, 0))
    with open_resumable_verify_work(selection, resume=True) as work:
        assert work.earlier_rows == ()
        work.stays = False
    with open_resumable_verify_work(narrow, resume=True) as work:
        assert len(work.earlier_rows) == 1
        work.stays = False


def test_rows_of_another_torch_are_not_taken_over(
    selection: Selection, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_resumable_verify_work(selection, resume=True) as work:
        keep_row(work, build_row_without_comparison(selection, 0))
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
            keep_row(work, build_row_without_comparison(selection, 0))
        keep_row(work, build_row_without_comparison(selection, 1))
    with open_resumable_verify_work(selection, resume=True) as work:
        assert work.earlier_rows == ()
        work.stays = False


def test_rows_and_references_of_a_file_that_is_another_now_are_not_taken_over(
    selection: Selection, tmp_path: Path
) -> None:
    """A config.json of Hugging Face, say, or weights that a factory loads."""
    config = tmp_path / "config.json"
    config.write_text('{"hidden_act": "silu"}')
    for activation in ("silu", "gelu"):
        config.write_text(f'{{"hidden_act": "{activation}"}}')
        with open_resumable_verify_work(selection, resume=True) as work:
            assert work.earlier_rows == ()
            assert list(work.scratch.directory.iterdir()) == []
            (work.scratch.directory / "reference-float64-3").mkdir()
            keep_row(work, build_row_without_comparison(selection, 0), config)
    with open_resumable_verify_work(selection, resume=True) as work:
        assert len(work.earlier_rows) == 1
        assert (work.scratch.directory / "reference-float64-3").exists()
        work.stays = False


def test_a_file_that_changes_behind_its_reading_ends_what_is_kept(
    selection: Selection, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    with open_resumable_verify_work(selection, resume=True) as work:
        keep_row(work, build_row_without_comparison(selection, 0), config)
        config.write_text("{ }")
        # The ranks go on with what they have read, and others would read the new one.
        keep_row(work, build_row_without_comparison(selection, 1), config)
    with open_resumable_verify_work(selection, resume=True) as work:
        assert work.earlier_rows == ()
        work.stays = False


def test_modules_from_any_folder_are_read_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "lib" / "scale_of_another_folder.py"
    source.parent.mkdir()
    source.write_text("SCALE = 1.0\n")
    monkeypatch.syspath_prepend(source.parent)
    # Once from its source, and once from what was compiled of it.
    for place in ("first", "second"):
        directory = tmp_path / place
        directory.mkdir()
        with recording_read_files(directory) as read_files:
            importlib.import_module(source.stem)
        monkeypatch.delitem(sys.modules, source.stem)
        read_files.write()
        assert str(source) in (directory / READ_FILES_NAME).read_text()
        assert are_read_files_unchanged(directory)
    source.write_text("SCALE = 3.00\n")
    assert not are_read_files_unchanged(tmp_path / "first")
    assert not are_read_files_unchanged(tmp_path / "second")


def test_what_ranks_make_themselves_is_no_read_file(tmp_path: Path) -> None:
    run, cache, passing = tmp_path / "run", tmp_path / "cache", tmp_path / "passing"
    run.mkdir()
    passing.write_text("")
    with recording_read_files(run) as read_files:
        for path in (run / "trace.json", cache):
            path.write_text("1")
            path.read_text()
        passing.read_text()
    passing.unlink()
    read_files.write()
    for path in (run / "trace.json", cache):
        path.write_text("22")
    assert are_read_files_unchanged(run)
    (run / READ_FILES_NAME).write_text("[]")
    assert not are_read_files_unchanged(run)
