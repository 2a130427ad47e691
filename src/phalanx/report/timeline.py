"""A run's age at each event, without the pauses between its commands: by a clock that nobody
sets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from phalanx.observe.events import Envelope, RunFinished, RunStarted, is_resume
from phalanx.report.formats import finite_or_zero
from phalanx.report.supervised_commands import StretchCounter, announces_another_attempt

_Place = tuple[int, int]  # stretch of the run, attempt


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

    def join(self, other: _AttemptLifetime | None) -> _AttemptLifetime:
        """The lifetime of both; where one alone is by a steady clock, that one."""
        if other is None or (self.is_steady and not other.is_steady):
            return self
        if other.is_steady and not self.is_steady:
            return other
        first_s, last_s = min(self.first_s, other.first_s), max(self.last_s, other.last_s)
        return _AttemptLifetime(first_s, last_s, self.is_steady)


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
        self._counter = StretchCounter()
        self._spans_of_supervisor: dict[_Place, _AttemptLifetime] = {}
        self._spans_of_lead: dict[int, _AttemptLifetime] = {}
        self._restarted: set[_Place] = set()
        self._resumed: set[_Place] = set()
        # What its command said of its duration, and when; the lead rank says it where no
        # supervisor is.
        self._said_wall_s: dict[_Place, tuple[float, float]] = {}
        self._said_by_lead: dict[int, tuple[float, float]] = {}

    def add_event(self, envelope: Envelope) -> None:
        """Steps, too: the last of them may be the last sign of life."""
        if envelope.rank >= 0:
            # Its place is known once all resumes are.
            self._spans_of_lead.setdefault(envelope.attempt, _AttemptLifetime()).add_event(envelope)
            if isinstance(envelope.event, RunFinished):
                said = envelope.event.wall_s, envelope.monotonic_s
                self._said_by_lead[envelope.attempt] = said
            return
        place = self._counter.locate_event(envelope)
        self._spans_of_supervisor.setdefault(place, _AttemptLifetime()).add_event(envelope)
        if announces_another_attempt(envelope):
            self._restarted.add(place)
        elif is_resume(envelope.event):
            self._resumed.add(place)
        elif isinstance(envelope.event, RunFinished):
            self._said_wall_s[place] = envelope.event.wall_s, envelope.monotonic_s

    def build_measured_timeline(self) -> RunTimeline:
        timeline = RunTimeline()
        spans_of_run = dict(self._spans_of_supervisor)
        for attempt, span in self._spans_of_lead.items():
            place = self._counter.find_stretch(attempt), attempt
            spans_of_run[place] = span.join(spans_of_run.get(place))
        for attempt, said in self._said_by_lead.items():
            place = self._counter.find_stretch(attempt), attempt
            self._said_wall_s.setdefault(place, said)
        groups = self._group_places_by_command(spans_of_run)
        for before, after in itertools.pairwise(groups):
            is_silent = self._said_wall_s.keys().isdisjoint(before)
            timeline.num_cut_off += is_silent and after[0] in self._resumed
        for places in groups:
            spans = {place[1]: spans_of_run[place] for place in places}
            said_wall_s, end_s = self._said_wall_s.get(places[-1], (math.nan, math.nan))
            command = _TrainCommand(spans, timeline.alive_s, said_wall_s, end_s)
            timeline.alive_s += command.lifetime_s
            timeline.num_commands += 1
            timeline._by_attempt |= dict.fromkeys(spans, command)
        return timeline

    def _group_places_by_command(self, places: Iterable[_Place]) -> Sequence[list[_Place]]:
        """Attempts that one supervisor started, one after the other."""
        commands: list[list[_Place]] = []
        for place in sorted(places):
            last = commands[-1][-1] if commands else None
            # The attempt before ended in a restart, so the same supervisor goes on.
            if last is not None and last[0] == place[0] and last in self._restarted:
                commands[-1].append(place)
            else:
                commands.append([place])
        return commands
