"""The event files of a run as they are read: columns of numbers for the steps, the other events as
they are."""

from __future__ import annotations

import itertools
import math
import os
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.core.files import open_regular_file, read_bounded_lines
from phalanx.observe import events
from phalanx.observe.events import Envelope, MonotonicClockReading, StepFinished, StepsSummed
from phalanx.observe.order import sort_events
from phalanx.observe.tail import RANK_FILE_PATTERN, SUPERVISOR_FILE_NAME, parse_valid_event_line
from phalanx.observe.time_groups import TIME_GROUPS, get_time_group_of_phase
from phalanx.report.block_norm_facts import BlockNormLog
from phalanx.report.bottleneck.rank_tail import RankTail, choose_tail_bytes
from phalanx.report.caller_facts import CallerLog
from phalanx.report.drift import DriftLog
from phalanx.report.expert_facts import ExpertLog
from phalanx.report.facts import StepColumns
from phalanx.report.invariant_facts import InvariantLog
from phalanx.report.ledger import LedgerBuilder
from phalanx.report.timeline import TimelineBuilder

NAN = math.nan
# For ledgers of samples and seconds, for verdicts, and for whoever watches.
_NOT_FOR_THE_STORY = (
    events.SamplesRead,
    events.TimeBetweenSteps,
    events.GpuMeasured,
    events.OperatorsCounted,
    events.WorkProgressed,
)
SUPERVISOR_RANK = -1


@dataclass
class RankStepTimes:
    """Sums of one rank's step times."""

    # Eight bytes a step, where a list of floats has several times that.
    step_s: array[float] = field(default_factory=lambda: array("d"))
    # How many steps each of them is the mean of.
    counts: array[int] = field(default_factory=lambda: array("q"))
    groups_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIME_GROUPS, 0.0))

    @property
    def num_steps(self) -> int:
        return sum(self.counts)

    def add_steps(self, seconds: float, count: int, groups_s: Mapping[str, float]) -> None:
        """Add `count` steps of `seconds` together, with their seconds by time group."""
        if math.isfinite(seconds) and count > 0:
            self.step_s.append(seconds / count)
            self.counts.append(count)
        for name, group_s in groups_s.items():
            self.groups_s[name] += group_s


@dataclass
class EventLog:
    """The event files as read, steps apart from the rest."""

    lead_rank: int
    lead_steps: dict[int, StepColumns] = field(default_factory=dict)  # by attempt
    clocks: dict[int, RankStepTimes] = field(default_factory=dict)
    memory: dict[int, events.MemoryMeasured] = field(default_factory=dict)
    experts: ExpertLog = field(default_factory=ExpertLog)
    block_norms: BlockNormLog = field(default_factory=BlockNormLog)
    callers: CallerLog = field(default_factory=CallerLog)
    invariants: InvariantLog = field(default_factory=InvariantLog)
    rest: list[Envelope] = field(default_factory=list)
    num_events: int = 0
    num_unreadable: int = 0
    # Of these, the ones that have an end, or begin like no event: the last line of a process that
    # was killed does neither.
    num_damaged: int = 0
    # By the name of a file that cannot be read: why.
    unreadable_files: dict[str, str] = field(default_factory=dict)
    drift: DriftLog = field(default_factory=DriftLog)
    times: TimelineBuilder = field(default_factory=TimelineBuilder)
    ledger: LedgerBuilder = field(default_factory=lambda: LedgerBuilder({}))
    tails: dict[int, RankTail] = field(default_factory=dict)
    """By rank the newest steps of the newest attempt; empty unless they were asked for."""
    # By (attempt, rank) the last step on record, by itself or in a sum.
    last_steps: dict[tuple[int, int], int] = field(default_factory=dict)
    # First and last event of each (attempt, rank).
    by_stream: dict[tuple[int, int], list[Envelope]] = field(default_factory=dict)

    def add_event(self, envelope: Envelope) -> None:
        event = envelope.event
        self.num_events += 1
        self.ledger.add_event(envelope)
        self.drift.add_event(envelope)
        if envelope.rank in (SUPERVISOR_RANK, self.lead_rank):
            self.times.add_event(envelope)
        # The first stays, the newest takes the place of the one before: two for each stream,
        # however long a run is.
        stream = envelope.attempt, envelope.rank
        ends = self.by_stream.get(stream)
        if ends is None:
            self.by_stream[stream] = [envelope, envelope]
        else:
            ends[1] = envelope
        if isinstance(event, StepFinished):
            self.last_steps[stream] = int(event.step)
            groups_s = _sum_phases_by_group(event)
            self._times_of(envelope.rank).add_steps(event.step_s, 1, groups_s)
            if envelope.rank == self.lead_rank:
                _append_step_row(
                    self.lead_steps.setdefault(envelope.attempt, StepColumns()), event, groups_s
                )
        elif isinstance(event, StepsSummed):
            self.last_steps[stream] = int(event.last_step)
            self._times_of(envelope.rank).add_steps(
                event.step_s, int(event.num_steps), _sum_phases_by_group(event)
            )
        elif isinstance(event, events.MemoryMeasured):
            self.memory[envelope.rank] = event
        elif isinstance(event, events.ExpertsLoaded):
            self.experts.add_event(envelope)
        elif isinstance(event, events.BlockNormsMeasured):
            self.block_norms.add_event(envelope.attempt, event)
        elif isinstance(event, events.CollectivesCounted):
            self.callers.add_event(envelope.rank, event)
        elif isinstance(event, events.InvariantChecked):
            self.invariants.add_event(envelope)
            # When one failed belongs to the story; what held is told in its own section.
            if not event.is_summary:
                self.rest.append(envelope)
        elif not isinstance(event, _NOT_FOR_THE_STORY):
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

    def _times_of(self, rank: int) -> RankStepTimes:
        times = self.clocks.get(rank)
        if times is None:
            times = self.clocks[rank] = RankStepTimes()
        return times


def read_event_log(run_dir: Path) -> EventLog:
    """All that the event files of a run hold now."""
    reader = EventLogReader(run_dir, keeps_tails=True)
    reader.read_new_events(with_torn_lines=True)
    return reader.log


class EventLogReader:
    """Reads the event files of a run into `log`, again and again while they grow: each byte
    once."""

    def __init__(self, run_dir: Path, *, keeps_tails: bool = False) -> None:
        self._directory, self._keeps_tails = run_dir / "events", keeps_tails
        self.log = EventLog(lead_rank=0)
        self._first_steps: dict[int, int] = {}
        # By the path of each file: bytes that were read, and its clock.
        self._offsets: dict[Path, int] = {}
        self._clocks: dict[Path, MonotonicClockReading | None] = {}

    def read_new_events(self, *, with_torn_lines: bool = False) -> None:
        """Add what was written since the last call.

        A last line without its end waits for it, or is read as it is `with_torn_lines`.
        """
        files = _list_event_files(self._directory)
        lead_rank = min((rank for rank, _, _ in files if rank != SUPERVISOR_RANK), default=0)
        first_steps = _find_first_steps(files, lead_rank)
        if (lead_rank, first_steps) != (self.log.lead_rank, self._first_steps):
            # Whose steps are kept, and which of them another attempt did again, depends on it.
            self.log, self._first_steps = EventLog(lead_rank), first_steps
            self.log.ledger = LedgerBuilder(first_steps)
            self._offsets, self._clocks = {}, {}
        tail_bytes = choose_tail_bytes(files) if self._keeps_tails else {}
        for rank, _, path in files:
            tail, num_left = None, math.inf
            if path in tail_bytes:
                tail = self.log.tails.setdefault(rank, RankTail())
                num_left = _find_size(path)
            for line in self._read_new_lines(path, with_torn_lines):
                num_left -= len(line)
                # A file is one process's (the supervisor's: of one after another), and names its
                # own clock.
                envelope = parse_valid_event_line(line, self._clocks.get(path))
                if envelope is None:
                    self.log.num_unreadable += 1
                    # What a process that was killed leaves is the beginning of an event.
                    self.log.num_damaged += line.endswith(b"\n") or not line.startswith(b"{")
                else:
                    self._clocks[path] = envelope.clock
                    self.log.add_event(envelope)
                    if tail is not None and num_left < tail_bytes[path]:
                        tail.add_event(envelope.event)

    def _read_new_lines(self, path: Path, with_torn_line: bool) -> Iterator[bytes]:
        offset = self._offsets.get(path, 0)
        try:
            with open_regular_file(path) as file:
                if os.fstat(file.fileno()).st_size > offset:
                    file.seek(offset)
                    for line in read_bounded_lines(file):
                        if not with_torn_line and not line.endswith(b"\n"):
                            continue
                        # Before the line is given out: should the disk refuse the next one, the
                        # next call must not count this one again.
                        self._offsets[path] = file.tell()
                        if line.strip():
                            yield line
            # Nothing of it is missing any more, should an earlier read have failed.
            self.log.unreadable_files.pop(path.name, None)
        except FileNotFoundError:
            # It was removed a moment ago.
            return
        except OSError as error:
            self.log.unreadable_files[path.name] = error.strerror or str(error)
            return


def _find_first_steps(files: list[tuple[int, int, Path]], rank: int) -> dict[int, int]:
    """By attempt the first step that `rank` recorded; attempts without a step are left out."""
    first_steps = {}
    for of_rank, attempt, path in files:
        if of_rank == rank:
            step = find_first_step(path)
            if step is not None:
                first_steps[attempt] = step
    return first_steps


def find_first_step(path: Path) -> int | None:
    """The first step in an event file; None where there is none."""
    for line in _read_lines(path):
        envelope = parse_valid_event_line(line)
        if envelope is not None and isinstance(envelope.event, StepFinished):
            return int(envelope.event.step)
    return None


def _find_size(path: Path) -> int:
    """The bytes of a file; 0 where it cannot be asked, as one that cannot be read has no lines."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


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


def _sum_phases_by_group(event: StepFinished | StepsSummed) -> dict[str, float]:
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
