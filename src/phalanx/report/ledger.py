"""`RankLedger`: every second of a rank in one part of a few, beside the wall clock of the run.

The wall is measured by the supervisor from the command to the end, on its monotonic clock. The
parts are measured by the rank. Neither is made from the other: what no part claims is
`unattributed`, and parts that are more than the wall were counted twice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from phalanx.observe.events import (
    Envelope,
    RestartScheduled,
    RunFinished,
    StepFinished,
    StepsSummed,
    TimeBetweenSteps,
)
from phalanx.observe.order import AttemptCounter
from phalanx.report.formats import finite_or_zero

LEDGER_PARTS = (
    "start-up",
    "data",
    "forward",
    "backward",
    "communication",
    "pipeline waiting",
    "optimizer",
    "checkpoint",
    "evaluation",
    "prepare and record",
    "other phases",
    "steps done again",
    "restart",
    "ending",
)
"""What the seconds of a rank are charged to; each second to one of them."""

_PART_OF_PHASE = {
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "collective": "communication",
    "pipeline": "pipeline waiting",
    "optimizer": "optimizer",
    "prepare": "prepare and record",
    "record": "prepare and record",
    "evaluate": "evaluation",
    "ckpt_prepare": "checkpoint",
    "ckpt_stage": "checkpoint",
    "ckpt_write": "checkpoint",
    "before_commit": "checkpoint",
    "after_commit": "checkpoint",
}
_PART_OF_ACTIVITY = {"startup": "start-up", "evaluate": "evaluation", "ending": "ending"}

# Clocks of two processes are read one after the other.
_COUNTED_TWICE_SHARE = 0.001


@dataclass(frozen=True)
class RankLedger:
    """The seconds of one rank over all commands of a run: `parts_s` by LEDGER_PARTS.

    `communication_s`: by "axis: operation", what is in "communication". `is_supervised`: the wall
    is the supervisor's; else it is from this rank's first sign of life to its last.
    """

    rank: int
    wall_s: float
    parts_s: Mapping[str, float]
    communication_s: Mapping[str, float]
    num_steps: int
    is_supervised: bool

    @property
    def unattributed_s(self) -> float:
        """Seconds of the wall that no part has; 0 where the parts have more."""
        return max(self.wall_s - sum(self.parts_s.values()), 0.0)

    @property
    def counted_twice_s(self) -> float:
        """Seconds that the parts have more than the wall; 0 within a thousandth of it."""
        excess_s = sum(self.parts_s.values()) - self.wall_s
        return excess_s if excess_s > _COUNTED_TWICE_SHARE * self.wall_s else 0.0


@dataclass
class _RankAttempt:
    """What one rank said in one attempt."""

    began_s: float = math.nan
    last_s: float = math.nan
    clock: str = ""
    has_start: bool = False
    parts_s: dict[str, float] = field(default_factory=dict)
    communication_s: dict[str, float] = field(default_factory=dict)
    num_steps: int = 0

    def add_seconds(self, part: str, seconds: float) -> None:
        self.parts_s[part] = self.parts_s.get(part, 0.0) + finite_or_zero(seconds)


@dataclass(frozen=True)
class _CommandEnd:
    """The end of a command as the supervisor, or rank 0 without one, says it."""

    is_supervisor: bool
    wall_s: float
    at_s: float
    clock: str


class LedgerBuilder:
    """Hears the events of all ranks and of the supervisor, each file in its order.

    `first_steps`: by attempt the first step that it recorded, so that steps that a later attempt
    did again are known when they are read.
    """

    def __init__(self, first_steps: Mapping[int, int]) -> None:
        self._first_steps = first_steps
        self._attempts: dict[int, dict[int, _RankAttempt]] = {}
        self._counter = AttemptCounter()
        self._restarted: set[int] = set()
        self._ends: dict[int, _CommandEnd] = {}

    def add_event(self, envelope: Envelope) -> None:
        if isinstance(envelope.event, RestartScheduled):
            self._restarted.add(self._counter.attempt_of_event(envelope))
        elif isinstance(envelope.event, RunFinished):
            self._add_end(envelope, envelope.event)
        elif envelope.rank < 0:
            self._counter.attempt_of_event(envelope)
        if envelope.rank < 0 or not math.isfinite(envelope.monotonic_s):
            return
        of_rank = self._attempts.setdefault(envelope.rank, {})
        attempt = of_rank.setdefault(envelope.attempt, _RankAttempt())
        attempt.last_s = envelope.monotonic_s
        if math.isnan(attempt.began_s):
            attempt.began_s, attempt.clock = envelope.monotonic_s, _get_clock_name(envelope)
        if isinstance(envelope.event, TimeBetweenSteps):
            _add_time_between_steps(attempt, envelope.event, envelope.monotonic_s)
        elif isinstance(envelope.event, StepFinished):
            self._add_steps(attempt, envelope.attempt, envelope.event, envelope.event.step, 1)
        elif isinstance(envelope.event, StepsSummed):
            event = envelope.event
            self._add_steps(attempt, envelope.attempt, event, event.first_step, event.num_steps)

    def _add_end(self, envelope: Envelope, event: RunFinished) -> None:
        number = self._counter.attempt_of_event(envelope)
        known = self._ends.get(number)
        if known is None or not known.is_supervisor:
            self._ends[number] = _CommandEnd(
                envelope.rank < 0, event.wall_s, envelope.monotonic_s, _get_clock_name(envelope)
            )

    def _add_steps(
        self,
        attempt: _RankAttempt,
        number: int,
        event: StepFinished | StepsSummed,
        step: float,
        num_steps: float,
    ) -> None:
        """A step, or a window of steps that begins with `step`."""
        if any(later > number and step >= at for later, at in self._first_steps.items()):
            attempt.add_seconds("steps done again", event.step_s)
            return
        attempt.num_steps += int(finite_or_zero(num_steps))
        for phase, seconds in event.phases_s.items():
            attempt.add_seconds(_PART_OF_PHASE.get(phase, "other phases"), seconds)
        for name, seconds in event.communication_s.items():
            before_s = attempt.communication_s.get(name, 0.0)
            attempt.communication_s[name] = before_s + finite_or_zero(seconds)

    def build_ledgers(self) -> list[RankLedger]:
        """One ledger for each rank that said how long it took to start; none for runs of earlier
        releases, which did not."""
        ledgers = []
        for rank in sorted(self._attempts):
            attempts = self._attempts[rank]
            if any(attempt.has_start for attempt in attempts.values()):
                ledgers.append(self._sum_attempts(rank, attempts))
        return ledgers

    def _sum_attempts(self, rank: int, attempts: Mapping[int, _RankAttempt]) -> RankLedger:
        parts_s = dict.fromkeys(LEDGER_PARTS, 0.0)
        communication_s: dict[str, float] = {}
        wall_s, is_supervised = 0.0, True
        for command in self._group_by_command(attempts):
            for number in command:
                _add_all(parts_s, attempts[number].parts_s)
                _add_all(communication_s, attempts[number].communication_s)
            for before, after in itertools.pairwise(command):
                lost_s = attempts[after].began_s - attempts[before].last_s
                parts_s["restart"] += max(lost_s, 0.0)
            last = attempts[command[-1]]
            end = self._ends.get(command[-1])
            seen_s = max(last.last_s - attempts[command[0]].began_s, 0.0)
            if end is None or not end.is_supervisor or not math.isfinite(end.wall_s):
                is_supervised = False
                wall_s += seen_s
                continue
            wall_s += end.wall_s
            # What it did after its last word is ending, too, if both read one clock.
            if end.clock == last.clock:
                parts_s["ending"] += max(finite_or_zero(end.at_s - last.last_s), 0.0)
        num_steps = sum(attempt.num_steps for attempt in attempts.values())
        return RankLedger(rank, wall_s, parts_s, communication_s, num_steps, is_supervised)

    def _group_by_command(self, attempts: Mapping[int, _RankAttempt]) -> list[list[int]]:
        """Attempts that one command started, one after the other."""
        commands: list[list[int]] = []
        for number in sorted(attempts):
            if commands and commands[-1][-1] in self._restarted:
                commands[-1].append(number)
            else:
                commands.append([number])
        return commands


def _add_time_between_steps(attempt: _RankAttempt, event: TimeBetweenSteps, now_s: float) -> None:
    seconds = finite_or_zero(event.seconds)
    attempt.add_seconds(_PART_OF_ACTIVITY.get(event.activity, "other phases"), seconds)
    if event.activity == "startup":
        attempt.has_start = True
        attempt.began_s = min(attempt.began_s, now_s - seconds)


def _add_all(sums: dict[str, float], more: Mapping[str, float]) -> None:
    for name, seconds in more.items():
        sums[name] = sums.get(name, 0.0) + seconds


def _get_clock_name(envelope: Envelope) -> str:
    return envelope.clock.name if envelope.clock is not None else ""
