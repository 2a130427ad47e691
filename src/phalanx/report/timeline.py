"""A run's age at each event, without the pauses between its commands: by a clock that nobody
sets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from phalanx.observe.events import (
    Envelope,
    LayoutChanged,
    RestartScheduled,
    RolledBack,
    RunFinished,
    RunStarted,
    is_resume,
)
from phalanx.observe.order import AttemptCounter
from phalanx.report.formats import finite_or_zero


@dataclass
class _AttemptLifetime:
    """First and last sign of life of one attempt.

    Seconds of a steady clock, or of the wall where there is no other.
    """

    first_s: float = math.nan
    last_s: float = math.nan
    is_steady: bool = True

    def add_event(self, envelope: Envelope) -> None:
        at = envelope.monotonic_s
        if not math.isfinite(at):
            # One line of an earlier release between others.
            if self.is_steady and not math.isnan(self.first_s):
                return
            self.is_steady, at = False, envelope.time_unix_s
        elif not self.is_steady:
            return
        first_s = at
        if isinstance(envelope.event, RunStarted):
            # The event is written when ranks are ready; what they spent before is life, too.
            first_s -= finite_or_zero(envelope.event.startup_s)
        if math.isnan(self.first_s):
            self.first_s, self.last_s = first_s, at
        self.first_s = min(self.first_s, first_s)
        self.last_s = max(self.last_s, at)


@dataclass
class _TrainCommand:
    """One `phalanx train`: its attempts follow each other without a pause.

    `before_s`: the life of those before. `said_wall_s`: how long it took, as it said itself at
    `end_s` of its steady clock (NaN: it did not).
    """

    spans: dict[int, _AttemptLifetime]
    before_s: float
    said_wall_s: float = math.nan
    end_s: float = math.nan

    @property
    def first_s(self) -> float:
        """When it began: its first sign of life may come when it has started for a while."""
        first = next(iter(self.spans.values()))
        began_s = self.end_s - self.said_wall_s
        if first.is_steady and math.isfinite(began_s):
            return min(first.first_s, began_s)
        return first.first_s

    @property
    def lifetime_s(self) -> float:
        """Without a steady clock, what the command itself said of its duration, which it
        measured with one."""
        first, last = next(iter(self.spans.values())), list(self.spans.values())[-1]
        if not (first.is_steady and last.is_steady) and math.isfinite(self.said_wall_s):
            return self.said_wall_s
        return max(last.last_s - self.first_s, 0.0)


@dataclass
class RunTimeline:
    """The life of a run: that of its commands, without the pauses between them."""

    alive_s: float = 0.0
    num_commands: int = 0
    num_cut_off: int = 0
    """Commands that ended without a word before a person resumed the run."""
    _by_attempt: dict[int, _TrainCommand] = field(default_factory=dict)

    def elapsed_s(self, envelope: Envelope) -> float:
        """Seconds of the run's life before something was said."""
        command = self._by_attempt.get(envelope.attempt)
        if command is None:
            return 0.0
        is_steady = command.spans[envelope.attempt].is_steady and math.isfinite(
            envelope.monotonic_s
        )
        at = envelope.time_unix_s
        if is_steady:
            at = envelope.monotonic_s
        if not math.isfinite(at):
            return command.before_s
        # Within the command's life: another machine's clock may show anything.
        return command.before_s + min(max(at - command.first_s, 0.0), command.lifetime_s)


class TimelineBuilder:
    """Hears the events of the supervisor and of the lead rank, each file in its order."""

    def __init__(self) -> None:
        self._spans: dict[int, _AttemptLifetime] = {}
        self._restarted: set[int] = set()
        self._resumed: set[int] = set()
        # By attempt: what its command said of its duration, and when.
        self._said_wall_s: dict[int, tuple[float, float]] = {}
        self._attempts = AttemptCounter()

    def add_event(self, envelope: Envelope) -> None:
        """Steps, too: the last of them may be the last sign of life."""
        attempt = self._attempts.attempt_of_event(envelope)
        self._spans.setdefault(attempt, _AttemptLifetime()).add_event(envelope)
        if isinstance(envelope.event, RestartScheduled | LayoutChanged | RolledBack):
            self._restarted.add(attempt)
        elif is_resume(envelope.event):
            self._resumed.add(attempt)
        elif isinstance(envelope.event, RunFinished):
            self._said_wall_s[attempt] = envelope.event.wall_s, envelope.monotonic_s

    def build_measured_timeline(self) -> RunTimeline:
        timeline = RunTimeline()
        groups = self._group_attempts_by_command()
        for before, after in itertools.pairwise(groups):
            is_silent = self._said_wall_s.keys().isdisjoint(before)
            timeline.num_cut_off += is_silent and after[0] in self._resumed
        for attempts in groups:
            spans = {attempt: self._spans[attempt] for attempt in attempts}
            said_wall_s, end_s = self._said_wall_s.get(attempts[-1], (math.nan, math.nan))
            command = _TrainCommand(spans, timeline.alive_s, said_wall_s, end_s)
            timeline.alive_s += command.lifetime_s
            timeline.num_commands += 1
            timeline._by_attempt |= dict.fromkeys(attempts, command)
        return timeline

    def _group_attempts_by_command(self) -> Sequence[list[int]]:
        """Attempts that one supervisor started, one after the other."""
        commands: list[list[int]] = []
        for attempt in sorted(self._spans):
            # The attempt before ended in a restart, so the same supervisor goes on.
            if commands and commands[-1][-1] in self._restarted:
                commands[-1].append(attempt)
            else:
                commands.append([attempt])
        return commands
