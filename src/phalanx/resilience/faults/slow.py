"""One rank gets half of its time, as on a throttled machine: slow, and not hung."""

from __future__ import annotations

import os
import subprocess
import sys

from phalanx.resilience.expectation import Expectation

DURATION_S = 20.0
EXPECTATION = Expectation(
    verdict="slow",
    detected_s=None,
    detected_steps=20,
    trained_again_s=None,
    may_lose_steps=False,
    settling_steps=20,
    lasts_s=DURATION_S,
)
STOPPED_S, RUNNING_S = 0.05, 0.05
# Stops and continues its parent by turns; ends with it.
DUTY_CYCLE = """
import os, signal, sys, time
pid, until_s = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
stopped_s, running_s = float(sys.argv[3]), float(sys.argv[4])
try:
    while os.getppid() == pid and time.monotonic() < until_s:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(stopped_s)
        os.kill(pid, signal.SIGCONT)
        time.sleep(running_s)
except ProcessLookupError:
    pass
"""


def inject() -> None:
    """Stop this process 50 ms of each 100 ms, for 20 s, by a child process."""
    stop_by_turns(STOPPED_S, RUNNING_S)


def stop_by_turns(stopped_s: float, running_s: float) -> None:
    """Stop this process for `stopped_s` and let it run for `running_s` by turns, for DURATION_S, by
    a child process."""
    seconds = (DURATION_S, stopped_s, running_s)
    subprocess.Popen(
        [sys.executable, "-S", "-c", DUTY_CYCLE, str(os.getpid()), *map(str, seconds)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
