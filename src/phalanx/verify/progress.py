"""How far a comparison is: rows that are there, what is judged now, and how long the rest may take.

Torch-free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from phalanx.verify.cases import ONE_PROCESS_ROWS, TRAINER_ROW_PREFIX


@dataclass(frozen=True)
class VerifyProgress:
    """`running`: layout and type of the row that is judged now; "" when all are there. `left_s`:
    seconds until the end as far as the rows so far tell; None before the first one."""

    num_done: int
    num_rows: int
    running: str
    left_s: float | None


@dataclass
class RowTimeEstimator:
    """Seconds that rows took, to guess those of the rows to come. `work`: (type, layout) of each
    row, in the order in which they come."""

    work: Sequence[tuple[str, str]]
    num_done: int = 0
    clock: Callable[[], float] = time.monotonic
    _seconds: dict[str, list[float]] = field(default_factory=dict)
    _began: float = field(init=False)

    def __post_init__(self) -> None:
        self._began = self.clock()

    def count_finished_row(self) -> None:
        """Count the row that was judged now: it took the time since the one before."""
        now = self.clock()
        if self.num_done < len(self.work):
            kind = _kind_of_row(*self.work[self.num_done])
            self._seconds.setdefault(kind, []).append(now - self._began)
        self._began, self.num_done = now, self.num_done + 1

    def read(self) -> VerifyProgress:
        """Say how far it is now."""
        remaining = self.work[self.num_done :]
        running = ""
        if remaining:
            dtype, layout = remaining[0]
            running = f"{layout} in {dtype}"
        return VerifyProgress(
            min(self.num_done, len(self.work)),
            len(self.work),
            running,
            self._estimate_remaining_s(remaining),
        )

    def _estimate_remaining_s(self, remaining: Sequence[tuple[str, str]]) -> float | None:
        all_seconds = [seconds for of_kind in self._seconds.values() for seconds in of_kind]
        if not all_seconds:
            return None
        seconds_left = 0.0
        for dtype, layout in remaining:
            of_kind = self._seconds.get(_kind_of_row(dtype, layout), all_seconds)
            seconds_left += sum(of_kind) / len(of_kind)
        # The row that is judged now has had some of its time.
        return max(0.0, seconds_left - (self.clock() - self._began))


def _kind_of_row(dtype: str, layout: str) -> str:
    """Rows of one kind take about as long as each other."""
    if layout in ONE_PROCESS_ROWS:
        return layout
    if layout.startswith(TRAINER_ROW_PREFIX):
        return TRAINER_ROW_PREFIX
    return dtype
