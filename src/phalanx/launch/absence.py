"""Finds the rank that the others waited for in vain: when all that is known are consequences, the
black boxes tell.

A rank that ran into a timeout is a consequence; the cause is the one that was not where the others
waited. Its black box, the kernel's word for what its process does, and its stack, asked for by a
signal, say which and why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.core.black_box_reader import LastPosition
from phalanx.launch.end_record import EndRecord
from phalanx.observe.where_words import STOPPED_BY_SIGNAL

# A rank that enters a collective this much later than all others was what they waited for.
MIN_LATENESS_TO_BLAME_S = 1.0
WAITING_PHASES = ("collective", "pipeline")
_MEANING_OF_PROCESS_STATE = {
    "R": "its process was running, in code that did not get there",
    "S": "its process was waiting for something else",
    "D": "its process was waiting for a disk or a network file system",
    "T": f"its process was {STOPPED_BY_SIGNAL}",
    "t": "its process was stopped by a debugger",
}
_STOPPED_STATES = ("T", "t")


@dataclass(frozen=True)
class AbsentRank:
    """A rank that did not come to where the others waited, and the reason in words."""

    rank: int
    why: str


def find_absent_rank(
    records: Mapping[int, EndRecord],
    silent: Mapping[int, str],
    last_seen_of: Mapping[int, LastPosition],
) -> AbsentRank | None:
    """The rank that the others waited for, if the facts single one out.

    `records` is what ranks said of their ends, `silent` the process states of those that had said
    nothing when the others had given up, `last_seen_of` where each rank was last seen.
    """
    stopped = [rank for rank, state in silent.items() if state in _STOPPED_STATES]
    not_waiting = [rank for rank in silent if not _is_waiting_in_collective(last_seen_of.get(rank))]
    # A stopped process first: it may have been stopped while it waited for the others.
    for group in (stopped, not_waiting):
        if group:
            rank = min(
                group, key=lambda rank: _make_furthest_behind_sort_key(last_seen_of.get(rank))
            )
            return AbsentRank(
                rank, _MEANING_OF_PROCESS_STATE.get(silent[rank], "its process said nothing")
            )
    finished = [rank for rank, record in records.items() if not record.has_failed]
    if finished:
        return AbsentRank(min(finished), "it had ended its work, and the others had not")
    return _find_late_last_to_enter_collective(last_seen_of)


def _find_late_last_to_enter_collective(
    last_seen_of: Mapping[int, LastPosition],
) -> AbsentRank | None:
    """The last of all ranks to enter a collective, if the one before it had waited for long by
    then."""
    arrivals = []
    for rank, last_seen in last_seen_of.items():
        if _is_waiting_in_collective(last_seen):
            arrivals.append((last_seen.monotonic_s, rank))
    if len(arrivals) < 2:
        return None
    (before_s, _), (latest_s, rank) = sorted(arrivals)[-2:]
    if latest_s - before_s < MIN_LATENESS_TO_BLAME_S:
        return None
    return AbsentRank(rank, f"it came {latest_s - before_s:.1f} s after the others")


def _is_waiting_in_collective(last_seen: LastPosition | None) -> bool:
    # Without a collective's name it is the phase's own work, such as packing.
    return (
        last_seen is not None and last_seen.phase in WAITING_PHASES and bool(last_seen.collective)
    )


def _make_furthest_behind_sort_key(last_seen: LastPosition | None) -> tuple[int, float]:
    """Step and time at which a rank was last seen: the one that is furthest behind comes first."""
    if last_seen is None:
        return -1, 0.0
    return last_seen.step, last_seen.monotonic_s
