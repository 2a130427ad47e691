"""What a run is at while it does no step, and for how long: ranks start, the first step, an
evaluation, a sample."""

from __future__ import annotations

import time
from collections.abc import Callable

from phalanx.core.units import format_seconds, plural
from phalanx.observe import events

FIRST_ACTIVITY_LINE_DELAY_S = (
    10.0  # where nothing is redrawn; each further line comes after twice the time
)
SPINNER_FRAMES = "|/-\\"  # every terminal has these


class CurrentActivity:
    """Follows events. `words` is "" while steps are done, which say themselves how far they are."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.words = "starting the ranks"
        self._kind = ""
        self._since_s = self._clock()
        self._next_line_s = FIRST_ACTIVITY_LINE_DELAY_S

    def take_event(self, event: events.Event, rank: int) -> None:
        match event:
            case events.RestartScheduled():
                self._begin_activity("restart", "starting the ranks again")
            # A run that has all its steps waits for no first one.
            case events.RunStarted() if event.step >= event.total_steps:
                self.clear()
            case events.RunStarted():
                self._begin_activity(
                    "first step", f"step {event.step + 1}, the first one, takes longer than others"
                )
            case events.WorkProgressed():
                self._begin_activity(
                    f"{event.activity} {event.step}", _describe_activity_begun_by_event(event)
                )
            case (
                events.EvalFinished()
                | events.TextGenerated()
                | events.StopRequested()
                | events.RunFinished()
            ):
                self.clear()
            case events.StepFinished() if rank == 0:
                self.clear()

    def _begin_activity(self, kind: str, words: str) -> None:
        # The same work that got further keeps its beginning, and the rhythm of its lines.
        if kind != self._kind:
            self._kind, self._since_s, self._next_line_s = (
                kind,
                self._clock(),
                FIRST_ACTIVITY_LINE_DELAY_S,
            )
        self.words = words

    def clear(self) -> None:
        self.words = self._kind = ""

    @property
    def seconds_so_far(self) -> float:
        return self._clock() - self._since_s

    def build_live_line(self) -> str:
        """The line for a terminal, with a spinner that moves."""
        return (
            # Eight pictures a second: the console redraws ten times a second at most.
            f"{SPINNER_FRAMES[int(8 * self.seconds_so_far) % len(SPINNER_FRAMES)]} {self.words}"
            f" ({format_seconds(self.seconds_so_far)})"
        )

    def build_log_line_if_due(self) -> str | None:
        """The line for a log, if it is due: after ten seconds of the same work, twenty, forty,
        ..."""
        if not self.words or self.seconds_so_far < self._next_line_s:
            return None
        self._next_line_s *= 2
        return f"{self.words} ({format_seconds(self.seconds_so_far)} so far)"


def _describe_activity_begun_by_event(event: events.WorkProgressed) -> str:
    doing, noun, nouns = {
        "evaluate": ("evaluating", "batch", "batches"),
        "sample": ("sampling text", "token", ""),
    }.get(event.activity, (event.activity, "part", ""))
    if event.num_total:
        done = f"{event.num_done:,} of {plural(event.num_total, noun, nouns)}"
    else:
        done = ""
    done = done or f"{plural(event.num_done, noun, nouns)} done"
    return f"{doing} at step {event.step}: {done}"
