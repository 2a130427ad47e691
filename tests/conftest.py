"""Shared by all tests: one thread per rank, and no leftover of one test in the next."""

from __future__ import annotations

import compileall
import gc
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

# What is imported and collected stays until the end: no need to look through it for garbage.
gc.disable()
# One rank alone would have a thread on each core. Beside the other half of the tests they wait for
# each other, busily: a step of a tiny model took ten times the processor.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

ROOT, PID = Path(__file__).parents[1], os.getpid()
# Helpers of tests, such as `ranks`, and what `make bench` and `make gpu-check` run.
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "benchmarks")]

import marks
from commands import nursery, read_processor_seconds
from warm import fork_module, fork_phalanx, source_of_phalanx

# Commands start by the hundred. Where Python keeps no bytecode by itself, each would compile our
# source again.
compileall.compile_dir(source_of_phalanx(), quiet=2)
torch.set_num_threads(1)
# An example takes as long as a busy machine lets it: that is no property of the code.
hypothesis.settings.register_profile("phalanx", deadline=None)
hypothesis.settings.load_profile("phalanx")
# A shell that starts the tests in the background ignores Ctrl-C for them, and every command they
# start would, too.
signal.signal(signal.SIGINT, signal.default_int_handler)


class WarmPopen(subprocess.Popen):
    """Commands that are run inside this process start their ranks and probes from the nursery,
    too: importing torch would take seconds each time. The first of them starts the nursery, but
    none that a fork of this process runs, which would start another."""

    def __new__(cls, command: Any, *args: Any, **options: Any) -> Any:
        forked = None
        if not args and (os.getpid() == PID or nursery.cache_info().currsize):
            forked = fork_module(lambda: nursery().variables(), command, options)
            forked = forked or fork_phalanx(lambda: nursery("commands"), command, options)
        return forked or super().__new__(cls)


POPEN, subprocess.Popen = subprocess.Popen, WarmPopen
# Processor seconds so far whenever a file of tests ended, and those of each file.
_counted_s: list[float] = []
_spent_s: defaultdict[Path, float] = defaultdict(float)


@pytest.fixture
def own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command starts in this process are its own children: for tests of processes."""
    monkeypatch.setattr(subprocess, "Popen", POPEN)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give tests the marks `bits` and `deadline` where somebody selects by them."""
    if not {"bits", "deadline"} & set(
        str(config.getoption("markexpr")).replace("(", " ").replace(")", " ").split()
    ):
        return
    for item in items:
        for name in marks.marks_of_tests(item.path).get(
            getattr(item, "originalname", item.name), set()
        ):
            item.add_marker(name)


def pytest_collection_finish() -> None:
    """Look for garbage among what tests make, and not in what was imported for them."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Count the processor seconds of each file of tests, when its last test ends."""
    if not _counted_s:
        _counted_s.append(read_processor_seconds())
    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path != item.path:
            _counted_s.append(read_processor_seconds())
            _spent_s[item.path] += _counted_s[-1] - _counted_s[-2]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how long each directory of tests took, and the slowest files, by the clock and by the
    processors, to see where `make test` grows and how to share it out."""
    seconds: defaultdict[Path, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[Path(report.nodeid.split("::")[0])] += report.duration
    if sum(seconds.values()) < 60.0:
        return
    folders: defaultdict[Path, float] = defaultdict(float)
    for file, spent in seconds.items():
        folders[file.parent] += spent
    told = (f"{folder} {spent / 60:.1f}" for folder, spent in sorted(folders.items()))
    terminalreporter.write_line(f"minutes by directory: {', '.join(told)}")
    files = sorted(seconds, key=lambda file: seconds[file], reverse=True)[:40]
    slowest = (f"{file.name} {seconds[file]:.0f}" for file in files)
    terminalreporter.write_line(f"seconds of the slowest files: {', '.join(slowest)}")
    busiest = sorted(_spent_s, key=lambda file: _spent_s[file], reverse=True)[:60]
    told = (f"{file.name} {_spent_s[file]:.0f}" for file in busiest)
    terminalreporter.write_line(
        f"processor seconds, {sum(_spent_s.values()):.0f} in all: {', '.join(told)}"
    )
