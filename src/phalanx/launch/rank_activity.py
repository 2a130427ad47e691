"""What the kernel says of the processes of the ranks, sampled again and again while a run makes no
progress."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.process_stat import read_process_stat

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
STOPPED_LETTERS = ("T", "t")
# A process that has ended, and that its parent has not asked about yet.
_ENDED_LETTERS = ("Z", "X")
# A file server or a disk that does not answer.
_DISK_LETTER = "D"
_RUNNING_LETTER = "R"


@dataclass(frozen=True)
class ProcessSample:
    """One look at a rank: the letter of its main thread ("" where there is none), processor seconds
    of that thread and of the whole process, and whether a process that it started runs."""

    letter: str
    main_thread_cpu_s: float
    process_cpu_s: float
    runs_helper: bool = False


@dataclass
class QuietTime:
    """The samples of one rank since the run made progress last."""

    first: ProcessSample | None = None
    last: ProcessSample | None = None
    num_samples: int = 0
    num_stopped: int = 0
    num_running: int = 0
    num_in_disk: int = 0
    num_helper_runs: int = 0
    num_stopped_last: int = 0
    """Looks in a row, up to the last, at which it was stopped and had got no processor time."""

    def begin(self, sample: ProcessSample | None) -> None:
        """Forget what was before: `sample` was taken when the run still made progress."""
        self.first = self.last = sample
        self.num_samples = self.num_stopped = self.num_running = 0
        self.num_in_disk = self.num_helper_runs = self.num_stopped_last = 0

    def add(self, sample: ProcessSample) -> None:
        if self.first is None:
            self.first = sample
        is_stopped = sample.letter in STOPPED_LETTERS
        has_run = self.last is not None and sample.process_cpu_s > self.last.process_cpu_s
        if not is_stopped or (has_run and self.num_stopped_last):
            # Stopped and continued in turns: slow.
            self.num_stopped_last = 0
        self.num_stopped_last += is_stopped
        self.last = sample
        self.num_samples += 1
        self.num_stopped += is_stopped
        self.num_running += sample.letter == _RUNNING_LETTER
        self.num_in_disk += sample.letter == _DISK_LETTER
        self.num_helper_runs += sample.runs_helper

    @property
    def cpu_s(self) -> float:
        """Processor seconds that the thread which trains got."""
        if self.first is None or self.last is None:
            return 0.0
        return self.last.main_thread_cpu_s - self.first.main_thread_cpu_s

    @property
    def process_cpu_s(self) -> float:
        """Processor seconds that all threads of the process got."""
        if self.first is None or self.last is None:
            return 0.0
        return self.last.process_cpu_s - self.first.process_cpu_s

    @property
    def is_stopped(self) -> bool:
        """True if it was stopped at most looks, the last ones, and did nothing in between."""
        return self.num_stopped_last * 5 >= self.num_samples * 3 > 0

    @property
    def has_ended(self) -> bool:
        """True if the process had ended at the last look."""
        return self.last is not None and self.last.letter in _ENDED_LETTERS

    @property
    def is_running(self) -> bool:
        """True if it had the processor, or wanted it, at most looks."""
        return self.num_running * 2 >= self.num_samples > 0

    @property
    def is_in_disk(self) -> bool:
        """True if it waited for a disk or a network file system at many looks."""
        return self.num_in_disk * 3 >= self.num_samples > 0

    @property
    def is_helper_running(self) -> bool:
        """True if a process that it started, say a worker of its loader, ran at many looks."""
        return self.num_helper_runs * 3 >= self.num_samples > 0


def sample_process(pid: int, *, with_helpers: bool = False) -> ProcessSample | None:
    """A sample of the rank with process `pid`; None where it is gone.

    `with_helpers`: look at the processes that it started, too, which costs more.
    """
    main_thread, process = read_process_stat(pid, thread=pid), read_process_stat(pid)
    if main_thread is None or process is None:
        return None
    runs_helper = False
    if with_helpers:
        helpers = (read_process_stat(helper) for helper in _list_descendants(pid))
        runs_helper = any(
            helper is not None and helper.state == _RUNNING_LETTER for helper in helpers
        )
    return ProcessSample(main_thread.state, main_thread.cpu_s, process.cpu_s, runs_helper)


def read_written_and_read_bytes(pid: int) -> int:
    """Bytes that a process has read and written so far, by whatever call; 0 where the kernel does
    not say."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
    except (OSError, ValueError, IndexError):
        return 0


def read_memory_bytes(pid: int) -> int:
    """Bytes of memory that a process has in use; 0 where there is none."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0


def _list_descendants(pid: int) -> Iterable[int]:
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        try:
            tasks = os.listdir(f"/proc/{parent}/task")
        except OSError:
            continue
        for task in tasks:
            try:
                text = Path(f"/proc/{parent}/task/{task}/children").read_text()
            except OSError:
                continue
            children = [int(word) for word in text.split()]
            yield from children
            waiting += children
