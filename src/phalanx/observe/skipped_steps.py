"""Which steps of a run were not applied, as its events come."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.observe.events import Envelope, StepSkipped


class SkippedSteps:
    """The steps that were not applied, by the events of all attempts.

    A skip holds for its attempt: done again by a later one, the step counts, unless that skips it,
    too. It is said before the step's own event.
    """

    def __init__(self) -> None:
        self._latest: dict[int, tuple[int, StepSkipped]] = {}  # by step, with its attempt

    def add_event(self, envelope: Envelope) -> None:
        """Add one event, of any attempt and in any order of these."""
        if isinstance(envelope.event, StepSkipped):
            step = int(envelope.event.step)
            if step not in self._latest or self._latest[step][0] <= envelope.attempt:
                self._latest[step] = envelope.attempt, envelope.event

    def find_skip(self, step: int, attempt: int) -> StepSkipped | None:
        """The skip of a step as `attempt` did it; None where it was applied."""
        skipped_in, event = self._latest.get(step, (-1, None))
        return event if skipped_in >= attempt else None

    def list_standing_skips(self, attempt_of: Mapping[int, int]) -> list[StepSkipped]:
        """The skips that no later attempt took back, by step; `attempt_of` each step has the
        attempt whose result stands."""
        return [
            event
            for step, (attempt, event) in sorted(self._latest.items())
            if self.find_skip(step, attempt_of.get(step, attempt)) is not None
        ]
