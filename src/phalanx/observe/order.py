"""Which event came first: by attempts, by the order in each file, by a clock that nobody sets; not
by wall clocks.

A wall clock is stepped (a virtual machine wakes up, a time server answers, summer ends), and a run
goes on meanwhile.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence

from phalanx.observe.events import (
    BaselineMeasured,
    Envelope,
    Event,
    MonotonicClockReading,
    RankFailed,
    RanksStarted,
    RestartScheduled,
    RunFinished,
)

# What a supervisor says once the ranks of an attempt are gone.
_EVENT_CLASSES_AFTER_ATTEMPT = (RankFailed, RestartScheduled, BaselineMeasured, RunFinished)
# Of files whose clocks have no name: ranks start together, so first events that are further apart
# show two machines.
_MIN_CORRECTED_CLOCK_SHIFT_S = 3600.0


def is_after_attempt(event: Event) -> bool:
    """True for what a supervisor says once the ranks of an attempt are gone."""
    return isinstance(event, _EVENT_CLASSES_AFTER_ATTEMPT)


class AttemptCounter:
    """The attempt that an event belongs to.

    After a supervisor has scheduled a restart, it speaks of the next one.
    """

    def __init__(self) -> None:
        self._next = 0

    def attempt_of_event(self, envelope: Envelope) -> int:
        """The attempt of an event; the events of each process must come in its own order."""
        if envelope.rank >= 0:
            return envelope.attempt
        # Until the next attempt has begun, its envelopes carry the number of the last one.
        attempt = max(envelope.attempt, self._next)
        if isinstance(envelope.event, RestartScheduled):
            self._next = attempt + 1
        return attempt


def sort_events(envelopes: Iterable[Envelope]) -> list[Envelope]:
    """The events of a run, oldest first.

    Those of one process come, and stay, in the order in which it wrote them.
    """
    attempts = AttemptCounter()
    by_attempt: dict[int, dict[int, list[Envelope]]] = {}
    for envelope in envelopes:
        by_attempt.setdefault(attempts.attempt_of_event(envelope), {}).setdefault(
            envelope.rank, []
        ).append(envelope)
    return [
        envelope
        for attempt in sorted(by_attempt)
        for envelope in _merge_events_of_attempt(by_attempt[attempt])
    ]


def _merge_events_of_attempt(by_rank: dict[int, list[Envelope]]) -> Iterator[Envelope]:
    """The events of one attempt."""
    streams = [by_rank[rank] for rank in sorted(by_rank)]
    # One file of an earlier release is enough: there is no steady clock to merge it by.
    if all(math.isfinite(envelope.monotonic_s) for stream in streams for envelope in stream):
        shifts = _estimate_clock_shifts_by_rank(by_rank)
        keyed = [
            _pair_with_steady_sort_keys(by_rank[rank], shift) for rank, shift in shifts.items()
        ]
        # The key leaves the envelope out: envelopes have no order, and times may be equal.
        return (envelope for _, _, envelope in heapq.merge(*keyed, key=lambda item: item[:2]))
    return _merge_events_without_steady_clock(by_rank)


def _estimate_clock_shifts_by_rank(by_rank: dict[int, list[Envelope]]) -> dict[int, float]:
    """By rank what brings its clock to that of rank 0: zero on one machine, whose processes share
    the clock.

    Clocks of two machines have nothing in common but that the ranks of an attempt start together.
    The supervisor's first event says nothing of that: it may speak only at the end. Its process is
    on the machine of rank 0.
    """
    clocks = {rank: _find_clock_of_last_process(rank, stream) for rank, stream in by_rank.items()}
    lead = clocks.get(0) or clocks.get(-1) or clocks[min(clocks)]
    began_s: dict[str, float] = {}  # by the name of a clock: what it showed when the ranks started
    # The supervisor comes last: its first event counts only where no rank has its clock.
    for rank in sorted(clocks, key=lambda rank: (rank < 0, rank)):
        name = clocks[rank].name
        if rank >= 0 or name not in began_s:
            began_s[name] = min(began_s.get(name, math.inf), clocks[rank].began_s)
    lead_began_s = lead.began_s
    if lead.name:
        lead_began_s = began_s[lead.name]
    shifts = {}
    for rank, clock in clocks.items():
        if clock.name and lead.name:
            shifts[rank] = lead_began_s - began_s[clock.name] if clock.name != lead.name else 0.0
        else:
            apart_s = lead_began_s - clock.began_s
            shifts[rank] = (
                apart_s if rank > 0 and abs(apart_s) > _MIN_CORRECTED_CLOCK_SHIFT_S else 0.0
            )
    return shifts


def _find_clock_of_last_process(rank: int, stream: Sequence[Envelope]) -> MonotonicClockReading:
    """The clock of the process that wrote last; a supervisor's begins anew with each attempt."""
    clock = stream[-1].clock
    if clock is None or rank < 0:
        return MonotonicClockReading(_get_clock_name(clock), stream[0].monotonic_s)
    return clock


def _pair_with_steady_sort_keys(
    stream: Sequence[Envelope], shift: float
) -> Iterator[tuple[float, int, Envelope]]:
    """A key that never falls, so that a stream stays in its own order."""
    latest, last = -math.inf, stream[-1].clock
    for envelope in stream:
        # Else a process spoke that ended before the machine was started anew.
        if _get_clock_name(envelope.clock) == _get_clock_name(last):
            latest = max(latest, envelope.monotonic_s + shift)
        yield latest, envelope.rank, envelope


def _get_clock_name(clock: MonotonicClockReading | None) -> str:
    if clock is None:
        return ""
    return clock.name


def _merge_events_without_steady_clock(by_rank: dict[int, list[Envelope]]) -> Iterator[Envelope]:
    """Merge files without a steady clock: the supervisor's events before its ranks start come
    before theirs, and those once they are gone after.

    How the rest interleaves is all that a wall clock may decide, where there is no other.
    """
    of_supervisor = by_rank.get(-1, [])
    first, end = 0, len(of_supervisor)
    for index, envelope in enumerate(of_supervisor):
        if isinstance(envelope.event, RanksStarted):
            first = index + 1
        elif is_after_attempt(envelope.event):
            end = min(end, index)
    beyond = max(first, end)
    yield from of_supervisor[:first]
    streams = [by_rank[rank] for rank in sorted(by_rank) if rank >= 0] + [
        of_supervisor[first:beyond]
    ]
    keyed = [
        _pair_with_wall_clock_sort_keys(stream, number) for number, stream in enumerate(streams)
    ]
    yield from (envelope for _, _, envelope in heapq.merge(*keyed, key=lambda item: item[:2]))
    yield from of_supervisor[beyond:]


def _pair_with_wall_clock_sort_keys(
    stream: Sequence[Envelope], number: int
) -> Iterator[tuple[float, int, Envelope]]:
    latest = -math.inf
    for envelope in stream:
        latest = max(latest, envelope.time_unix_s)
        yield latest, number, envelope
