"""`StepTable`: the newest steps of all ranks side by side, as far as all of them have recorded
them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.files import open_regular_file, read_bounded_lines
from phalanx.observe.events import StepFinished
from phalanx.observe.tail import RANK_FILE_PATTERN, parse_valid_event_line
from phalanx.report.facts import TIME_GROUPS, get_time_group_of_phase

WARM_UP_STEPS = 3  # of an attempt: allocations, compilation, first reads
MAX_STEPS_PER_RANK = 2_000
# Rows of all ranks together: what a page may spend on them is about two seconds.
MAX_ROWS = 200_000
_BYTES_PER_STEP = 1_024  # of a line that is written today, with room


@dataclass(frozen=True)
class RankStep:
    """One step of one rank: `step_s` from record to record, `seconds` of it by time group
    (`phalanx.report.facts.TIME_GROUPS`), `cpu_s` of the process (0: nobody counted)."""

    step_s: float
    seconds: Mapping[str, float]
    cpu_s: float

    @property
    def waiting_s(self) -> float:
        """Seconds in collectives and for other stages: transfer and waiting for others."""
        return self.seconds.get("collective", 0.0) + self.seconds.get("pipeline", 0.0)

    @property
    def self_s(self) -> float:
        """Seconds of the rank's own: all but those in which it may wait for others."""
        return self.step_s - self.waiting_s


@dataclass(frozen=True)
class StepTable:
    """`steps` are those, ascending, that every rank of `attempt` has recorded after it warmed up.

    `rows[rank]` has one `RankStep` for each of `steps`.
    """

    attempt: int
    steps: tuple[int, ...]
    rows: Mapping[int, tuple[RankStep, ...]]
    newest: StepFinished
    """The last step that the first of these ranks recorded."""

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.rows)

    @property
    def num_steps(self) -> int:
        return len(self.steps)

    @property
    def total_s(self) -> float:
        """Seconds of all steps together: those of the rank with most, as ranks go in step."""
        return max((sum(row.step_s for row in rows) for rows in self.rows.values()), default=0.0)


def read_step_table(run_dir: Path) -> StepTable | None:
    """The newest steps of a run's last attempt; None where no rank has recorded any.

    Reads the ends of the files alone, so that a long run costs no more than a short one. Ranks
    whose file cannot be read are left out.
    """
    paths = _find_newest_files(run_dir / "events")
    if not paths:
        return None
    attempt = max(number for _, number in paths)
    of_attempt = {rank: path for (rank, number), path in paths.items() if number == attempt}
    num_steps = max(min(MAX_STEPS_PER_RANK, MAX_ROWS // len(of_attempt)), 1)
    events_of_rank: dict[int, dict[int, StepFinished]] = {}
    for rank in sorted(of_attempt):
        events = _read_last_steps(of_attempt[rank], num_steps)
        if events:
            events_of_rank[rank] = events
    if not events_of_rank:
        return None
    return _align_ranks(attempt, events_of_rank, _find_first_step(of_attempt[min(of_attempt)]))


def _find_newest_files(directory: Path) -> dict[tuple[int, int], Path]:
    """Event files by (rank, attempt)."""
    paths: dict[tuple[int, int], Path] = {}
    try:
        for path in directory.iterdir():
            match = RANK_FILE_PATTERN.fullmatch(path.name)
            if match is not None:
                paths[int(match[1]), int(match[2])] = path
    except OSError:
        return {}
    return paths


def _read_last_steps(path: Path, num_steps: int) -> dict[int, StepFinished]:
    """The events of the last `num_steps` steps or so, by step."""
    events: dict[int, StepFinished] = {}
    for event in _iterate_last_step_events(path, num_steps * _BYTES_PER_STEP):
        if math.isfinite(event.step_s) and event.step_s > 0:
            events[int(event.step)] = event
    newest = sorted(events)[-num_steps:]
    return {step: events[step] for step in newest}


def _iterate_last_step_events(path: Path, num_bytes: int) -> Iterator[StepFinished]:
    mark = b'"event":"step_finished"'
    try:
        with open_regular_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > num_bytes:
                file.seek(size - num_bytes)
                # The line that the cut went through.
                file.readline(num_bytes)
            lines = [line for line in read_bounded_lines(file) if mark in line]
    except OSError:
        return
    for line in lines:
        envelope = parse_valid_event_line(line)
        if envelope is not None and isinstance(envelope.event, StepFinished):
            yield envelope.event


def _find_first_step(path: Path) -> int:
    """The first step that an attempt recorded: from there it warms up."""
    try:
        with open_regular_file(path) as file:
            for line in read_bounded_lines(file):
                envelope = parse_valid_event_line(line)
                if envelope is not None and isinstance(envelope.event, StepFinished):
                    return int(envelope.event.step)
    except OSError:
        pass
    return 0


def _sum_phases_by_group(event: StepFinished) -> dict[str, float]:
    seconds = dict.fromkeys(TIME_GROUPS, 0.0)
    for phase, phase_s in event.phases_s.items():
        if math.isfinite(phase_s):
            seconds[get_time_group_of_phase(phase)] += phase_s
    if math.isfinite(event.unaccounted_s):
        seconds["unaccounted"] = event.unaccounted_s
    return seconds


def _align_ranks(
    attempt: int, events_of_rank: dict[int, dict[int, StepFinished]], first_step: int
) -> StepTable:
    common = set.intersection(*(set(events) for events in events_of_rank.values()))
    steps = tuple(sorted(step for step in common if step >= first_step + WARM_UP_STEPS))
    rows: dict[int, tuple[RankStep, ...]] = {}
    for rank, events in events_of_rank.items():
        rows[rank] = tuple(_make_row(events[step]) for step in steps)
    lead_events = events_of_rank[min(events_of_rank)]
    return StepTable(attempt, steps, rows, lead_events[max(lead_events)])


def _make_row(event: StepFinished) -> RankStep:
    return RankStep(event.step_s, _sum_phases_by_group(event), event.cpu_s)
