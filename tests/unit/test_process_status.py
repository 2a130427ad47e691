"""What is said of the process of a rank that can, or cannot, be looked at."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from commands import wait_until
from phalanx.core.black_box import read_boot_id
from phalanx.core.black_box_reader import BoxHeader, LastPosition
from phalanx.core.process_stat import read_start_ticks, read_state_letter
from phalanx.observe import process_status
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


@pytest.mark.parametrize(
    ("cgroup", "files", "throttled_share"),
    [
        ("0::/job\n", {"job/cpu.stat": "usage_usec 9\nthrottled_usec {usec}\n"}, 0.5),
        # Without the controller of processors there are no such lines.
        ("0::/job\n", {"job/cpu.stat": "usage_usec 9\n"}, None),
        # Version 1, alone and beside a version 2 that has no controllers.
        ("4:cpu,cpuacct:/job\n", {"cpu/job/cpu.stat": "throttled_time {usec}000\n"}, None),
        ("4:cpu:/job\n0::/job\n", {"cpu/job/cpu.stat": "throttled_time {usec}000\n"}, None),
        ("0::/job\n", {"job/cpu.stat": "throttled_usec \n"}, None),
        ("", {}, None),
    ],
)
def test_throttling_is_what_cgroups_of_version_2_count(
    cgroup: str,
    files: dict[str, str],
    throttled_share: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """0.15 of the 0.3 seconds for which the process is looked at."""
    now_s = 100.0

    def write(usec: int) -> None:
        own = tmp_path / f"proc/{os.getpid()}/cgroup"
        texts = {tmp_path / "sys/fs/cgroup" / name: text for name, text in files.items()}
        for path, text in {own: cgroup, **texts}.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.format(usec=usec))

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds
        write(1_150_000)

    write(1_000_000)
    monkeypatch.setattr(process_status, "Path", lambda name: tmp_path / name.lstrip("/"))
    clock = SimpleNamespace(monotonic=lambda: now_s, sleep=sleep)
    monkeypatch.setattr(process_status, "time", clock)
    own = header(os.getpid(), read_boot_id())
    status = read_process_statuses({0: own}, sample_s=0.3)[0]
    assert status.throttled_share == (
        None if throttled_share is None else pytest.approx(throttled_share)
    )
