"""Signs that a rank works although it writes no position: what a long save, a load, the making of a
model or a compiler leaves in the kernel's books.

A loop that turns, or code that holds Python's lock, leaves none of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from phalanx.core.black_box_reader import LastPosition
from phalanx.launch.rank_activity import (
    read_memory_bytes,
    read_written_and_read_bytes,
)

# Marks so far apart are compared: an object store's parts, and a disk's pauses, are shorter.
WINDOW_S = 5.0
# In a second, on average: more than logs and heartbeats of a process that does nothing else.
MIN_MOVED_BYTES_PER_S = 1 << 16
# In a window: more than the noise of an allocator.
MIN_GROWN_BYTES = 8 << 20


class _Marks(NamedTuple):
    moved_bytes: int
    memory_bytes: int


class WorkSigns:
    """Compares what the processes of ranks have moved and hold, from window to window."""

    def __init__(self, pids: Sequence[int], now_s: float) -> None:
        self._pids, self._marked_s = tuple(pids), now_s
        self._marks: dict[int, _Marks] = {}
        self.begin(now_s)

    def begin(self, now_s: float) -> None:
        """Begin a window: what was before does not count."""
        self._marked_s = now_s
        self._marks = {
            rank: _Marks(read_written_and_read_bytes(pid), read_memory_bytes(pid))
            for rank, pid in enumerate(self._pids)
        }

    def find_last_work_s(self, now_s: float, positions: Mapping[int, LastPosition]) -> float | None:
        """Monotonic seconds at which a rank last gave a sign of work; None where there is none
        since the window began, or it is not over yet."""
        noted_s = max(
            (each.header.work_s for each in positions.values() if each.header is not None),
            default=0.0,
        )
        elapsed_s = now_s - self._marked_s
        if elapsed_s < WINDOW_S:
            return noted_s if noted_s > self._marked_s else None
        before = self._marks
        self.begin(now_s)
        for rank, marks in self._marks.items():
            moved = marks.moved_bytes - before[rank].moved_bytes
            grown = marks.memory_bytes - before[rank].memory_bytes
            if moved >= MIN_MOVED_BYTES_PER_S * elapsed_s or grown >= MIN_GROWN_BYTES:
                return now_s
        return noted_s if noted_s > now_s - elapsed_s else None
