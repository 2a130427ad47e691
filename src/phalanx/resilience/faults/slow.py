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
# Stops and continues its parent by turns; ends with it.
DUTY_CYCLE = """
import os, signal, sys, time
pid, until_s = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
try:
    while os.getppid() == pid and time.monotonic() < until_s:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.05)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.05)
except ProcessLookupError:
    pass
"""


def inject() -> None:
    """Stop this process 50 ms of each 100 ms, for 20 s, by a child process."""
    subprocess.Popen(
        [sys.executable, "-S", "-c", DUTY_CYCLE, str(os.getpid()), str(DURATION_S)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
