"""What a run did on nothing: verdicts and restarts before a fault struck, or after it was over."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from phalanx.drills.record import RunRecord
from phalanx.drills.verdicts import Verdict
from phalanx.observe.events import RestartScheduled, RolledBack
from phalanx.resilience.expectation import NO_VERDICT, Expectation


def find_over_s(
    struck_s: float, again_s: float, detected_s: float | None, expectation: Expectation
) -> float:
    """Monotonic seconds at which a fault is over that struck at `struck_s`, and after which all
    trained again and the verdict came in so many seconds. NaN, which nothing is after, where nobody
    trained again (`again_s` is NaN)."""
    return struck_s + max(again_s, detected_s or 0.0, expectation.lasts_s)


def list_late_kinds(
    verdicts: Sequence[Verdict], over_s: float, consequences: Collection[str]
) -> tuple[str, ...]:
    """The classes of verdicts that came when the fault was over, but for its `consequences`."""
    late = [each for each in verdicts if each.monotonic_s > over_s]
    return tuple(each.kind for each in late if each.kind not in consequences)


def list_restart_moments_s(record: RunRecord) -> list[float]:
    """Monotonic seconds at which the supervisor decided that ranks start again, or go back."""
    return [
        each.monotonic_s
        for each in record.envelopes
        if isinstance(each.event, RestartScheduled | RolledBack)
    ]


def count_needless_restarts(
    record: RunRecord, struck_s: float, over_s: float, expectation: Expectation
) -> int:
    """Restarts that the fault did not ask for: before it struck, and after it was over; all of them
    where the run should have gone on."""
    # They may come to miss what died, long after.
    if expectation.ranks_go_on:
        over_s = float("inf")
    elif expectation.verdict == NO_VERDICT or not expectation.may_lose_steps:
        over_s = struck_s
    moments_s = list_restart_moments_s(record)
    return sum(moment_s < struck_s or moment_s > over_s for moment_s in moments_s)
