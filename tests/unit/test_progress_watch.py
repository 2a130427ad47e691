"""The watch on real processes with black boxes: this one, and one that is stopped."""

from __future__ import annotations

import os
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
