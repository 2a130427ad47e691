"""Says how far something is that is no step, seldom enough to cost nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

from phalanx.observe.events import Event, WorkProgressed

PROGRESS_EVENT_INTERVAL_S = 0.5


class ProgressEmitter:
    """Emits `WorkProgressed` of one activity: the first time it is told, and at most each
    `PROGRESS_EVENT_INTERVAL_S` after that."""

    def __init__(
        self,
        emit: Callable[[Event], None],
        step: int,
        activity: str,
        num_total: int = 0,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._emit, self._step, self._activity, self._num_total = emit, step, activity, num_total
        self._told_s = float("-inf")

    def report_progress(self, num_done: int) -> None:
        now = self._clock()
        if now - self._told_s >= PROGRESS_EVENT_INTERVAL_S:
            self._told_s = now
            self._emit(WorkProgressed(self._step, self._activity, num_done, self._num_total))
