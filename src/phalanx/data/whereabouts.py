"""Where a process is in a user's dataset: two numbers in shared memory, so that they outlive
whatever ends it."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
from dataclasses import dataclass

_ACTIVITY_STRUCT = struct.Struct("<dq")  # when it was written, and the number
# Below 0, so that every number from 0 on is a sample.
_SPLIT_OF_NUMBER = {-1: "train", -2: "held_out"}
_NO_SAMPLE = -3


@dataclass(frozen=True)
class WorkerActivity:
    """The work that a process does, and since when (monotonic seconds, which processes of one
    machine share).

    `sample` is a place in the training split; `opening` the split whose factory runs. Both None:
    nothing of the user's.
    """

    since_s: float
    sample: int | None = None
    opening: str | None = None

    def __str__(self) -> str:
        if self.sample is not None:
            return f"sample {self.sample}"
        if self.opening is not None:
            return f"split {self.opening!r} to open"
        return "an answer"


class WorkerStatus:
    """Written by the process that reads the dataset, read by the one that waits for it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, _ACTIVITY_STRUCT.size)

    def mark_opening_dataset(self, split: str) -> None:
        self._write_activity(
            next(number for number, name in _SPLIT_OF_NUMBER.items() if name == split)
        )

    def mark_reading_sample(self, sample: int | None) -> None:
        """`None`: between samples."""
        self._write_activity(_NO_SAMPLE if sample is None else sample)

    def read(self) -> WorkerActivity:
        since_s, number = _ACTIVITY_STRUCT.unpack_from(self._memory)
        if number >= 0:
            return WorkerActivity(since_s, sample=number)
        return WorkerActivity(since_s, opening=_SPLIT_OF_NUMBER.get(number))

    def close(self) -> None:
        """Safe to call twice."""
        if not self._memory.closed:
            self._memory.close()
            os.close(self.fd)

    def _write_activity(self, number: int) -> None:
        _ACTIVITY_STRUCT.pack_into(self._memory, 0, time.monotonic(), number)


def create_worker_status() -> WorkerStatus:
    fd = create_unlinked_file("phalanx-place")
    os.ftruncate(fd, _ACTIVITY_STRUCT.size)
    whereabouts = WorkerStatus(fd)
    whereabouts.mark_reading_sample(None)
    return whereabouts


def create_unlinked_file(name: str) -> int:
    """A descriptor of a file in memory that goes with the last process that has it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
