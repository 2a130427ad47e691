"""Why the attempts of a run begin."""

from __future__ import annotations

from typing import Literal

from phalanx.observe.events import (
    RESUMED,
    Envelope,
    LayoutChanged,
    Note,
    RestartScheduled,
    RolledBack,
    RunFinished,
)

Start = Literal["supervisor", "resume", "launcher"]


class AttemptStarts:
    """Who began each attempt after a run's first, from the events before it.

    "supervisor": it said so, after a failure, to go back, or with another number of ranks.
    "resume": a person continued the run. "launcher": nobody said so, as another launcher (torchrun,
    say) starts its ranks again without a word.
    """

    def __init__(self) -> None:
        self._starts: dict[int, Start] = {}

    def add_event(self, envelope: Envelope) -> None:
        """Add one event; those of one process in its order."""
        next_attempt = envelope.attempt + 1
        match envelope.event:
            case RestartScheduled() | LayoutChanged() | RolledBack():
                self._starts.setdefault(next_attempt, "supervisor")
            case Note(code=code) if code == RESUMED:
                # Also where a restart was announced and did not come: its command had died.
                self._starts[envelope.attempt] = "resume"
            case RunFinished(status=status) if status != "failed":
                # Runs of early releases have no such note; a launcher starts only what failed.
                self._starts.setdefault(next_attempt, "resume")

    def find_start(self, attempt: int) -> Start:
        """Who began `attempt`, by the events so far."""
        return self._starts.get(attempt, "launcher")
