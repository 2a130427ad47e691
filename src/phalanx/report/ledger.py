"""`RankLedger`: every second of a rank in one part of a few, beside the wall clock of the run.

The wall is measured by the supervisor from the command to the end, on its monotonic clock, without
the attempts whose layout did not have the rank. The parts are measured by the rank. Neither is made
from the other: what no part claims is `unattributed`, and parts that are more than the wall were
counted twice.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.observe.events import (
    CollectivesCounted,
    Envelope,
    StepFinished,
    StepsSummed,
    TimeBetweenSteps,
)
from phalanx.report.formats import finite_or_zero, format_percent, format_seconds_or_missing
from phalanx.report.supervised_commands import (
    MAX_SECONDS,
    StretchCounter,
    SupervisedEnd,
    SupervisorWords,
    clip_seconds,
    name_clock_of_event,
)

LEDGER_PARTS = (
    "start-up",
    "data",
    "host to device",
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
    "failure",
    "ending",
)
"""What the seconds of a rank are charged to; each second to one of them."""

_PART_OF_PHASE = {
    "data": "data",
    "host_to_device": "host to device",
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
MAX_UNATTRIBUTED_SHARE, MIN_UNATTRIBUTED_S = 0.02, 1.0
"""Beyond both a ledger is warned of: a run of a few seconds has gaps that mean nothing."""
_MAX_WARNINGS = 5


@dataclass(frozen=True)
class CommandSeconds:
    """The wall of one command of a run, and the sum of what its parts claim of it."""

    wall_s: float
    claimed_s: float


@dataclass(frozen=True)
class RankLedger:
    """The seconds of one rank over the commands of a run in which it was: `parts_s` by
    LEDGER_PARTS.

    `communication_s`: by "axis: operation", what is in "communication". `is_supervised`: the wall
    is the supervisor's; else it is from this rank's first sign of life to its last in each attempt.
    `commands`: each by itself, so that a gap of one hides nothing that another counts twice.
    """

    rank: int
    wall_s: float
    parts_s: Mapping[str, float]
    communication_s: Mapping[str, float]
    num_steps: int
    is_supervised: bool
    commands: tuple[CommandSeconds, ...]

    @property
    def unattributed_s(self) -> float:
        """Seconds of the commands' walls that no part has; of a command whose parts have more,
        0."""
        return sum(max(each.wall_s - each.claimed_s, 0.0) for each in self.commands)

    @property
    def counted_twice_s(self) -> float:
        """Seconds that the parts of a command have more than its wall; 0 within a thousandth of
        it."""
        excesses_s = [
            each.claimed_s - each.wall_s
            for each in self.commands
            if each.claimed_s - each.wall_s > _COUNTED_TWICE_SHARE * each.wall_s
        ]
        return sum(excesses_s, 0.0)

    def describe_gap(self) -> list[str]:
        """Sentences about what does not add up: seconds counted twice, and more than
        MAX_UNATTRIBUTED_SHARE of the supervisor's wall in no part."""
        sentences = []
        if self.counted_twice_s:
            sentences.append(
                f"The parts of rank {self.rank} are"
                f" {format_seconds_or_missing(self.counted_twice_s)} more than the wall: something"
                " was counted twice."
            )
        gap_s = self.unattributed_s
        is_large = gap_s > MAX_UNATTRIBUTED_SHARE * self.wall_s and gap_s >= MIN_UNATTRIBUTED_S
        # Without a supervisor what a rank does between two words may not be over yet.
        if self.is_supervised and is_large:
            sentences.append(
                f"{format_seconds_or_missing(gap_s)} of rank {self.rank}"
                f" ({format_percent(gap_s, self.wall_s)} of the wall) are in no part of the"
                " ledger: what is said of its time leaves them out."
            )
        return sentences


def list_ledger_warnings(ledgers: Sequence[RankLedger]) -> list[str]:
    """Sentences about ledgers that do not add up, five at most."""
    sentences = [text for ledger in ledgers for text in ledger.describe_gap()]
    return sentences[:_MAX_WARNINGS]


@dataclass
class _RankAttempt:
    """The words of one rank in one attempt."""

    began_s: float = math.nan
    last_s: float = math.nan
    clock: str = ""
    has_start: bool = False
    parts_s: dict[str, float] = field(default_factory=dict)
    communication_s: dict[str, float] = field(default_factory=dict)
    num_steps: int = 0

    def add_seconds(self, part: str, seconds: float) -> None:
        self.parts_s[part] = self.parts_s.get(part, 0.0) + clip_seconds(seconds)


class LedgerBuilder:
    """Hears the events of all ranks and of the supervisor, each file in its order.

    `first_steps`: by attempt the first step that it recorded, so that steps that a later attempt
    did again are known when they are read.
    """

    def __init__(self, first_steps: Mapping[int, int]) -> None:
        self._first_steps = first_steps
        self._attempts: dict[int, dict[int, _RankAttempt]] = {}
        self._counter = StretchCounter()
        # By stretch of the run.
        self._words: defaultdict[int, SupervisorWords] = defaultdict(SupervisorWords)

    def add_event(self, envelope: Envelope) -> None:
        if not isinstance(envelope.event, StepFinished | StepsSummed):
            stretch, number = self._counter.locate_event(envelope)
            self._words[stretch].add_event(envelope, number)
        if envelope.rank < 0 or not math.isfinite(envelope.monotonic_s):
            return
        if isinstance(envelope.event, CollectivesCounted):
            # Where a rank fails it comes after the failure: no word of training.
            return
        of_rank = self._attempts.setdefault(envelope.rank, {})
        attempt = of_rank.get(envelope.attempt)
        if attempt is None:
            attempt = of_rank[envelope.attempt] = _RankAttempt()
        attempt.last_s = envelope.monotonic_s
        if math.isnan(attempt.began_s):
            attempt.began_s, attempt.clock = envelope.monotonic_s, name_clock_of_event(envelope)
        if isinstance(envelope.event, TimeBetweenSteps):
            _add_time_between_steps(attempt, envelope.event, envelope.monotonic_s)
        elif isinstance(envelope.event, StepFinished):
            event = envelope.event
            self._add_steps(attempt, envelope.attempt, event, (event.step, event.step), 1)
        elif isinstance(envelope.event, StepsSummed):
            summed = envelope.event
            borders = summed.first_step, summed.last_step
            self._add_steps(attempt, envelope.attempt, summed, borders, summed.num_steps)

    def _add_steps(
        self,
        attempt: _RankAttempt,
        number: int,
        event: StepFinished | StepsSummed,
        borders: tuple[float, float],
        num_steps: float,
    ) -> None:
        """A step, or a window of steps from the first to the last of `borders`."""
        undone = self._share_undone(number, borders)
        if undone:
            attempt.add_seconds("steps done again", undone * event.step_s)
        stands = 1.0 - undone
        attempt.num_steps += round(stands * finite_or_zero(num_steps))
        parts_s, communication_s = attempt.parts_s, attempt.communication_s
        # Without a call for each: a large run has millions of these numbers.
        for phase, seconds in event.phases_s.items():
            if not 0.0 <= seconds <= MAX_SECONDS:
                seconds = clip_seconds(seconds)
            part = _PART_OF_PHASE.get(phase, "other phases")
            parts_s[part] = parts_s.get(part, 0.0) + stands * seconds
        for name, seconds in event.communication_s.items():
            if not 0.0 <= seconds <= MAX_SECONDS:
                seconds = clip_seconds(seconds)
            communication_s[name] = communication_s.get(name, 0.0) + stands * seconds

    def _share_undone(self, number: int, borders: tuple[float, float]) -> float:
        """The share (0 to 1) of some steps of an attempt that a later one did again."""
        later = [at for other, at in self._first_steps.items() if other > number]
        if not later:
            return 0.0
        first, last = borders
        num_undone = last - max(first, min(later)) + 1
        return min(max(num_undone / max(last - first + 1, 1), 0.0), 1.0)

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
        for attempt in attempts.values():
            _add_all(communication_s, attempt.communication_s)
        is_supervised = True
        sums: list[CommandSeconds] = []
        for words, command in self._list_commands(attempts):
            of_command = {number: attempts[number] for number in command}
            end = words.find_end(command)
            is_supervised = is_supervised and end is not None
            command_parts_s = _sum_parts(rank, of_command, words, end)
            _add_all(parts_s, command_parts_s)
            wall_s = _measure_wall_s(rank, of_command, words, end)
            sums.append(CommandSeconds(wall_s, sum(command_parts_s.values())))
        num_steps = sum(attempt.num_steps for attempt in attempts.values())
        wall_s = sum(each.wall_s for each in sums)
        return RankLedger(
            rank, wall_s, parts_s, communication_s, num_steps, is_supervised, tuple(sums)
        )

    def _list_commands(
        self, attempts: Mapping[int, _RankAttempt]
    ) -> Iterator[tuple[SupervisorWords, list[int]]]:
        """The attempts of a rank by command, and what was said in their stretch of the run."""
        numbers = sorted(attempts)
        for stretch, of_stretch in itertools.groupby(numbers, self._counter.find_stretch):
            words = self._words[stretch]
            for command in words.group_by_command(of_stretch):
                yield words, command


def _measure_wall_s(
    rank: int,
    attempts: Mapping[int, _RankAttempt],
    words: SupervisorWords,
    end: SupervisedEnd | None,
) -> float:
    """Seconds of a command in which its layout had the rank, by the supervisor; without its word,
    by the rank's first and last."""
    first, last = min(attempts), max(attempts)
    if end is None:
        wall_s = attempts[last].last_s - attempts[first].began_s
        return max(wall_s - words.measure_absence_s(rank, range(first, last), None), 0.0)
    numbers = range(words.find_first_of_command(first), words.find_last_of_command(last) + 1)
    absence_s = words.measure_absence_s(rank, (n for n in numbers if n not in attempts), end)
    return max(end.wall_s - absence_s, 0.0)


def _sum_parts(
    rank: int,
    attempts: Mapping[int, _RankAttempt],
    words: SupervisorWords,
    end: SupervisedEnd | None,
) -> dict[str, float]:
    """Seconds by part over the attempts of a command, of the restarts between them, and, if the
    supervisor said its end, before the first word of the rank and after its last."""
    parts_s = dict.fromkeys(LEDGER_PARTS, 0.0)
    for attempt in attempts.values():
        _add_all(parts_s, attempt.parts_s)
    for before, after in itertools.pairwise(attempts):
        gap_s = attempts[after].began_s - attempts[before].last_s
        absence_s = words.measure_absence_s(rank, range(before + 1, after), end)
        parts_s["restart"] += max(gap_s - absence_s, 0.0)
    first, last = min(attempts), max(attempts)
    if end is not None and end.is_on_clock(attempts[last].clock):
        later = range(last + 1, words.find_last_of_command(last) + 1)
        gap_s = end.at_s - attempts[last].last_s - words.measure_absence_s(rank, later, end)
        parts_s["failure" if end.has_failed else "ending"] += max(gap_s, 0.0)
    # Attempts before it in which this rank came to no word.
    wordless = range(words.find_first_of_command(first), first)
    if end is not None and wordless and end.is_on_clock(attempts[first].clock):
        gap_s = attempts[first].began_s - end.began_s
        parts_s["restart"] += max(gap_s - words.measure_absence_s(rank, wordless, end), 0.0)
    return parts_s


def _add_time_between_steps(attempt: _RankAttempt, event: TimeBetweenSteps, now_s: float) -> None:
    seconds = clip_seconds(event.seconds)
    attempt.add_seconds(_PART_OF_ACTIVITY.get(event.activity, "other phases"), seconds)
    if event.activity == "startup":
        attempt.has_start = True
        attempt.began_s = min(attempt.began_s, now_s - seconds)


def _add_all(sums: dict[str, float], more: Mapping[str, float]) -> None:
    for name, seconds in more.items():
        sums[name] = sums.get(name, 0.0) + seconds
