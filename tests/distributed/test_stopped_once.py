"""A stop that arrives twice, at a rank and at the guard above it, ends the rank once and lets it
clean up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from commands import DEADLINE_S, environment

PREPARING = """
import contextlib, os, signal, sys
from pathlib import Path
from phalanx.run.stop_signals import raising_on_stop_signals
from phalanx.core.errors import PhalanxError
from phalanx.launch.end_record import EndRecord
from phalanx.launch.guard import fork_under_guard

code = 1
with raising_on_stop_signals():
    end = fork_under_guard(0, Path(sys.argv[1]))
    try:
        print(f"prepares {os.getpid()}", flush=True)
        while True:
            signal.pause()
    except (PhalanxError, KeyboardInterrupt) as stop:
        code = int(getattr(stop, "exit_code", 130))
        print("cleans", flush=True)
        sys.stdin.readline()
        print("cleaned", flush=True)
    finally:
        end.write_end_record(EndRecord(code))
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130), (signal.SIGUSR1, 75)]
)
def test_a_stop_of_the_whole_group_lets_preparation_clean_up(
    number: int, code: int, tmp_path: Path
) -> None:
    """As torchrun stops its workers: the guard hands on what the rank has got already."""
    guard = subprocess.Popen(
        [sys.executable, "-c", PREPARING, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    try:
        assert guard.stdin is not None
        assert guard.stdout is not None
        rank = int(guard.stdout.readline().split()[1])
        assert rank != guard.pid
        os.killpg(guard.pid, number)
        assert guard.stdout.readline() == "cleans\n"
        os.kill(guard.pid, number)  # however late the guard hands it on
        os.kill(rank, number)
        out, err = guard.communicate("go on\n", timeout=DEADLINE_S)
        assert (out, guard.returncode) == ("cleaned\n", code), err
    finally:
        guard.kill()
        guard.wait()
