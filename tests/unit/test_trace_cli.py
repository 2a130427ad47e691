"""`phalanx trace` on runs that have ended: what it shows, and what it says of bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perfetto_reader import ReadTrace
from phalanx.cli._app import run_command_line
from phalanx.core.step_ranges import StepRange
from phalanx.observe.trace_part import (
    PART_SCHEMA,
    TracePartHeader,
    TracePartWriter,
    trace_part_path,
)
from phalanx.observe.trace_rows import PhaseSpan, StepSpan


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that has ended, with traces of two windows."""
    (tmp_path / "run" / "events").mkdir(parents=True)
    for steps in (StepRange(5, 6), StepRange(9, 9)):
        for rank in (0, 1):
            header = TracePartHeader(
                PART_SCHEMA, rank, 2, 0, *steps, False, "cpu", "host", 1, "one", "one"
            )
            path = trace_part_path(tmp_path / "run", rank, 0, steps)
            writer = TracePartWriter(path, header)
            for step in range(steps.first, steps.last + 1):
                writer.write_rows([StepSpan(step, step * 1000, step * 1000 + 900)])
                writer.write_rows(
                    [PhaseSpan(step, 0, 1, "forward", "", "", step * 1000, step * 1000 + 1)]
                )
            writer.close(is_complete=True)
    return tmp_path / "run"


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run_command_line(["trace", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_window_is_written_and_said(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ask(capsys, str(run_dir), "--steps", "5:6")
    assert (code, err) == (0, "")
    path = run_dir / "traces" / "steps-5-6.pftrace"
    trace = ReadTrace(path.read_bytes())
    assert [each.name for each in trace.slices(1, "phases")] == [
        "step 5", "forward", "step 6", "forward",
    ]  # fmt: skip
    assert f"trace   {path}" in out
    assert "steps 5 to 6 of 2 ranks: 12 spans, 0 collectives" in out
    assert "lacks" not in out


def test_kernels_that_were_not_traced_are_said_to_be_lacking(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = ask(capsys, str(run_dir), "--steps", "5:6", "--kernels")
    assert code == 0
    assert "lacks   operators and kernels: these steps were traced without them" in out


def test_facts_as_json(run_dir: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace_part_path(run_dir, 1, 0, StepRange(9, 9)).unlink()
    out_file = tmp_path / "mine.pftrace"
    code, out, _ = ask(capsys, str(run_dir), "--steps", "9", "--out", str(out_file), "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["schema"] == "phalanx.trace/1"
    assert facts["file"] == str(out_file)
    assert facts["num_bytes"] == out_file.stat().st_size
    assert (facts["ranks"], facts["missing_ranks"]) == ([0], [1])
    code, out, _ = ask(capsys, str(run_dir), "--steps", "9", "--out", str(out_file))
    assert "lacks   rank 1: no part was left" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "choose with --steps: 5:6, 9"),
        (("--steps", "7"), "no trace of steps 7 is there (the run has ended)"),
        (("--steps", "5:9"), 'observe.trace_steps=["5:9"]'),
        (("--steps", "6:5"), "ends before it begins"),
        (("--steps", "0:5"), "before step 1"),
        (("--steps", "a"), "is no range of steps"),
        (("--steps", "1:101"), "101 steps are more than the 100"),
        (("--steps", "1:11", "--kernels"), "11 steps are more than the 10 that fit with --kernels"),
        (("--next", "3"), "it has no next steps"),
        (("--next", "0"), "0 steps are none"),
        (("--steps", "5", "--next", "3"), "give one of them"),
        (("--steps", "5", "--timeout", "0"), "no time to wait"),
        (("--steps", "5", "--timeout", "nan"), "no time to wait"),
        (("--steps", "5", "--out", "."), "it is no file"),
        (("--steps", "5", "--out", "/dev/null"), "it is no file"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    run_dir: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    before = sorted(run_dir.rglob("*"))
    code, out, err = ask(capsys, str(run_dir), *arguments)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert said in line
    assert sorted(run_dir.rglob("*")) == before


def test_no_run_and_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = ask(capsys, str(tmp_path / "nothing"))
    assert (code, "no run is there" in err) == (2, True)
    (tmp_path / "old" / "events").mkdir(parents=True)
    code, out, err = ask(capsys, str(tmp_path / "old"), "--json")
    assert code == 2
    assert "no trace is there" in err
    assert json.loads(out)["schema"] == "phalanx.error/1"


def test_a_file_that_cannot_be_written(
    run_dir: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, _, err = ask(capsys, str(run_dir), "--steps", "5", "--out", str(tmp_path / "no" / "file"))
    assert code == 7
    assert "failed while writing the trace (No such file or directory)" in err


def test_a_trace_takes_the_place_of_no_file_that_is_none(
    run_dir: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`--out RUN/job.json`: the run could not be resumed."""
    (run_dir / "job.json").write_text("{}")
    code, _, err = ask(capsys, str(run_dir), "--steps", "5", "--out", str(run_dir / "job.json"))
    assert (code, "is there already, and is no trace" in err) == (2, True)
    assert (run_dir / "job.json").read_text() == "{}"
    for _ in range(2):
        code, _, _ = ask(capsys, str(run_dir), "--steps", "5", "--out", str(tmp_path / "again"))
        assert code == 0


def test_a_link_to_another_folder_is_refused(
    run_dir: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (run_dir / "traces").rename(tmp_path / "elsewhere")
    (run_dir / "traces").symlink_to(tmp_path / "elsewhere")
    code, _, err = ask(capsys, str(run_dir), "--steps", "5")
    assert (code, "it is a link to" in err) == (7, True)
    assert not list((tmp_path / "elsewhere").glob("*.pftrace"))


def test_a_run_that_is_at_the_steps_is_waited_for(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    part = trace_part_path(run_dir, 1, 0, StepRange(5, 6))
    lines = part.read_text().splitlines(keepends=True)
    part.write_text("".join(lines[:-1]))
    looks = iter(range(3))

    def is_live(run_dir: Path) -> bool:
        # At the third look the rank has written its end.
        if next(looks) == 2:
            part.write_text("".join(lines))
        return True

    monkeypatch.setattr("phalanx.run.collect_trace.is_run_live", is_live)
    monkeypatch.setattr("phalanx.run.live_trace.is_run_live", is_live)
    monkeypatch.setattr("phalanx.run.live_trace._POLL_INTERVAL_S", 0.0)
    code, out, _ = ask(capsys, str(run_dir), "--steps", "5:6")
    assert (code, "lacks" in out) == (0, False)
    assert next(looks, None) is None
    assert not (run_dir / "traces" / "request.json").exists(), "nothing had to be asked"


def test_parts_that_cannot_be_read(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        trace_part_path(run_dir, rank, 0, StepRange(9, 9)).write_text("spoilt")
    code, _, err = ask(capsys, str(run_dir), "--steps", "9")
    assert code == 2
    assert "no part of the trace can be read" in err
    assert not list(run_dir.rglob("*.pftrace"))
