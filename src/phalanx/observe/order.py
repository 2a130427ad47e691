"""Which event came first: by attempts, by the order in each file, by a clock that nobody sets; not by wall clocks.

A wall clock is stepped (a virtual machine wakes up, a time server answers, summer ends), and a run goes on meanwhile.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence

from phalanx.observe.events import (
    BaselineMeasured,
    Envelope,
    RankFailed,
    RanksStarted,
    RestartScheduled,
    RunFinished,
)

# What a supervisor says once the ranks of an attempt are gone.
_AFTER_THE_RANKS = (RankFailed, RestartScheduled, BaselineMeasured, RunFinished)
_ANOTHER_MACHINE_S = 3600.0  # clocks of processes that start together do not differ by so much on one machine


class AttemptCounter:
    """The attempt that an event belongs to. After a supervisor has scheduled a restart, it speaks of the next one."""

    def __init__(self) -> None:
        self._next = 0

    def of(self, envelope: Envelope) -> int:
        """For the events of a run, each process's in its own order."""
        if envelope.rank >= 0:
            return envelope.attempt
        attempt = max(envelope.attempt, self._next)
        if isinstance(envelope.event, RestartScheduled):
            self._next = attempt + 1
        return attempt


def in_order(envelopes: Iterable[Envelope]) -> list[Envelope]:
    """The events of a run, oldest first. Those of one process come, and stay, in the order in which it wrote them."""
    attempts = AttemptCounter()
    by_attempt: dict[int, dict[int, list[Envelope]]] = {}
    for envelope in envelopes:
        by_attempt.setdefault(attempts.of(envelope), {}).setdefault(envelope.rank, []).append(envelope)
    return [found for attempt in sorted(by_attempt) for found in _merged(by_attempt[attempt])]


def _merged(by_rank: dict[int, list[Envelope]]) -> Iterator[Envelope]:
    """The events of one attempt."""
    streams = [by_rank[rank] for rank in sorted(by_rank)]
    if all(math.isfinite(envelope.monotonic_s) for stream in streams for envelope in stream):
        shifts = _shifts(by_rank)
        keyed = [_keyed(by_rank[rank], shift) for rank, shift in shifts.items()]
        return (envelope for _, _, envelope in heapq.merge(*keyed, key=lambda item: item[:2]))
    return _merged_by_kind(by_rank)


def _shifts(by_rank: dict[int, list[Envelope]]) -> dict[int, float]:
    """By rank what brings its clock to that of the first one: zero on one machine, whose processes share the clock."""
    first = {rank: by_rank[rank][0].monotonic_s for rank in sorted(by_rank)}
    lead = first[min(first)]
    return {rank: lead - at if abs(lead - at) > _ANOTHER_MACHINE_S else 0.0 for rank, at in first.items()}


def _keyed(stream: Sequence[Envelope], shift: float) -> Iterator[tuple[float, int, Envelope]]:
    """A key that never falls, so that a stream stays in its own order."""
    latest = -math.inf
    for envelope in stream:
        latest = max(latest, envelope.monotonic_s + shift)
        yield latest, envelope.rank, envelope


def _merged_by_kind(by_rank: dict[int, list[Envelope]]) -> Iterator[Envelope]:
    """Of files without a steady clock: what the supervisor says before its ranks start and once they are gone comes
    before and after theirs. How the rest interleaves is all that a wall clock may decide, where there is no other.
    """
    of_supervisor = by_rank.get(-1, [])
    starts = [index for index, envelope in enumerate(of_supervisor) if isinstance(envelope.event, RanksStarted)]
    ends = [index for index, envelope in enumerate(of_supervisor) if isinstance(envelope.event, _AFTER_THE_RANKS)]
    begin = starts[-1] + 1 if starts else 0
    end = max(begin, ends[0] if ends else len(of_supervisor))
    yield from of_supervisor[:begin]
    streams = [by_rank[rank] for rank in sorted(by_rank) if rank >= 0] + [of_supervisor[begin:end]]
    keyed = [_by_wall_clock(stream, place) for place, stream in enumerate(streams)]
    yield from (envelope for _, _, envelope in heapq.merge(*keyed, key=lambda item: item[:2]))
    yield from of_supervisor[end:]


def _by_wall_clock(stream: Sequence[Envelope], place: int) -> Iterator[tuple[float, int, Envelope]]:
    latest = -math.inf
    for envelope in stream:
        latest = max(latest, envelope.time_unix_s)
        yield latest, place, envelope
