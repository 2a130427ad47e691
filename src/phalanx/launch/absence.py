"""Finds the rank that the others waited for in vain: when all that is known are consequences, the
black boxes tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.phases import LastSeen
from phalanx.launch.end_record import EndRecord

# A rank that enters a collective this much later than all others was what they waited for.
LATE_S = 1.0
WAITING_PHASES = ("collective", "pipeline")
_STATES = {
    "R": "its process was running, in code that did not get there",
    "S": "its process was waiting for something else",
    "D": "its process was waiting for a disk or a network file system",
    "T": "its process was stopped (SIGSTOP)",
    "t": "its process was stopped by a debugger",
}
_STOPPED = ("T", "t")


@dataclass(frozen=True)
class Absence:
    """A rank that did not come to where the others waited, and the reason in words."""

    rank: int
    why: str


def process_state(pid: int) -> str:
    """The kernel's letter for what a process does ("R", "S", "T", ...); empty where it does not
    say."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]


def find_absence(
    records: Mapping[int, EndRecord], silent: Mapping[int, str], places: Mapping[int, LastSeen]
) -> Absence | None:
    """The rank that the others waited for, if the facts single one out.

    `records` is what ranks said of their ends, `silent` the process states of those that had said
    nothing when the others had given up, `places` where each rank was last seen.
    """
    stopped = [rank for rank, state in silent.items() if state in _STOPPED]
    not_waiting = [rank for rank in silent if not _is_waiting(places.get(rank))]
    for group in (stopped, not_waiting):
        if group:
            rank = min(group, key=lambda rank: _order_of_place(places.get(rank)))
            return Absence(rank, _STATES.get(silent[rank], "its process said nothing"))
    finished = [rank for rank, record in records.items() if not record.has_failed]
    if finished:
        return Absence(min(finished), "it had ended its work, and the others had not")
    return _find_latest(places)


def _find_latest(places: Mapping[int, LastSeen]) -> Absence | None:
    """The last of all ranks to enter a collective, if the one before it had waited for long by
    then."""
    arrived = sorted(
        (place.monotonic_s, rank) for rank, place in places.items() if _is_waiting(place)
    )
    if len(arrived) < 2 or arrived[-1][0] - arrived[-2][0] < LATE_S:
        return None
    late_s, rank = arrived[-1][0] - arrived[-2][0], arrived[-1][1]
    return Absence(rank, f"it came {late_s:.1f} s after the others")


def _is_waiting(place: LastSeen | None) -> bool:
    return place is not None and place.phase in WAITING_PHASES and bool(place.collective)


def _order_of_place(place: LastSeen | None) -> tuple[int, float]:
    """Step and time of a rank's last place: the rank that is furthest behind comes first."""
    return (place.step, place.monotonic_s) if place is not None else (-1, 0.0)
