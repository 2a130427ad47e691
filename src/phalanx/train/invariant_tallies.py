"""Counts the checks of each invariant, and emits those that fail otherwise than the one before."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from phalanx.observe.bus import Bus
from phalanx.observe.events import InvariantChecked

MAX_NAMED_PARAMETERS = 20


@dataclass
class _InvariantCounts:
    """The checks of one invariant so far."""

    name: str
    num_checks: int = 0
    num_failed: int = 0
    first_failed_step: int = 0
    last_step: int = 0
    looked_at: str = ""
    not_looked_at: list[str] = field(default_factory=list)
    # The tensors and ranks of the last failure: the same again is not told again.
    last_failure: object = None


class InvariantTallies:
    """The checks of all invariants of an attempt, told to `bus`."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._counts: dict[str, _InvariantCounts] = {}

    def record_not_possible(self, step: int, name: str, *reasons: str) -> None:
        """Take note that an invariant cannot be checked, and why."""
        tally = self._counts.setdefault(name, _InvariantCounts(name))
        tally.last_step, tally.not_looked_at = step, list(reasons)

    def record_passed(self, name: str, step: int, looked_at: str) -> None:
        """Count a check that passed, without an event."""
        tally = self._counts.setdefault(name, _InvariantCounts(name))
        tally.num_checks += 1
        tally.last_step, tally.looked_at, tally.last_failure = step, looked_at, None
        tally.not_looked_at = []

    def record_and_emit(self, result: InvariantChecked) -> None:
        """Count a check, and emit it if it failed otherwise than the one before."""
        tally = self._counts.setdefault(result.name, _InvariantCounts(result.name))
        tally.num_checks += 1
        tally.last_step, tally.looked_at = result.step, result.looked_at
        tally.not_looked_at = result.not_looked_at
        if result.ok:
            tally.last_failure = None
            return
        tally.num_failed += 1
        tally.first_failed_step = tally.first_failed_step or result.step
        failure = (result.tensors, result.replaced, result.removed, result.ranks)
        if failure != tally.last_failure:
            tally.last_failure = failure
            self._bus.emit(
                replace(
                    result,
                    num_checks=tally.num_checks,
                    num_failed=tally.num_failed,
                    first_failed_step=tally.first_failed_step,
                    tensors=result.tensors[:MAX_NAMED_PARAMETERS],
                    replaced=result.replaced[:MAX_NAMED_PARAMETERS],
                    removed=result.removed[:MAX_NAMED_PARAMETERS],
                    num_tensors=len(result.tensors),
                )
            )

    def emit_summary(self) -> None:
        """Emit what was checked so far, an event for each invariant."""
        for tally in self._counts.values():
            self._bus.emit(
                InvariantChecked(
                    step=tally.last_step,
                    name=tally.name,
                    ok=tally.num_failed == 0,
                    is_summary=True,
                    num_checks=tally.num_checks,
                    num_failed=tally.num_failed,
                    first_failed_step=tally.first_failed_step,
                    looked_at=tally.looked_at,
                    not_looked_at=list(tally.not_looked_at),
                )
            )
