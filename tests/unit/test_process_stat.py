"""What the kernel says of processes, beside what psutil reads and what the test itself did."""

from __future__ import annotations

import os
import threading

import psutil
import pytest

from phalanx.core.process_stat import (
    ProcessorDelayReader,
    read_process_stat,
    read_run_and_delay_s,
    read_start_ticks,
    read_state_letter,
)

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="no /proc")


def test_this_process() -> None:
    stat = read_process_stat(os.getpid())
    assert stat is not None
    assert not stat.has_ended
    times = psutil.Process().cpu_times()
    assert stat.cpu_s == pytest.approx(times.user + times.system, abs=2.0)
    assert read_start_ticks("self") == stat.start_ticks
    # Of the main thread: no more than of all.
    main = read_process_stat(os.getpid(), thread=threading.main_thread().native_id)
    assert main is not None
    assert main.cpu_s <= stat.cpu_s + 1.0


def test_a_process_that_has_ended_is_there_until_its_parent_asks() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    stat = read_process_stat(child)
    assert stat is not None
    assert stat.has_ended
    assert read_state_letter(child) == "Z"
    os.waitpid(child, 0)
    assert read_process_stat(child) is None
    assert read_start_ticks(child) is None
    assert read_state_letter(child) == ""


def test_a_name_with_blanks_and_parentheses_moves_no_field() -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with open("/proc/self/comm", "w") as name:
            name.write("a) S 1 (b")
        os.write(writer, b".")
        threading.Event().wait()
    os.read(reader, 1)
    stat = read_process_stat(child)
    os.kill(child, 9)
    os.waitpid(child, 0)
    assert stat is not None
    assert stat.start_ticks >= (read_start_ticks("self") or 0)


def test_a_reader_of_delay_says_what_the_file_of_the_main_thread_says() -> None:
    reader = ProcessorDelayReader()
    before_s = read_run_and_delay_s(os.getpid())[1]
    delay_s = reader.read_delay_s()
    assert before_s <= delay_s <= read_run_and_delay_s(os.getpid())[1]
    assert delay_s <= reader.read_delay_s()
