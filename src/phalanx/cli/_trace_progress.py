"""How far a run is from the steps that are to be traced: a bar on a terminal, else a line now and
then."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from phalanx.cli._progress import ProgressLine
from phalanx.core.units import format_seconds

if TYPE_CHECKING:
    from phalanx.run.live_trace import TraceProgress


class TraceProgressLine(ProgressLine):
    """Says what is waited for, and how long that takes at the pace of the steps since it began."""

    def __init__(self) -> None:
        super().__init__("trace")
        self.is_accepted = False
        self._first: tuple[int, float] | None = None

    def tell(self, progress: TraceProgress) -> None:
        self.is_accepted = progress.is_accepted
        if not progress.is_accepted:
            self.update(0, 1, instead="asks the run, which looks at the end of a step")
            return
        now_s = time.monotonic()
        if self._first is None:
            self._first = progress.step, now_s
        first_step, first_s = self._first
        words = f"step {progress.step}, up to step {progress.last_step}"
        num_done, num_left = progress.step - first_step, progress.last_step - progress.step
        if num_done > 0 and num_left > 0:
            words += f"  eta {format_seconds((now_s - first_s) / num_done * num_left)}"
        self.update(num_done, max(1, progress.last_step - first_step), instead=words)

    def tell_merged(self, num_done: int, num_total: int) -> None:
        """So many of so many reads of parts are done."""
        self.update(
            num_done, num_total, instead=f"reads the parts of ranks, {num_done}/{num_total}"
        )
