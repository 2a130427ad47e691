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
from phalanx.launch.hang_kinds import FROZEN
from phalanx.launch.hang_limits import HangSettings
from phalanx.launch.paths import black_box_path
from phalanx.launch.progress_watch import HangVerdict, ProgressWatch

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
