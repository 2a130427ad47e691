"""What is said of the process of a rank that can, or cannot, be looked at."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys

import pytest

from commands import wait_until
from phalanx.core.black_box import read_boot_id
from phalanx.core.black_box_reader import BoxHeader, LastPosition
from phalanx.core.process_stat import read_start_ticks, read_state_letter
from phalanx.observe.process_status import read_process_statuses
from phalanx.observe.rank_waits import RankState, WaitVerdict
from phalanx.observe.where_words import describe_waits

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="no /proc")


def header(pid: int, boot_id: str) -> BoxHeader:
    ticks = read_start_ticks(pid) or 0
    return BoxHeader(pid, ticks, 0, 1, 0, "cpu", socket.gethostname(), boot_id, 0.0, 0.0)


def read_state(box_header: BoxHeader) -> str:
    return read_process_statuses({0: box_header}, sample_s=0.01)[0].state


def test_a_process_that_has_ended_is_gone_and_one_that_runs_is_not() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    ended = header(child, read_boot_id())
    os.waitpid(child, 0)
    assert read_state(ended) == "gone"
    assert read_state(header(os.getpid(), read_boot_id())) in ("running", "sleeping")


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN])
def test_no_signal_is_named_of_a_process_that_is_stopped(number: signal.Signals) -> None:
    """The kernel's state is the same for all of them."""
    command = [sys.executable, "-S", "-c", "import time; print(1, flush=True); time.sleep(60)"]
    # Another group of the same session: the kernel stops none that nobody could continue.
    with subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            child.send_signal(number)
            wait_until(lambda: read_state_letter(child.pid) == "T")
            (status,) = read_process_statuses(
                {0: header(child.pid, read_boot_id())}, sample_s=0.01
            ).values()
        finally:
            child.kill()
    states = {0: RankState(0, LastPosition(3, 1.0, "forward"), status)}
    (sentence,) = describe_waits(WaitVerdict(status.state, (0,), ()), states)
    assert sentence.startswith("rank 0 is stopped by a signal (such as SIGSTOP or SIGTSTP) in step")


def test_of_a_process_that_cannot_be_looked_at_nothing_is_known() -> None:
    # Of a box without the name of its machine's start, which cannot be read now either.
    living = header(os.getpid(), "")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        state = read_state(living)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert state == "unknown"
