"""The supervisor against real processes: start, fail, restart, stop, and leave nothing behind."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_launch_entries import Payload

from phalanx.core.errors import ExitCode
from phalanx.launch import kill_deadline, server_process
from phalanx.launch.kill_deadline import WAIT_FOR_ATTEMPT_WINDOW_S
from phalanx.launch.launch_spec import LaunchSpec, RepeatedAttempts
from phalanx.launch.outcome import RunOutcome
from phalanx.launch.server_process import end_server_ahead, start_server_ahead
from phalanx.launch.supervisor import supervise_ranks
from phalanx.observe.bus import Bus
from phalanx.observe.events import (
    Envelope,
    Note,
    RankFailed,
    RanksStarted,
    RestartScheduled,
    parse_event_line,
)

HERE = Path(__file__).parent
ENTRIES = "test_launch_entries"
DEADLINE_S = 300.0
# Whose children, groups and connections ranks are is what is tested.
pytestmark = pytest.mark.usefixtures("own_processes")


class Run:
    """A run directory, a place for marks, and what the supervisor said and recorded."""

    def __init__(self, directory: Path) -> None:
        self.dir = directory / "run"
        self.marks = directory / "marks"
        self.said: list[str] = []
        self.dir.mkdir()
        self.marks.mkdir()

    def payload(self, **more: Any) -> dict[str, Any]:
        return {"run_dir": str(self.dir), "marks": str(self.marks)} | more

    def supervise(
        self,
        entry: str,
        *,
        on_tick: Callable[[], None] = lambda: None,
        num_ranks: int = 2,
        # Every attempt has a store, whose process would import it anew.
        preload: tuple[str, ...] = ("torch.distributed",),
        payload: dict[str, Any] | None = None,
        of_attempt: Callable[[], dict[str, Any]] = dict,
        **options: Any,
    ) -> RunOutcome:
        entry = entry if ":" in entry else f"{ENTRIES}:{entry}"

        def make_payload() -> Payload:
            return Payload(self.payload(**payload or {}) | of_attempt())

        attempts = RepeatedAttempts(make_payload, newest_step=40)
        spec = LaunchSpec(entry, attempts, num_ranks, self.dir, preload, **options)
        bus = Bus(rank=-1, run_dir=self.dir)
        deadline = time.monotonic() + DEADLINE_S

        def tick() -> None:
            assert time.monotonic() < deadline, f"{self.said} {self.marked()}"
            on_tick()

        try:
            return supervise_ranks(spec, bus=bus, on_tick=tick, say=self.said.append)
        finally:
            bus.close()

    def events(self, kind: type) -> list[Envelope]:
        lines = (self.dir / "events" / "supervisor.jsonl").read_text().splitlines()
        return [
            found
            for line in lines
            if (found := parse_event_line(line)) and isinstance(found.event, kind)
        ]

    def marked(self) -> list[str]:
        return sorted(path.name for path in self.marks.iterdir() if path.suffix != ".partial")

    def has(self, *marks: str) -> bool:
        return all((self.marks / mark).exists() for mark in marks)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.syspath_prepend(str(HERE))
    return Run(tmp_path)


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """After every test: no process, no shared memory, no temporary file, no changed signal
    handler."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    shared_before = set(os.listdir("/dev/shm"))
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    }
    yield
    wait_until(lambda: not psutil.Process().children(recursive=True))
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert signal.set_wakeup_fd(-1) == -1
    mine = {
        name
        for name in set(os.listdir("/dev/shm")) - shared_before
        if _is_mine(Path("/dev/shm") / name)
    }
    # Files of other tests that run beside these have a name for a moment.
    wait_until(lambda: mine.isdisjoint(os.listdir("/dev/shm")))
    # Torch's compiler makes a folder for itself when it is imported.
    left = [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]
    assert not left


def _is_mine(path: Path) -> bool:
    """False for files of other programs on this machine that come and go meanwhile."""
    try:
        return path.stat().st_uid == os.getuid() and not path.name.startswith("sem.")
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> float:
    """Seconds until `condition` held."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < deadline_s, "timed out"
        time.sleep(0.005)
    return time.monotonic() - started


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def find_server(supervisor_pid: int) -> psutil.Process:
    """The process that forks the ranks; its parent, which has imported, forked it."""
    [template] = psutil.Process(supervisor_pid).children()
    [server] = template.children()
    return server


def descendants(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def once(condition: Callable[[], bool], act: Callable[[], None]) -> Callable[[], None]:
    """A tick that acts the first time `condition` holds."""
    done: list[bool] = []

    def tick() -> None:
        if not done and condition():
            done.append(True)
            act()

    return tick


def test_ranks_reduce_and_only_loopback_listens(run: Run) -> None:
    listening: list[tuple[str, int]] = []

    def look() -> None:
        for pid in [os.getpid(), *descendants(os.getpid())]:
            found = psutil.Process(pid).net_connections(kind="inet")
            listening.extend(link.laddr for link in found if link.status == psutil.CONN_LISTEN)
        (run.marks / "go").touch()

    on_tick = once(lambda: run.has("reduced-0-0", "reduced-1-0"), look)
    outcome = run.supervise("reduce", preload=("torch", "torch.distributed"), on_tick=on_tick)
    assert outcome == RunOutcome(0, "finished", "", 1), outcome.message
    assert len(listening) >= 3  # the store and a gloo pair of each rank
    assert {address for address, _ in listening} == {"127.0.0.1"}
    for rank in range(2):
        assert "total 3.0" in (run.dir / "logs" / f"rank-{rank:04d}-attempt-00.log").read_text()
    [started] = run.events(RanksStarted)
    assert len(started.event.pids) == 2
    assert started.rank == -1


def test_traceback_of_the_first_rank_comes_first_and_the_others_are_folded(run: Run) -> None:
    outcome = run.supervise("one_raises", preload=("torch", "torch.distributed"), num_ranks=3)
    lines = outcome.message.splitlines()
    assert (outcome.exit_code, outcome.status, outcome.attempts) == (1, "failed", 1)
    assert lines[0] == "rank 1 failed before the first step:"
    assert lines[1].startswith("Traceback")
    assert ENTRIES in lines[2], "the first frame shown is the user's, not ours"
    assert lines[-5:-2] == ["ValueError: boom", "in two lines", "ranks 0, 2: ended because of that"]
    assert re.fullmatch(
        rf"your code: .*{ENTRIES}\.py:\d+", lines[-2]
    )  # what one looks for stands last
    assert lines[-1] == f"log: {run.dir / 'logs' / 'rank-0001-attempt-00.log'}"
    report = json.loads((run.dir / "logs" / "rank-0001-attempt-00.error.json").read_text())
    assert report["type"] == "ValueError"
    assert report["exit_code"] == 1
    assert not report["secondary"]
    # On a busy machine the others may be killed before they notice, and leave no report.
    others = [run.dir / "logs" / f"rank-{rank:04d}-attempt-00.error.json" for rank in (0, 2)]
    assert all(json.loads(path.read_text())["secondary"] for path in others if path.exists())


def test_a_phalanx_error_is_one_line_and_is_not_tried_again(run: Run) -> None:
    outcome = run.supervise("bad_data")
    assert outcome == RunOutcome(
        4, "failed", "corpus.txt: the corpus is empty; choose another file", 1
    )
    assert not run.events(RestartScheduled)


def test_a_killed_rank_is_restarted_and_a_resumed_run_appends(run: Run) -> None:
    epochs = itertools.count(7)
    outcome = run.supervise("killed_once", of_attempt=lambda: {"epoch": next(epochs)})
    assert (outcome.exit_code, outcome.attempts) == (0, 2)
    told = {name for name in run.marked() if name.startswith("epoch")}
    assert told == {
        f"epoch-{7 + attempt}-{rank}-{attempt}" for attempt in (0, 1) for rank in (0, 1)
    }
    [failed], [restart] = run.events(RankFailed), run.events(RestartScheduled)
    assert (failed.event.failed_rank, failed.event.step, failed.event.phase) == (1, 2, "forward")
    assert (failed.event.cause, failed.event.detail) == ("signal", "killed by SIGKILL")
    # How soon is for drills to measure: here other tests may have the processor.
    assert failed.event.detected_s >= 0
    assert restart.event == RestartScheduled(restart=1, budget=3, from_step=40)
    expected = (
        "rank 1 was killed by SIGKILL at step 2 in forward; starting again from step 40 (restart 1"
        " of 3)"
    )
    assert run.said == [expected]
    assert [started.attempt for started in run.events(RanksStarted)] == [0, 1]
    assert len(run.events(Note)) == 1, "the second attempt came from the same server"

    assert run.supervise("killed_once").exit_code == 0
    logs = sorted(path.name for path in (run.dir / "logs").glob("rank-0000-*.log"))
    assert logs == [f"rank-0000-attempt-{number:02d}.log" for number in range(3)]


def test_a_survivor_that_lacks_a_processor_is_waited_for(run: Run) -> None:
    """What it holds may be all that there is of the state: it needs 4 s and more by the clock,
    since six others want its core."""
    outcome = run.supervise(
        "survives_without_a_processor", payload={"needed_s": 0.7}, keeps_ranks=True
    )
    assert (outcome.exit_code, outcome.attempts) == (0, 2), outcome.message
    first, second = run.events(RanksStarted)
    assert second.event.kept == [0]
    assert second.event.pids[0] == first.event.pids[0]
    assert second.monotonic_s - first.monotonic_s > WAIT_FOR_ATTEMPT_WINDOW_S
    assert run.has("kept-0-1")


def test_a_rank_that_is_started_beside_others_is_asked_to_stop_and_not_ended(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the kept rank holds would be lost. The run's directory is named from where the command
    stands, and the kept rank no longer stands there."""
    monkeypatch.chdir(run.dir.parent)
    run.dir = Path("run")
    outcome = run.supervise(
        "is_asked_to_stop_as_it_starts", keeps_ranks=True, preload=("phalanx.train.stop",)
    )
    assert (outcome.exit_code, outcome.attempts) == (75, 2), outcome.message
    assert run.marked() == ["asked-1-1"]
    logs = sorted(path.name for path in Path("run/logs").glob("rank-0000-*.log"))
    assert logs == [f"rank-0000-attempt-{number:02d}.log" for number in range(2)]


def test_the_same_exception_at_the_same_step_is_deterministic(run: Run) -> None:
    outcome = run.supervise("always_raises", payload={"differently": False}, max_restarts=10)
    assert (outcome.exit_code, outcome.status, outcome.attempts) == (10, "failed", 3)
    lines = outcome.message.splitlines()
    assert lines[0] == "deterministic failure at step 31: ValueError: boom (3 times in a row)"
    assert lines[1] == "rank 0 failed at step 31 in backward:"
    assert "ValueError: boom " in outcome.message


def test_an_outage_is_waited_for_with_pauses(run: Run) -> None:
    options: dict[str, Any] = {"max_restarts": 1, "outage_s": 60.0}
    outcome = run.supervise("meets_an_outage", payload={"num_attempts": 2}, **options)
    assert (outcome.exit_code, outcome.attempts, outcome.restarts) == (0, 3, 2), outcome.message
    first, second = run.events(RestartScheduled)
    assert (first.event.pause_s, second.event.pause_s) == (0.0, 1.0)
    assert (first.event.restart, second.event.restart) == (1, 1)
    starts = run.events(RanksStarted)
    assert starts[2].monotonic_s - second.monotonic_s >= 1.0
    assert run.said[0].endswith("starting again from step 40 (restart 1 of 1)")
    assert run.said[1].endswith(
        "starting again from step 40 in 1.0 s (restart 1 of 1; an outage, which is waited for"
        " 1 m 00 s: resilience.outage_s)"
    )


def test_a_stop_in_the_pause_of_an_outage_ends_the_run_at_once(run: Run) -> None:
    def is_in_pause() -> bool:
        return len(run.said) == 2

    outcome = run.supervise(
        "meets_an_outage",
        payload={"num_attempts": 9},
        outage_s=60.0,
        on_tick=once(is_in_pause, lambda: os.kill(os.getpid(), signal.SIGTERM)),
    )
    assert (outcome.exit_code, outcome.status, outcome.attempts) == (75, "preempted", 2)
    assert outcome.message == (
        "stopped by SIGTERM before ranks were started again; the checkpoint of step 40 stands"
    )


def test_the_restart_budget_names_the_last_cause(run: Run) -> None:
    outcome = run.supervise("always_raises", payload={"differently": True}, max_restarts=1)
    assert (outcome.exit_code, outcome.attempts) == (10, 2)
    first = outcome.message.splitlines()[0]
    assert first.startswith("the restart budget is spent: 1 in 1 h")
    assert "rank 0 failed at step 31 in backward: ValueError: boom 1" in first


def test_ranks_without_steps_are_started_once_and_no_budget_is_blamed(run: Run) -> None:
    outcome = run.supervise("killed_once", stepless="evaluating")
    assert (outcome.exit_code, outcome.status, outcome.attempts) == (1, "failed", 1)
    first = outcome.message.splitlines()[0]
    # The kernel has counted no kill for memory: none is suspected.
    assert re.fullmatch(r"rank [01] was killed by SIGKILL while evaluating", first)
    assert "restart" not in outcome.message


def test_a_segfault_shows_its_stack(run: Run) -> None:
    outcome = run.supervise("segfaults", max_restarts=0)
    assert outcome.exit_code == 10
    assert "rank 0 was killed by SIGSEGV before the first step" in outcome.message
    assert "Fatal Python error: Segmentation fault" in outcome.message
    assert f"{ENTRIES}.py" in outcome.message


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("os._exit", 0),
        ("SystemExit", 0),
        ("thread", 0),
        ("C", 75),
        # Codes that are not 0 are like C's, and 130 is in a run of test_exits.
        pytest.param("os._exit", 8, marks=pytest.mark.long),
        pytest.param("SystemExit", 130, marks=pytest.mark.long),
    ],
)
def test_a_rank_that_leaves_before_its_work_is_done_has_crashed(
    run: Run, how: str, code: int
) -> None:
    """Whatever code it leaves with, and though the other one waits for it for ever: only the
    entry's return counts."""
    outcome = run.supervise(
        "exits", payload={"how": how, "code": code, "leavers": [1]}, max_restarts=1
    )
    assert (outcome.exit_code, outcome.status, outcome.attempts) == (10, "failed", 2)
    words = (
        f"sys.exit({code}) was called"
        if how == "SystemExit"
        else f"exited with code {code} at step 5 in data"
    )
    assert words in outcome.message.splitlines()[0]
    assert [failed.event.failed_rank for failed in run.events(RankFailed)] == [1, 1]


def test_all_ranks_that_leave_have_not_finished(run: Run) -> None:
    outcome = run.supervise(
        "exits", payload={"how": "os._exit", "code": 0, "leavers": [0, 1]}, max_restarts=10
    )
    assert (outcome.exit_code, outcome.status, outcome.attempts) == (10, "failed", 3)
    assert outcome.message.startswith(
        "deterministic failure at step 5: exited with code 0 (3 times in a row)"
    )


def test_a_rank_that_leaves_before_the_first_step_is_not_tried_again(run: Run) -> None:
    outcome = run.supervise(
        "exits", payload={"how": "SystemExit", "code": 0, "leavers": [0, 1], "step": 0}
    )
    assert (outcome.exit_code, outcome.attempts) == (1, 1)
    assert "sys.exit(0) was called before the run was done" in outcome.message
    assert f"{ENTRIES}.py" in outcome.message, "the line that called it"


def test_a_code_that_the_entry_returns_passes_through(run: Run) -> None:
    outcome = run.supervise("exits", payload={"how": "return", "code": 8, "leavers": [0, 1]})
    assert (outcome.exit_code, outcome.attempts) == (8, 1)
    assert "ended with code 8 at step 5 in data" in outcome.message


def test_a_report_is_heard_although_the_way_out_blocks(run: Run) -> None:
    outcome = run.supervise("reports_and_hangs")
    assert (outcome.exit_code, outcome.attempts) == (1, 1)
    assert "ValueError: boom" in outcome.message


def test_a_stopped_rank_is_named_not_those_that_waited_for_it(run: Run) -> None:
    outcome = run.supervise(
        "reduces_without_one",
        preload=("torch", "torch.distributed"),
        num_ranks=3,
        payload={"timeout_s": 2.0},
        max_restarts=0,
    )
    assert outcome.exit_code == 10
    words = "rank 1 kept the others waiting at step 12 in data: its process was stopped by a signal"
    assert words in outcome.message.splitlines()[0]
    assert "ranks 0, 2: waited at step 12 in collective (all_reduce gradients)" in outcome.message
    [failed] = run.events(RankFailed)
    assert (failed.event.failed_rank, failed.event.cause, failed.event.step) == (1, "hang", 12)


@pytest.mark.parametrize(
    ("how", "line"), [("busy", "while True:"), ("lock held", "ctypes.PyDLL(None).sleep(600)")]
)
def test_a_rank_that_hangs_is_named_with_its_line(run: Run, how: str, line: str) -> None:
    outcome = run.supervise("waits_for_one", payload={"how": how}, max_restarts=0)
    assert outcome.exit_code == 10
    assert "rank 1 kept the others waiting at step 12 in forward" in outcome.message.splitlines()[0]
    assert "rank 0: waited at step 12 in collective (all_reduce gradients)" in outcome.message
    source = (HERE / f"{ENTRIES}.py").read_text().splitlines()
    shown = outcome.message.partition("Stack (most recent call first):")[2]
    number = int(shown.partition(f'{ENTRIES}.py", line ')[2].partition(" ")[0])
    assert line in (source[number - 1].strip(), source[number - 2].strip())


@pytest.mark.parametrize(
    ("hangs", "words"),
    [
        (False, "rank 1 exited with code 0 at step 12 in backward"),
        (
            True,
            (
                "rank 1 kept the others waiting at step 12 in backward: its process was waiting for"
                " something else"
            ),
        ),
    ],
)
def test_an_abort_because_of_another_rank_does_not_hide_that_rank(
    run: Run, hangs: bool, words: str
) -> None:
    outcome = run.supervise("aborts_because_of_another", max_restarts=0, payload={"hangs": hangs})
    assert words in outcome.message.splitlines()[0]


def test_an_abort_says_why_however_much_came_after(run: Run) -> None:
    outcome = run.supervise(
        "aborts_because_of_another", num_ranks=1, max_restarts=0, payload={"hangs": False}
    )
    assert (
        "rank 0 was killed by SIGABRT at step 12 in collective (all_reduce gradients)"
        in outcome.message
    )
    assert "Watchdog caught collective operation timeout" in outcome.message, (
        "60 lines before the end"
    )


def test_sigterm_lets_the_ranks_save_and_leave(run: Run) -> None:
    on_tick = once(
        lambda: run.has("training-0-0", "training-1-0"),
        lambda: os.kill(os.getpid(), signal.SIGTERM),
    )
    outcome = run.supervise("trains", on_tick=on_tick)
    assert (outcome.exit_code, outcome.status) == (75, "preempted")
    assert run.said == ["SIGTERM: stopping after this step and saving, within 25 s"]
    assert not run.events(RankFailed)


@pytest.mark.parametrize("code", [ExitCode.RUN_LOCKED, ExitCode.RESOURCES])
def test_a_stop_that_is_refused_is_not_to_be_queued_again(run: Run, code: ExitCode) -> None:
    on_tick = once(
        lambda: run.has("training-0-0", "training-1-0"),
        lambda: os.kill(os.getpid(), signal.SIGTERM),
    )
    outcome = run.supervise("refused_when_it_stops", payload={"code": int(code)}, on_tick=on_tick)
    assert outcome == RunOutcome(int(code), "failed", "run: the last save is refused", 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_stop_of_every_process_of_the_job_lets_the_ranks_save(
    number: signal.Signals, run: Run
) -> None:
    """As systemd, and Slurm with --signal=USR1@120, send it: the server and the store must not die
    of it."""

    def terminate() -> None:
        for pid in [*descendants(os.getpid()), os.getpid()]:
            os.kill(pid, number)

    outcome = run.supervise(
        "trains", on_tick=once(lambda: run.has("training-0-0", "training-1-0"), terminate)
    )
    message = f"stopped by {number.name}; the checkpoint of step 40 stands"
    assert outcome == RunOutcome(75, "preempted", message, 1)


def test_a_rank_that_gets_sigterm_takes_the_others_along(run: Run) -> None:
    def terminate() -> None:
        os.kill(json.loads((run.marks / "training-1-0").read_text())["pid"], signal.SIGTERM)

    outcome = run.supervise(
        "trains", on_tick=once(lambda: run.has("training-0-0", "training-1-0"), terminate)
    )
    assert (outcome.exit_code, outcome.status, outcome.attempts) == (75, "preempted", 1)
    assert outcome.message == "stopped by a signal to a rank; the checkpoint of step 40 stands"


def test_a_closed_terminal_is_named_at_the_end(run: Run) -> None:
    # Under nohup it is ignored, and so it is by what runs there.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    on_tick = once(
        lambda: run.has("training-0-0", "training-1-0"), lambda: os.kill(os.getpid(), signal.SIGHUP)
    )
    try:
        outcome = run.supervise("trains", on_tick=on_tick)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (outcome.exit_code, outcome.status) == (75, "preempted")
    closed = "SIGHUP (the terminal was closed)"
    assert outcome.message == f"stopped by {closed}; the checkpoint of step 40 stands"


def test_one_ctrl_c_saves(run: Run) -> None:
    on_tick = once(
        lambda: run.has("training-0-0", "training-1-0"), lambda: os.kill(os.getpid(), signal.SIGINT)
    )
    outcome = run.supervise("trains", on_tick=on_tick)
    assert (outcome.exit_code, outcome.status) == (130, "interrupted")
    assert run.said == ["stopping after this step and saving; press Ctrl-C again to stop at once"]
    assert outcome.message == "stopped by Ctrl-C; the checkpoint of step 40 stands"


def test_a_rank_that_gets_sigint_is_no_ctrl_c(run: Run) -> None:
    def interrupt() -> None:
        os.kill(json.loads((run.marks / "training-1-0").read_text())["pid"], signal.SIGINT)

    outcome = run.supervise(
        "trains", on_tick=once(lambda: run.has("training-0-0", "training-1-0"), interrupt)
    )
    assert (outcome.exit_code, outcome.status) == (130, "interrupted")
    assert outcome.message == "stopped by SIGINT to a rank; the checkpoint of step 40 stands"


def test_two_ctrl_c_stop_at_once(run: Run) -> None:
    first = once(
        lambda: run.has("stuck-0-0", "stuck-1-0"), lambda: os.kill(os.getpid(), signal.SIGINT)
    )
    second = once(lambda: bool(run.said), lambda: os.kill(os.getpid(), signal.SIGINT))
    outcome = run.supervise(
        "stubborn", on_tick=lambda: (first(), second()), payload={"frozen": True}
    )
    # Its words are those of a stop that waited for nobody.
    assert (outcome.exit_code, outcome.status) == (130, "interrupted")
    assert outcome.message == "stopped at once by Ctrl-C; the checkpoint of step 40 stands"


def test_ranks_that_outstay_the_grace_are_killed(run: Run) -> None:
    on_tick = once(
        lambda: run.has("stuck-0-0", "stuck-1-0"), lambda: os.kill(os.getpid(), signal.SIGTERM)
    )
    outcome = run.supervise("stubborn", on_tick=on_tick, grace_s=0.2, payload={"frozen": True})
    assert (outcome.exit_code, outcome.status) == (75, "preempted")
    assert outcome.message.endswith("were killed; the checkpoint of step 40 stands")


def test_a_stop_that_a_stopped_server_keeps_from_the_ranks_is_told_as_that(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kill_deadline, "EXIT_AFTER_KILL_TIMEOUT_S", 0.2)
    ask = once(lambda: True, lambda: os.kill(os.getpid(), signal.SIGTERM))

    def on_tick() -> None:
        if run.has("stuck-0-0", "stuck-1-0"):
            # Again and again: the supervisor continues it once. In the end it is killed.
            with suppress(psutil.NoSuchProcess, ValueError):
                find_server(os.getpid()).suspend()
            ask()

    outcome = run.supervise("stubborn", on_tick=on_tick, grace_s=0.2, payload={"frozen": True})
    assert (outcome.exit_code, outcome.status) == (75, "preempted")
    assert outcome.message == (
        "the ranks did not save within the grace period (the process that starts them, which was to"
        " ask them, did not answer) and were killed; the checkpoint of step 40 stands"
    )


def test_a_server_that_is_stopped_goes_on_to_ask_the_ranks_for_their_stop(run: Run) -> None:
    def stop_server_and_ask() -> None:
        find_server(os.getpid()).suspend()
        os.kill(os.getpid(), signal.SIGTERM)

    on_tick = once(lambda: run.has("training-0-0", "training-1-0"), stop_server_and_ask)
    outcome = run.supervise("trains", on_tick=on_tick)
    message = "stopped by SIGTERM; the checkpoint of step 40 stands"
    assert outcome == RunOutcome(75, "preempted", message, 1)


def test_a_stop_before_the_ranks_exist(run: Run) -> None:
    outcome = run.supervise(
        "trains", on_tick=once(lambda: True, lambda: os.kill(os.getpid(), signal.SIGTERM))
    )
    assert (outcome.exit_code, outcome.status) == (75, "preempted")


def test_a_killed_server_takes_its_ranks_along_and_is_replaced(run: Run) -> None:
    victims: list[int] = []

    def kill_server() -> None:
        server = find_server(os.getpid())
        victims.extend([server.pid, *descendants(server.pid)])
        server.kill()

    on_tick = once(lambda: run.has("stuck-0-0", "stuck-1-0"), kill_server)
    outcome = run.supervise(
        "stubborn", on_tick=on_tick, payload={"frozen": True, "willing_attempt": 1}
    )
    assert (outcome.exit_code, outcome.attempts) == (0, 2), outcome.message
    assert len(victims) == 4  # server, store, two ranks
    assert all(is_gone(pid) for pid in victims)
    assert (
        "the process that starts the ranks was killed by SIGKILL at step 1 in forward"
        in run.said[0]
    )
    # The other server is a fork of the same process: nothing was imported again.
    notes = [note.event.code for note in run.events(Note) if isinstance(note.event, Note)]
    assert notes.count("server_ready") == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_server_is_replaced_where_its_template_is_gone_or_stands_still(
    run: Run, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(server_process, "_TEMPLATE_ANSWER_TIMEOUT_S", 1.0)
    victims: list[int] = []

    def strike_both() -> None:
        server = find_server(os.getpid())
        template = psutil.Process(server.ppid())
        victims.extend([template.pid, server.pid, *descendants(server.pid)])
        template.send_signal(number)
        wait_until(lambda: is_gone(template.pid) or template.status() == psutil.STATUS_STOPPED)
        server.kill()

    on_tick = once(lambda: run.has("stuck-0-0", "stuck-1-0"), strike_both)
    outcome = run.supervise("stubborn", on_tick=on_tick, payload={"willing_attempt": 1})
    assert (outcome.exit_code, outcome.attempts) == (0, 2), outcome.message
    assert all(is_gone(pid) for pid in victims)


def test_ranks_train_on_where_the_template_of_their_server_is_killed(run: Run) -> None:
    victims: list[int] = []

    def kill_template() -> None:
        server = find_server(os.getpid())
        victims.extend([server.pid, *descendants(server.pid)])
        template = psutil.Process(server.ppid())
        template.kill()
        wait_until(lambda: is_gone(template.pid))
        (run.marks / "told.partial").write_text("0")
        (run.marks / "told.partial").rename(run.marks / "told")

    on_tick = once(lambda: run.has("training-0-0", "training-1-0"), kill_template)
    outcome = run.supervise("trains", on_tick=on_tick)
    assert (outcome.exit_code, outcome.attempts) == (0, 1), outcome.message
    wait_until(lambda: all(is_gone(pid) for pid in victims))


def test_a_killed_store_is_replaced(run: Run) -> None:
    def kill_store() -> None:
        ranks = {
            json.loads((run.marks / f"stuck-{rank}-0").read_text())["pid"] for rank in range(2)
        }
        server = find_server(os.getpid())
        [store] = [child for child in server.children() if child.pid not in ranks]
        store.kill()

    on_tick = once(lambda: run.has("stuck-0-0", "stuck-1-0"), kill_store)
    outcome = run.supervise("stubborn", on_tick=on_tick, payload={"willing_attempt": 1})
    assert (outcome.exit_code, outcome.attempts) == (0, 2), outcome.message
    assert "rendezvous store" in run.said[0]


def test_helpers_that_a_rank_leaves_behind_are_killed(run: Run) -> None:
    assert run.supervise("leaves_a_helper").exit_code == 0
    helpers = [int((run.marks / f"helper-{rank}").read_text()) for rank in range(2)]
    wait_until(lambda: all(is_gone(pid) for pid in helpers))


def test_a_rank_ends_as_a_program_does(run: Run) -> None:
    """Its threads finish their work, idle pools do not keep it, and what was registered for the
    exit is called."""
    assert run.supervise("leaves_threads").status == "finished"
    assert run.marked() == [
        f"{what}-{rank}-0" for what in ("at-exit", "left", "worked") for rank in (0, 1)
    ]


def test_ranks_of_a_killed_server_die_even_while_the_supervisor_cannot_act(run: Run) -> None:
    with supervisor_process(run, frozen=True) as supervisor:
        wait_until(lambda: run.has("stuck-0-0", "stuck-1-0"))
        server = find_server(supervisor.pid)
        victims = [server.pid, *descendants(server.pid)]
        assert len(victims) == 4
        supervisor.send_signal(signal.SIGSTOP)
        server.kill()
        wait_until(lambda: all(is_gone(pid) for pid in victims))


@contextmanager
def supervisor_process(run: Run, *, frozen: bool) -> Iterator[subprocess.Popen[bytes]]:
    """A supervisor in a process of its own, of two ranks that never end; killed on leaving."""
    payload = json.dumps(run.payload(frozen=frozen))
    command = [
        sys.executable,
        str(HERE / f"{ENTRIES}.py"),
        str(run.dir),
        f"{ENTRIES}:stubborn",
        payload,
    ]
    supervisor = subprocess.Popen(command)
    try:
        yield supervisor
    finally:
        supervisor.kill()
        supervisor.wait()


@pytest.mark.parametrize("frozen", [False, True])
def test_nothing_survives_a_killed_supervisor(run: Run, frozen: bool) -> None:
    with supervisor_process(run, frozen=frozen) as supervisor:
        wait_until(lambda: run.has("stuck-0-0", "stuck-1-0"))
        victims = descendants(supervisor.pid)
        # What has imported and what forks, the store, two ranks.
        assert len(victims) == 5
        if frozen:
            wait_until(
                lambda: any(
                    psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in victims
                )
            )
    wait_until(lambda: all(is_gone(pid) for pid in victims))


def test_a_preload_that_does_not_import_is_reported(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = run.supervise("trains", preload=("no_such_module_at_all",))
    assert outcome.exit_code == 6
    assert outcome.message.startswith("no_such_module_at_all cannot be imported")
    assert "\n" not in outcome.message

    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "breaks_on_import.py").write_text("raise KeyError('at import')\n")
    monkeypatch.syspath_prepend(str(modules))
    outcome = run.supervise("trains", preload=("breaks_on_import",))
    assert (outcome.exit_code, outcome.attempts) == (1, 1)
    assert outcome.message.startswith("Traceback")
    assert outcome.message.endswith("KeyError: 'at import'")
    assert "breaks_on_import.py" in outcome.message.splitlines()[1]


def test_an_entry_that_is_not_there(run: Run) -> None:
    outcome = run.supervise("no_such_module_at_all:main")
    assert (outcome.exit_code, outcome.attempts) == (3, 1)
    assert "no_such_module_at_all" in outcome.message
    assert "\n" not in outcome.message


def test_ranks_hold_no_descriptor_of_the_server(run: Run) -> None:
    """Above all not the link and the write end of the life pipe, through which they would
    outlive the server."""
    held: dict[int, set[str]] = {}
    server_sockets: set[str] = set()

    def look() -> None:
        server = find_server(os.getpid())
        for pid in (server.pid, server.ppid()):
            server_sockets.update(_descriptors(pid, "socket:"))
        for rank in range(2):
            pid = json.loads((run.marks / f"training-{rank}-0").read_text())["pid"]
            held[rank] = _descriptors(pid, "socket:")
        os.kill(os.getpid(), signal.SIGTERM)

    run.supervise("trains", on_tick=once(lambda: run.has("training-0-0", "training-1-0"), look))
    assert server_sockets
    assert held == {0: set(), 1: set()}


def _descriptors(pid: int, kind: str) -> set[str]:
    targets = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    return {target for target in targets if target.startswith(kind)}


def test_the_loopback_listener_is_fresh_for_each_attempt() -> None:
    from phalanx.launch.store import open_loopback_listener

    with open_loopback_listener() as first, open_loopback_listener() as second:
        assert first.getsockname()[0] == second.getsockname()[0] == "127.0.0.1"
        assert first.getsockname() != second.getsockname()
        with socket.create_connection(first.getsockname(), timeout=5):
            pass


# --- a server that is started before the run is known ---------------------------------------------


def start_ahead(run: Run, monkeypatch: pytest.MonkeyPatch) -> int:
    """The pid of a template that was started ahead, which says so when it has imported."""
    (run.marks / "loud_when_imported.py").write_text("print('imported ahead', flush=True)")
    monkeypatch.syspath_prepend(str(run.marks))
    start_server_ahead("loud_when_imported")
    [template] = psutil.Process().children()
    return template.pid


def test_a_server_started_ahead_serves_the_run_and_writes_its_log(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = start_ahead(run, monkeypatch)
    outcome = run.supervise("parents")
    assert outcome.exit_code == 0, outcome.message
    assert {int((run.marks / f"template-{rank}").read_text()) for rank in range(2)} == {ahead}
    assert "imported ahead" in (run.dir / "logs" / "server.log").read_text()


def test_another_environment_needs_another_server(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = start_ahead(run, monkeypatch)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    outcome = run.supervise("parents")
    assert outcome.exit_code == 0, outcome.message
    assert ahead not in {int((run.marks / f"template-{rank}").read_text()) for rank in range(2)}
    assert is_gone(ahead)


def test_a_server_that_died_ahead_is_replaced(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    server = psutil.Process(start_ahead(run, monkeypatch))
    server.kill()
    wait_until(lambda: is_gone(server.pid))
    outcome = run.supervise("parents")
    assert outcome.exit_code == 0, outcome.message


def test_what_fails_to_import_ahead_is_told_when_it_is_preloaded(run: Run) -> None:
    start_server_ahead("no_such_module_at_all")
    outcome = run.supervise("trains", preload=("no_such_module_at_all",))
    assert outcome.exit_code == ExitCode.ENVIRONMENT
    assert "no_such_module_at_all cannot be imported" in outcome.message


def test_a_command_that_starts_no_ranks_leaves_no_server(run: Run) -> None:
    code = (
        "from phalanx.launch.server_process import start_server_ahead\n"
        "start_server_ahead('phalanx')\n"
        "import psutil\n"
        "print(psutil.Process().children()[0].pid)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert is_gone(int(done.stdout))


def test_a_rank_of_another_launcher_starts_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    start_server_ahead("phalanx")
    assert not psutil.Process().children()


def test_last_words_of_a_server_that_ends_ahead_are_kept(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a library does that finds no processor for it, and ends the process."""
    (run.marks / "gives_up.py").write_text(
        "import os\nos.write(2, b'no such instructions here')\nos._exit(2)"
    )
    monkeypatch.syspath_prepend(str(run.marks))
    spawn = server_process._spawn_template  # what it starts is looked at below
    started: list[server_process.TemplateProcess] = []
    monkeypatch.setattr(
        server_process,
        "_spawn_template",
        lambda *given: started.append(spawn(*given)) or started[0],
    )
    start_server_ahead("gives_up")
    [ahead] = started
    wait_until(lambda: ahead.has_ended)
    assert ahead.read_end_of_server_log() == "no such instructions here"
    end_server_ahead()
