"""Which attempts of a run one command started, by the words of its supervisors.

A run has *stretches*: each resume by a person begins one. Within a stretch an attempt follows
another in the same command where a restart was announced after that one. Across two it never does:
a command that is stopped or killed in the pause before a restart leaves one announced that does not
come, and the command that resumes the run gives its first attempt the same number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from phalanx.observe.events import (
    Envelope,
    LayoutChanged,
    RanksStarted,
    RestartScheduled,
    RolledBack,
    RunFinished,
    is_resume,
)
from phalanx.observe.order import AttemptCounter
from phalanx.report.formats import finite_or_zero

MAX_SECONDS = 1e12
"""Of a file: more than that nothing has ever taken."""


class StretchCounter:
    """The stretch and the attempt that an event belongs to."""

    def __init__(self) -> None:
        # By stretch the number of its first attempt.
        self._first_attempts: list[float] = [-math.inf]
        self._attempts = AttemptCounter()

    def locate_event(self, envelope: Envelope) -> tuple[int, int]:
        """(stretch, attempt) of an event. Those of each process must come in its own order, and a
        resume before what the ranks say that it started."""
        if envelope.rank >= 0:
            return self.find_stretch(envelope.attempt), envelope.attempt
        if is_resume(envelope.event):
            self._first_attempts.append(envelope.attempt)
            # What was announced and left no file has given its number back.
            self._attempts = AttemptCounter()
        return len(self._first_attempts) - 1, self._attempts.attempt_of_event(envelope)

    def find_stretch(self, attempt: int) -> int:
        """The stretch of an attempt that left a file, by the resumes so far."""
        stretch = len(self._first_attempts) - 1
        while self._first_attempts[stretch] > attempt:
            stretch -= 1
        return stretch


def announces_another_attempt(envelope: Envelope) -> bool:
    """True for what a supervisor says before it starts ranks again."""
    return isinstance(envelope.event, RestartScheduled | LayoutChanged | RolledBack)


def name_clock_of_event(envelope: Envelope) -> str:
    """The clock by which an event's seconds are; empty where it has no name."""
    return envelope.clock.name if envelope.clock is not None else ""


def clip_seconds(seconds: float) -> float:
    """Seconds of a file, which may hold any number; 0 for what is none."""
    return min(max(finite_or_zero(float(seconds)), 0.0), MAX_SECONDS)


@dataclass(frozen=True)
class SupervisedEnd:
    """The end of a command as it was said, after `wall_s` seconds."""

    wall_s: float
    at_s: float
    clock: str
    has_failed: bool

    @property
    def began_s(self) -> float:
        """When the command began, on the clock of `at_s`."""
        return self.at_s - self.wall_s

    def is_on_clock(self, name: str) -> bool:
        return bool(self.clock) and self.clock == name and math.isfinite(self.wall_s)


@dataclass
class SupervisorWords:
    """What supervisors said in one stretch of a run, by attempt."""

    # The moment at which its command scheduled another one.
    _restarted_s: dict[int, float] = field(default_factory=dict)
    # Only a supervisor says that it has started processes.
    _num_processes: dict[int, int] = field(default_factory=dict)
    _ends: dict[int, SupervisedEnd] = field(default_factory=dict)

    def add_event(self, envelope: Envelope, number: int) -> None:
        """Add an event of the attempt `number`."""
        event = envelope.event
        if announces_another_attempt(envelope):
            self._restarted_s[number] = envelope.monotonic_s
        elif isinstance(event, RunFinished):
            # The newest counts: of early releases, without words of a resume, a command that ended
            # before its ranks left files has the number of the next one.
            self._ends[number] = SupervisedEnd(
                event.wall_s,
                envelope.monotonic_s,
                name_clock_of_event(envelope),
                event.status == "failed",
            )
        elif isinstance(event, RanksStarted):
            self._num_processes[number] = len(event.pids)

    def find_first_of_command(self, number: int) -> int:
        while number - 1 in self._restarted_s:
            number -= 1
        return number

    def find_last_of_command(self, number: int) -> int:
        while number in self._restarted_s:
            number += 1
        return number

    def find_end(self, command: list[int]) -> SupervisedEnd | None:
        """The end of a supervised command, whose last attempts may have left no word of a rank;
        None where nobody said it."""
        numbers = range(command[-1], self.find_last_of_command(command[-1]) + 1)
        ends = [self._ends[number] for number in numbers if number in self._ends]
        is_supervised = not self._num_processes.keys().isdisjoint(command)
        if not ends or not is_supervised or not math.isfinite(ends[-1].wall_s):
            return None
        return ends[-1]

    def group_by_command(self, numbers: Iterable[int]) -> list[list[int]]:
        """Attempts that one command started, one after the other."""
        commands: list[list[int]] = []
        for number in sorted(numbers):
            if commands and self.find_last_of_command(commands[-1][-1]) >= number:
                commands[-1].append(number)
            else:
                commands.append([number])
        return commands

    def measure_absence_s(
        self, rank: int, numbers: Iterable[int], end: SupervisedEnd | None
    ) -> float:
        """Seconds of the attempts `numbers` of a command whose layout did not have the rank: each
        from when it was scheduled to when the next one was."""
        absence_s = 0.0
        for number in numbers:
            if not 0 < self._num_processes.get(number, 0) <= rank:
                continue
            began_s = self._restarted_s.get(number - 1, math.nan if end is None else end.began_s)
            over_s = self._restarted_s.get(number, math.nan if end is None else end.at_s)
            absence_s += clip_seconds(over_s - began_s)
        return absence_s
