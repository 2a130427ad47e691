"""The event files of a run as they are read: columns of numbers for the steps, the other events as
they are."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.core.files import open_regular_file, read_bounded_lines
from phalanx.observe import events
from phalanx.observe.events import Envelope, StepFinished
from phalanx.observe.order import sort_events
from phalanx.observe.tail import RANK_FILE_PATTERN, SUPERVISOR_FILE_NAME, parse_valid_event_line
from phalanx.report.expert_facts import ExpertLog
from phalanx.report.facts import TIME_GROUPS, StepColumns, get_time_group_of_phase
from phalanx.report.invariant_facts import InvariantLog
from phalanx.report.timeline import TimelineBuilder

NAN = math.nan
SUPERVISOR_RANK = -1


@dataclass
class RankStepTimes:
    """Sums of one rank's step times."""

    # Eight bytes a step, where a list of floats has several times that.
    step_s: array[float] = field(default_factory=lambda: array("d"))
    groups_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIME_GROUPS, 0.0))


@dataclass
class EventLog:
    """The event files as read, steps apart from the rest."""

    lead_rank: int
    lead_steps: dict[int, StepColumns] = field(default_factory=dict)  # by attempt
    clocks: dict[int, RankStepTimes] = field(default_factory=dict)
    memory: dict[int, events.MemoryMeasured] = field(default_factory=dict)
    experts: ExpertLog = field(default_factory=ExpertLog)
    invariants: InvariantLog = field(default_factory=InvariantLog)
    rest: list[Envelope] = field(default_factory=list)
    num_events: int = 0
    num_unreadable: int = 0
    times: TimelineBuilder = field(default_factory=TimelineBuilder)
    # First and last event of each (attempt, rank).
    by_stream: dict[tuple[int, int], list[Envelope]] = field(default_factory=dict)

    def add_event(self, envelope: Envelope) -> None:
        event = envelope.event
        self.num_events += 1
        if envelope.rank in (SUPERVISOR_RANK, self.lead_rank):
            self.times.add_event(envelope)
        # The first stays, the newest takes the place of the one before: two for each stream,
        # however long a run is.
        self.by_stream.setdefault((envelope.attempt, envelope.rank), [envelope])[1:] = [envelope]
        if isinstance(event, StepFinished):
            groups_s = _sum_phases_by_group(event)
            self._add_step_time(envelope.rank, event, groups_s)
            if envelope.rank == self.lead_rank:
                _append_step_row(
                    self.lead_steps.setdefault(envelope.attempt, StepColumns()), event, groups_s
                )
        elif isinstance(event, events.MemoryMeasured):
            self.memory[envelope.rank] = event
        elif isinstance(event, events.ExpertsLoaded):
            self.experts.add_event(envelope)
        elif isinstance(event, events.InvariantChecked):
            self.invariants.add_event(envelope)
            # When one failed belongs to the story; what held is told in its own section.
            if not event.is_summary:
                self.rest.append(envelope)
        # One per step and rank: for the ledger of what was read, not for the page.
        elif not isinstance(event, events.SamplesRead):
            self.rest.append(envelope)

    @property
    def first_unix_s(self) -> float:
        """Wall-clock time (Unix seconds) of the first event; NaN without events."""
        ends = self._list_first_and_last_events()
        if not ends:
            return NAN
        return ends[0].time_unix_s

    @property
    def last_unix_s(self) -> float:
        ends = self._list_first_and_last_events()
        if not ends:
            return NAN
        return ends[-1].time_unix_s

    def _list_first_and_last_events(self) -> list[Envelope]:
        """The first and last events of all streams in order.

        Not by time alone: a wall clock may have been set back between two attempts.
        """
        return sort_events(itertools.chain.from_iterable(self.by_stream.values()))

    def _add_step_time(self, rank: int, event: StepFinished, groups_s: dict[str, float]) -> None:
        clock = self.clocks.setdefault(rank, RankStepTimes())
        if math.isfinite(event.step_s):
            clock.step_s.append(event.step_s)
        for name, seconds in groups_s.items():
            clock.groups_s[name] += seconds


def read_event_log(run_dir: Path) -> EventLog:
    files = _list_event_files(run_dir / "events")
    log = EventLog(
        lead_rank=min((rank for rank, _, _ in files if rank != SUPERVISOR_RANK), default=0)
    )
    for _, _, path in files:
        # A file is one process's (the supervisor's: of one after another), and names its own clock.
        clock = None
        for line in _read_lines(path):
            envelope = parse_valid_event_line(line, clock)
            if envelope is None:
                log.num_unreadable += 1
            else:
                clock = envelope.clock
                log.add_event(envelope)
    return log


def _list_event_files(directory: Path) -> list[tuple[int, int, Path]]:
    """(rank, attempt, path), the supervisor first, then ranks and attempts in order."""
    event_files = []
    try:
        for path in directory.iterdir():
            match = RANK_FILE_PATTERN.fullmatch(path.name)
            if match:
                event_files.append((int(match[1]), int(match[2]), path))
            elif path.name == SUPERVISOR_FILE_NAME:
                event_files.append((SUPERVISOR_RANK, 0, path))
    except OSError:
        return []
    return sorted(event_files)


def _read_lines(path: Path) -> Iterator[bytes]:
    try:
        with open_regular_file(path) as file:
            for line in read_bounded_lines(file):
                if line.strip():
                    yield line
    except OSError:
        return


def _sum_phases_by_group(event: StepFinished) -> dict[str, float]:
    groups_s: dict[str, float] = {}
    for phase, seconds in event.phases_s.items():
        name = get_time_group_of_phase(phase)
        groups_s[name] = groups_s.get(name, 0.0) + seconds
    if math.isfinite(event.unaccounted_s):
        # Set, not added: `group_of` gives no phase this name.
        groups_s["unaccounted"] = event.unaccounted_s
    return groups_s


def _append_step_row(steps: StepColumns, event: StepFinished, groups_s: dict[str, float]) -> None:
    steps.step.append(int(event.step))
    steps.loss.append(event.loss)
    steps.learning_rate.append(event.learning_rate)
    steps.grad_norm.append(event.grad_norm)
    steps.step_s.append(event.step_s)
    steps.tokens_per_s.append(event.tokens_per_s)
    steps.rss_bytes.append(event.rss_bytes)
    steps.sent_bytes.append(event.sent_bytes)
    for axis, sent_bytes in event.sent_by_axis.items():
        steps.sent_by_axis[axis].append(sent_bytes)
    for name, column in steps.groups_s.items():
        column.append(groups_s.get(name, 0.0))
