"""The watch on real processes with black boxes: this one, and one that is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import wait_until
from phalanx.core.black_box import BlackBox
from phalanx.launch.hang_kinds import FROZEN, GONE, MIN_UNTOLD_S
from phalanx.launch.hang_limits import MIN_STEP_LIMIT_S, HangSettings
from phalanx.launch.hang_verdict import HangVerdict
from phalanx.launch.paths import black_box_path
from phalanx.launch.progress_watch import ProgressWatch
from phalanx.observe.events import Event, RankSlow

# More than two looks.
LIMIT_S = 1.2
WRITES_AND_STOPS = """
import os, signal, sys
from pathlib import Path
from phalanx.core.black_box import BlackBox
box = BlackBox(Path(sys.argv[1]))
for step in range(1, 9):
    box.write(step, "record")
print(flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""
WRITES_WHEN_TOLD = """
import sys
from pathlib import Path
from phalanx.core.black_box import BlackBox
box = BlackBox(Path(sys.argv[1]))
for step in sys.stdin:
    box.write(int(step), "record")
    print(flush=True)
"""
# A server with a rank that trains and ends, and that it does not ask about, as it stands still.
SERVER_OF_ENDED_RANK = """
import os, signal, sys
from pathlib import Path
from phalanx.core.black_box import BlackBox
rank = os.fork()
if rank == 0:
    box = BlackBox(Path(sys.argv[1]))
    for step in range(1, 9):
        box.write(step, sys.argv[3])
    os._exit(0)
os.waitid(os.P_PID, rank, os.WEXITED | os.WNOWAIT)
processor = int(sys.argv[2])
os.sched_setaffinity(0, {processor})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
print(rank, flush=True)
while True:
    pass
"""
SPINS = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


@pytest.fixture
def stopped_rank(tmp_path: Path) -> Iterator[int]:
    """The process of rank 1, which has stopped itself after eight steps."""
    command = [sys.executable, "-c", WRITES_AND_STOPS, str(black_box_path(tmp_path, 1))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        os.waitpid(process.pid, os.WUNTRACED)
        yield process.pid
    finally:
        process.kill()
        process.communicate()


def test_tokens_of_the_text_of_a_finished_run_are_progress(
    tmp_path: Path, stopped_rank: int
) -> None:
    """Both ranks have said that their work is done; the one that is stopped is named once the other
    one notes no tokens any more."""
    box = BlackBox(black_box_path(tmp_path, 0))
    for step in range(1, 9):
        box.write(step, "record")
    watch = ProgressWatch(tmp_path, HangSettings(LIMIT_S))
    began_s = time.monotonic()
    watch.begin_attempt([os.getpid(), stopped_rank], began_s)
    verdicts: list[HangVerdict] = []

    def look() -> bool:
        verdict = watch.poll(time.monotonic(), finished=(0, 1))
        if verdict is not None:
            verdicts.append(verdict)
        return bool(verdicts)

    def sample_token() -> bool:
        box.note_work()
        return look() or time.monotonic() > began_s + 2 * LIMIT_S

    wait_until(sample_token)
    assert verdicts == []
    wait_until(look)
    assert (verdicts[0].kind, verdicts[0].culprits) == (FROZEN, (1,))


@pytest.mark.skipif(sys.platform != "linux", reason="what a process has open is in /proc")
@pytest.mark.parametrize("loss", ["removed", "no room"])
def test_a_rank_whose_box_has_no_file_is_watched_on(tmp_path: Path, loss: str) -> None:
    """Someone removes the box of a healthy rank, or the disk refused it; later the rank stops. The
    seconds of the watch are made up."""
    path = black_box_path(tmp_path, 0)
    if loss == "no room":
        path.parent.write_text("no folder of boxes can be made here")
    command = [sys.executable, "-c", WRITES_WHEN_TOLD, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        watch = ProgressWatch(tmp_path, HangSettings())
        now_s = time.monotonic()
        watch.begin_attempt([process.pid], now_s)
        for step in range(1, 31):
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"%d\n" % step)
            process.stdin.flush()
            process.stdout.readline()
            if step == 15 and loss == "removed":
                path.unlink()
            now_s += 0.6
            assert watch.poll(now_s) is None
        assert watch.positions[0].step == 30
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        stopped_s, verdict = now_s, None
        while verdict is None and now_s < stopped_s + 60.0:
            now_s += 0.6
            verdict = watch.poll(now_s)
        assert verdict is not None
        assert (verdict.kind, verdict.culprits) == (FROZEN, (0,))
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="the state of a process is in /proc")
def test_a_rank_that_is_stopped_by_turns_in_its_first_steps_is_told_before_the_next_poll(
    tmp_path: Path,
) -> None:
    """Steps may take 20 ms, and 20 of them count. The seconds of the watch are made up."""
    command = [sys.executable, "-c", WRITES_WHEN_TOLD, str(black_box_path(tmp_path, 0))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    events: list[Event] = []
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        watch = ProgressWatch(tmp_path, HangSettings(), events.append)
        now_s = time.monotonic()
        watch.begin_attempt([process.pid], now_s)
        for step in range(1, 5):
            process.stdin.write(b"%d\n" % step)
            process.stdin.flush()
            process.stdout.readline()
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            now_s += 0.08
            assert watch.poll(now_s) is None
            process.send_signal(signal.SIGCONT)
    finally:
        process.kill()
        process.communicate()
    assert [type(event) for event in events] == [RankSlow]


def test_a_machine_that_stood_still_makes_no_limit_longer(tmp_path: Path) -> None:
    """Steps of 0.6 s, one of which nobody saw for 20 s (all processes were paused, the watch with
    them); then the rank stops. The seconds of the watch are made up."""
    command = [sys.executable, "-c", WRITES_WHEN_TOLD, str(black_box_path(tmp_path, 0))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        watch = ProgressWatch(tmp_path, HangSettings())
        now_s = time.monotonic()
        watch.begin_attempt([process.pid], now_s)
        for step in range(1, 31):
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"%d\n" % step)
            process.stdin.flush()
            process.stdout.readline()
            now_s += 20.0 if step == 20 else 0.6
            assert watch.poll(now_s) is None
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        stopped_s = now_s
        verdict = None
        while verdict is None and now_s < stopped_s + 60.0:
            now_s += 0.6
            verdict = watch.poll(now_s)
        assert verdict is not None
        assert (verdict.kind, verdict.culprits) == (FROZEN, (0,))
        assert now_s - stopped_s <= 10.0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's count of waits for a processor")
@pytest.mark.parametrize("phase", ["record", "evaluate"])
def test_a_rank_that_has_ended_is_gone_where_its_server_is_stopped_and_not_where_it_is_starved(
    tmp_path: Path, phase: str
) -> None:
    """The server wants the processor that another program has, and later is stopped. The seconds of
    the watch are made up."""
    processor = str(min(os.sched_getaffinity(0)))
    spinning = subprocess.Popen([sys.executable, "-c", SPINS, processor])
    command = [sys.executable, "-c", SERVER_OF_ENDED_RANK, str(black_box_path(tmp_path, 0))]
    server = subprocess.Popen([*command, processor, phase], stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        rank = int(server.stdout.readline())
        wait_until(lambda: os.sched_getaffinity(spinning.pid) == {int(processor)})
        # In an evaluation ranks may be silent for a minute.
        watch = ProgressWatch(tmp_path, HangSettings())
        began_s = now_s = time.monotonic()
        watch.begin_attempt([rank], now_s, server.pid)
        while now_s < began_s + 10 * LIMIT_S:
            now_s += 0.6
            assert watch.poll(now_s, finished=(0,)) is None
        server.send_signal(signal.SIGSTOP)
        os.waitpid(server.pid, os.WUNTRACED)
        stopped_s, verdict = now_s, None
        while verdict is None and now_s < stopped_s + 60.0:
            now_s += 0.6
            verdict = watch.poll(now_s, finished=(0,))
        assert verdict is not None
        assert (verdict.kind, verdict.culprits) == (GONE, (0,))
        assert now_s - stopped_s <= MIN_STEP_LIMIT_S + MIN_UNTOLD_S
    finally:
        for process in (spinning, server):
            process.kill()
            process.communicate()
