"""`phalanx logs`: the lines of real processes, in the order in which they were written."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from commands import DEADLINE_S
from phalanx.checkpoint.ownership.run_lock import LockHolder
from phalanx.cli import _app
from phalanx.cli._log_start import find_log_start
from phalanx.core.log_times import build_log_times_path, parse_log_times
from phalanx.launch.merge_logs import LogFollower
from phalanx.launch.output_destination import (
    OutputDestination,
    build_output_destination_path,
    list_output_destinations,
)
from phalanx.launch.paths import rank_log_path
from phalanx.launch.rank_logs import LogLine
from phalanx.observe.bus import Bus
from phalanx.observe.events import RunFinished, StepFinished

# A rank: does what it is told line by line, and answers each on a descriptor of its own.
RANK = """
import os, sys
from pathlib import Path
from phalanx.core.logs import redirect_output_to_log
from phalanx.core.secrets import Redactor

answers = int(sys.argv[2])
redirect_output_to_log(Path(sys.argv[1]), Redactor(os.environ), with_times=True)
for order in sys.stdin:
    how, _, text = order.rstrip("\\n").partition(" ")
    text = text.encode().decode("unicode_escape")
    if how == "print":
        print(text)
    elif how == "torn":
        print(text, end="", flush=True)
    elif how == "c":
        os.write(1, text.encode() + b"\\n")
    os.write(answers, b".")
"""


class Rank:
    """A process whose log is that of a rank."""

    def __init__(self, run_dir: Path, rank: int, attempt: int = 0) -> None:
        self._answers, end = os.pipe()
        self.log = rank_log_path(run_dir, rank, attempt)
        self._process = subprocess.Popen(
            [sys.executable, "-c", RANK, str(self.log), str(end)],
            stdin=subprocess.PIPE,
            pass_fds=(end,),
            text=True,
            env=os.environ | {"A_SECRET_KEY": "hunter2hunter2"},
        )
        os.close(end)

    def do(self, how: str, text: str) -> None:
        """Returns once it is done, so that what two ranks do has an order."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{how} {text}\n")
        self._process.stdin.flush()
        assert os.read(self._answers, 1) == b"."

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(DEADLINE_S) == 0
        os.close(self._answers)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Rank]]:
    started = [Rank(tmp_path, 0), Rank(tmp_path, 1)]
    yield started
    for rank in started:
        rank.end()


def read(run_dir: Path, rank: int | None = None) -> list[LogLine]:
    return list(LogFollower(run_dir, rank).read_new_lines(is_last=True))


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert _app.run_command_line(["logs", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert _app.run_command_line(["logs", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1, captured.err
    return captured.err


def test_lines_of_two_ranks_come_in_the_order_in_which_they_were_printed(
    tmp_path: Path, ranks: list[Rank]
) -> None:
    began_s = time.time()
    for number in range(6):
        # A tick of the clock between two lines.
        while time.time() - began_s < 0.001 * (number + 1):
            pass
        ranks[number % 3 % 2].do("print", f"line {number}")
    lines = read(tmp_path)
    assert [line.text for line in lines] == [f"line {number}" for number in range(6)]
    assert [line.rank for line in lines] == [0, 1, 0, 0, 1, 0]
    assert all(line.is_exact for line in lines)
    assert all(began_s - 0.001 <= line.time_unix_s <= time.time() for line in lines)
    assert [line.text for line in read(tmp_path, 1)] == ["line 1", "line 4"]


def test_a_line_of_c_code_lies_between_the_times_of_its_neighbours(
    tmp_path: Path, ranks: list[Rank]
) -> None:
    ranks[0].do("c", "before any")
    ranks[0].do("print", "first")
    ranks[0].do("c", "between")
    ranks[0].do("print", "second")
    ranks[0].do("c", "after all")
    before, first, between, second, after = read(tmp_path)
    assert [line.is_exact for line in (before, first, between, second, after)] == [
        False, True, False, True, False,
    ]  # fmt: skip
    assert before.latest_unix_s == before.time_unix_s == first.time_unix_s
    assert between.time_unix_s == first.time_unix_s
    assert between.latest_unix_s == second.time_unix_s
    assert after.time_unix_s == second.time_unix_s
    assert after.latest_unix_s == max(ranks[0].log.stat().st_mtime, second.time_unix_s)


def test_of_lines_of_c_code_before_all_others_the_latest_time_alone_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = rank_log_path(tmp_path, 0, 0)
    log.parent.mkdir(parents=True)
    log.write_text("from a library\n")
    build_log_times_path(log).touch()
    os.utime(log, (1_700_000_000, 1_700_000_000))
    assert _app.run_command_line(["logs", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "<22:13:20.000  rank 0  from a library"
    assert _app.run_command_line(["logs", str(tmp_path), "--json"]) == 0
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (line["time_unix_s"], line["before_unix_s"]) == (None, 1_700_000_000.0)
    assert line["is_exact"] is False


def test_two_prints_of_one_line_are_one_line(tmp_path: Path, ranks: list[Rank]) -> None:
    ranks[0].do("torn", "half")
    follower = LogFollower(tmp_path)
    assert list(follower.read_new_lines()) == [], "it waits for its end"
    ranks[0].do("print", " and half")
    (line,) = follower.read_new_lines()
    assert line.text == "half and half"
    assert line.is_exact


def test_a_log_is_what_it_was_without_times(tmp_path: Path, ranks: list[Rank]) -> None:
    """Whoever reads the log alone reads what was printed; the times stand beside it."""
    ranks[0].do("print", "plain")
    ranks[0].do("c", "words")
    assert ranks[0].log.read_bytes() == b"plain\nwords\n"
    times = build_log_times_path(ranks[0].log)
    (span,) = parse_log_times(times.read_bytes().splitlines())
    assert (span.start, span.end) == (0, 6)


def test_secrets_and_controls_reach_no_terminal(
    tmp_path: Path,
    ranks: list[Rank],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where C code printed a secret while the rank lives: its log is mended at its end only."""
    monkeypatch.setenv("A_SECRET_KEY", "hunter2hunter2")
    ranks[0].do("print", "key hunter2hunter2")
    ranks[0].do("c", "again hunter2hunter2")
    ranks[0].do("print", "\\x1b[2Jgone\\x07")
    ranks[0].do("print", "10 %\\r20 %\\r100 %")
    lines = shown(capsys, str(tmp_path))
    assert not [line for line in lines if "hunter2" in line or "\x1b" in line or "\x07" in line]
    assert [line.split("rank 0  ")[1] for line in lines[1:]] == [
        "key ***", "again ***", " [2Jgone ", "100 %",
    ]  # fmt: skip
    first, *_ = [json.loads(line) for line in shown(capsys, str(tmp_path), "--json")]
    assert first["schema"] == "phalanx.log-line/1"
    assert (first["rank"], first["attempt"], first["text"]) == (0, 0, "key ***")
    assert first["is_exact"] is True


def test_lines_are_chosen_by_text_and_by_time(
    tmp_path: Path, ranks: list[Rank], capsys: pytest.CaptureFixture[str]
) -> None:
    bus = Bus(rank=0, run_dir=tmp_path)
    ranks[0].do("print", "early bird")
    ranks[1].do("print", "early worm")
    bus.emit(step(119))
    emitted_s = time.time()
    # The clock of events has tenths of a millisecond.
    while time.time() - emitted_s < 0.001:
        pass
    ranks[0].do("print", "late bird")
    ranks[0].do("c", "later bird")
    bus.close()
    run = str(tmp_path)
    assert [line[-4:] for line in shown(capsys, run, "--grep", "worm")[1:]] == ["worm"]
    birds = shown(capsys, run, "--grep", "bird", "--since", "step:120")[1:]
    assert [line.split("rank 0  ")[1] for line in birds] == ["late bird", "later bird"]
    assert birds[0][0] == " "
    assert birds[1][0] == "~", "of C code: its time is that of its neighbour"
    assert len(shown(capsys, run, "--since", "1h")) == 5
    assert _app.run_command_line(["logs", run, "--since", "2200-01-01"]) == 0
    assert capsys.readouterr() == ("", "no such line was printed\n")
    assert "no record that step 300 began" in refused(capsys, run, "--since", "step:300")


def step(number: int) -> StepFinished:
    return StepFinished(number, 1.0, 1, 1, 1.0, 1.0, 1.0, 1.0, {}, 0.0, 1)


@pytest.mark.parametrize("since", ["yesterday", "10", "step:x", "1e9d", "99:99", "99999999999d"])
def test_a_time_that_is_none_is_refused(
    since: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_old_log(tmp_path, 0, 0, "text")
    assert "is no time" in refused(capsys, str(tmp_path), "--since", since)


def test_a_time_of_day_is_the_last_one_that_was(tmp_path: Path) -> None:
    """At ten past midnight 23:50 is twenty minutes ago, and not in the next night."""
    in_an_hour = datetime.now(UTC) + timedelta(hours=1)
    start_s = find_log_start(tmp_path, f"{in_an_hour:%H:%M}")
    assert start_s is not None
    assert time.time() - start_s == pytest.approx(23 * 3600, abs=120)


def write_old_log(run_dir: Path, rank: int, attempt: int, *lines: str) -> None:
    """As releases before wrote it: without times."""
    path = rank_log_path(run_dir, rank, attempt)
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def test_logs_without_times_come_rank_after_rank_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for attempt in (0, 1):
        for rank in (0, 1):
            write_old_log(tmp_path, rank, attempt, f"{attempt}.{rank} a", f"{attempt}.{rank} b")
    assert _app.run_command_line(["logs", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    texts = [line[-5:] for line in captured.out.splitlines() if "no time" in line]
    assert texts == ["0.0 a", "0.0 b", "0.1 a", "0.1 b", "1.0 a", "1.0 b", "1.1 a", "1.1 b"]
    assert "the logs of ranks 0 and 1 have no times" in captured.err
    assert shown(capsys, str(tmp_path), "--since", "1h") == []


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no rank has left a log there" in refused(capsys, str(tmp_path / "none"))
    write_old_log(tmp_path, 0, 0, "text")
    assert "rank 7 has left no log" in refused(capsys, str(tmp_path), "--rank", "7")
    # A link in place of a log is none of ours, and a torn file of times costs no line.
    os.symlink("/dev/zero", rank_log_path(tmp_path, 1, 0))
    build_log_times_path(rank_log_path(tmp_path, 0, 0)).write_bytes(b"0 5\n\xff 1\n9 2 1.0\n")
    assert [line.text for line in read(tmp_path)] == ["text"]


def test_following_ends_with_the_run(tmp_path: Path, ranks: list[Rank]) -> None:
    command = [sys.executable, "-m", "phalanx", "logs", str(tmp_path), "--follow"]
    ranks[0].do("print", "first")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline().startswith("-- attempt 0")
            assert process.stdout.readline().endswith("rank 0  first\n")
            ranks[1].do("print", "second")
            assert process.stdout.readline().endswith("rank 1  second\n")
            ranks[0].do("torn", "third")
            bus = Bus(rank=-1, run_dir=tmp_path)
            bus.emit(RunFinished("finished", 0, 1, 1.0))
            bus.close()
            assert process.stdout.readline().endswith("rank 0  third\n")
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()


def test_following_ends_where_nobody_reads(tmp_path: Path, ranks: list[Rank]) -> None:
    """`phalanx logs RUN --follow --json | head -1`."""
    command = [sys.executable, "-m", "phalanx", "logs", str(tmp_path), "--follow", "--json"]
    ranks[0].do("print", "first")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert json.loads(process.stdout.readline())["text"] == "first"
            process.stdout.close()
            ranks[0].do("print", "second")
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()


def test_following_a_run_that_was_cut_off_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_old_log(tmp_path, 0, 0, "text")
    holder = LockHolder(socket.gethostname(), 2**31 - 1, 1.0, "of-another-boot", 1.0)
    (tmp_path / "lock").write_text(json.dumps(asdict(holder)))
    os.utime(tmp_path / "lock", (1.0, 1.0))
    assert _app.run_command_line(["logs", str(tmp_path), "--follow"]) == 0
    captured = capsys.readouterr()
    assert captured.out.endswith("rank 0  text\n")
    assert "the run was cut off, it seems: its processes are gone" in captured.err


# --- output that another launcher has -------------------------------------------------------------


def record(run_dir: Path, destination: OutputDestination) -> None:
    path = build_output_destination_path(run_dir, destination.rank, destination.attempt)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(asdict(destination)))


def test_output_of_another_launcher_is_read_or_said_to_be_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = tmp_path / "stdout.log"
    theirs.write_text("from torchrun's file\n")
    here = socket.gethostname()
    record(tmp_path, OutputDestination(0, 0, "torchrun", here, "file", str(theirs)))
    record(tmp_path, OutputDestination(1, 0, "torchrun", here, "pipe"))
    record(tmp_path, OutputDestination(2, 0, "torchrun", "other", "file", str(theirs)))
    assert _app.run_command_line(["logs", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[1].endswith("no time  rank 0  from torchrun's file")
    assert "no log here of rank 1, attempt 0: torchrun has its output, a pipe" in captured.err
    assert f"{theirs} on other" in captured.err


def test_a_file_of_several_ranks_is_named_and_not_divided(tmp_path: Path) -> None:
    shared = tmp_path / "slurm-1.out"
    shared.write_text("whose line is this\n")
    here = socket.gethostname()
    for rank in (0, 1):
        record(tmp_path, OutputDestination(rank, 0, "Slurm", here, "file", str(shared)))
    assert [each.readable_log for each in list_output_destinations(tmp_path)] == [None, None]
    assert read(tmp_path) == []


def test_a_hole_of_a_log_that_was_cut_while_it_was_written_to_is_passed(tmp_path: Path) -> None:
    log = rank_log_path(tmp_path, 0, 0)
    log.parent.mkdir(parents=True)
    log.write_text("first\n")
    with log.open("r+b") as file:
        # Reading it would take minutes.
        file.truncate(30 << 30)
    follower = LogFollower(tmp_path)
    lines = list(follower.read_new_lines(is_last=True))
    assert lines[0].text == "first"
    assert sum(len(line.text) for line in lines) < 2**20
    with log.open("ab") as file:
        file.write(b"last\n")
    assert [line.text for line in follower.read_new_lines(is_last=True)] == ["last"]
