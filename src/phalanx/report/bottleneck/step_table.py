"""`StepTable`: the newest steps of all ranks side by side, as far as all of them have recorded
them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from phalanx.observe.events import StepFinished, StepsSummed
from phalanx.observe.tail import RANK_FILE_PATTERN
from phalanx.observe.time_groups import TIME_GROUPS, get_time_group_of_phase
from phalanx.report.bottleneck.rank_tail import (
    MAX_LEAD_BYTES,
    RankTail,
    choose_tail_bytes,
    count_steps_per_rank,
    read_rank_tail,
)
from phalanx.report.event_log import find_first_step

WARM_UP_STEPS = 3  # of an attempt: allocations, compilation, first reads
MIN_ROWS = 10
"""So many steps, or windows of steps, after the first ones a verdict needs."""
_MIN_SHARE_WITHOUT_GAPS = 0.8


@dataclass(frozen=True)
class RankStep:
    """One step of one rank: `step_s` from record to record, `seconds` of it by time group
    (`phalanx.observe.time_groups.TIME_GROUPS`), `cpu_s` of the process (0: nobody counted),
    `communication_s` by "axis: operation" (empty: of an earlier release)."""

    step_s: float
    seconds: Mapping[str, float]
    cpu_s: float
    communication_s: Mapping[str, float] = field(default_factory=dict)

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

    `rows[rank]` has one `RankStep` for each of `steps`, which stands for `steps_per_row` steps: the
    mean of those in a window, where ranks sum them up.
    """

    attempt: int
    steps: tuple[int, ...]
    rows: Mapping[int, tuple[RankStep, ...]]
    newest: StepFinished
    """The last step that the first of these ranks recorded."""
    num_covered: int
    """Steps that the rows are of: more than rows where these are means of windows."""
    is_of_last_attempt: bool = True
    """False where later attempts have too few steps, or none."""

    @property
    def steps_per_row(self) -> float:
        """1, or the steps of a window in the mean."""
        return self.num_covered / max(self.num_steps, 1)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.rows)

    @property
    def num_steps(self) -> int:
        return len(self.steps)

    # Once for each table: the study of a run of a thousand ranks asks for it thousands of times.
    @cached_property
    def total_s(self) -> float:
        """Seconds of all rows together: those of the rank with most, as ranks go in step."""
        return max((sum(row.step_s for row in rows) for rows in self.rows.values()), default=0.0)


def read_step_table(run_dir: Path, tails: Mapping[int, RankTail] | None = None) -> StepTable | None:
    """The newest steps of a run's newest attempt with MIN_ROWS of them; of the newest with any
    where none has so many, and None where no rank has recorded a step.

    Reads the ends of the files alone, so that a long run costs no more than a short one. Ranks
    whose file cannot be read are left out. Where ranks wrote sums of steps, a row is the mean of
    such a window. `tails`: those of the last attempt by rank, where they were read already.
    """
    paths = _find_event_files(run_dir / "events")
    short: StepTable | None = None
    for attempt in sorted(paths, reverse=True):
        is_last = attempt == max(paths)
        table = _read_steps_of_attempt(attempt, paths[attempt], tails if is_last else None)
        if table is None:
            continue
        table = replace(table, is_of_last_attempt=is_last)
        if table.num_steps >= MIN_ROWS:
            return table
        short = short or table
    return short


def name_attempt_of_steps(attempt: int, is_last: bool) -> str:
    """ "the last attempt", or which one where that has too few steps."""
    if is_last:
        return "the last attempt"
    return f"attempt {attempt:,} (the last one has too few)"


def _read_steps_of_attempt(
    attempt: int, paths: Mapping[int, Path], tails: Mapping[int, RankTail] | None
) -> StepTable | None:
    tails = _read_tails(attempt, paths, tails)
    if not tails:
        return None
    has_windows = any(tail.windows for tail in tails.values())
    windows = align_windows(attempt, tails) if has_windows else None
    if windows is not None and windows.num_steps >= MIN_ROWS:
        return windows
    first_step = find_first_step(paths[min(paths)]) or 0
    steps = _align_steps(attempt, tails, first_step, count_steps_per_rank(len(paths)))
    if windows is None or (steps is not None and steps.num_steps > windows.num_steps):
        return steps
    return windows


def _read_tails(
    attempt: int, paths: Mapping[int, Path], known: Mapping[int, RankTail] | None
) -> dict[int, RankTail]:
    """The tails that have steps, by rank, of the files `paths` of `attempt`; those that are `known`
    are not read again where they are of all these ranks."""
    tail_bytes = choose_tail_bytes([(rank, attempt, path) for rank, path in paths.items()])
    if known is None or known.keys() != paths.keys():
        known = {rank: read_rank_tail(path, tail_bytes[path]) for rank, path in paths.items()}
    tails = {rank: tail for rank, tail in sorted(known.items()) if tail.steps or tail.windows}
    if any(tail.windows for tail in tails.values()):
        lead = min(tails)
        if tail_bytes[paths[lead]] < MAX_LEAD_BYTES:
            # Rank 0 wrote each step of the windows.
            tails[lead] = read_rank_tail(paths[lead], MAX_LEAD_BYTES)
    return tails


def _find_event_files(directory: Path) -> dict[int, dict[int, Path]]:
    """By attempt the event files of its ranks, by rank."""
    paths: dict[int, dict[int, Path]] = {}
    try:
        for path in directory.iterdir():
            match = RANK_FILE_PATTERN.fullmatch(path.name)
            if match is not None:
                paths.setdefault(int(match[2]), {})[int(match[1])] = path
    except OSError:
        return {}
    return paths


def _align_steps(
    attempt: int, tails: Mapping[int, RankTail], first_step: int, num_steps: int
) -> StepTable | None:
    common = set.intersection(*(set(tail.steps) for tail in tails.values()))
    warm = sorted(step for step in common if step >= first_step + WARM_UP_STEPS)
    steps = tuple(_leave_out_odd_steps(warm)[-num_steps:])
    rows: dict[int, tuple[RankStep, ...]] = {}
    for rank, tail in tails.items():
        rows[rank] = tuple(make_row([tail.steps[step]]) for step in steps)
    newest = _find_newest_step(tails)
    if newest is None:
        return None
    return StepTable(attempt, steps, rows, newest, len(steps))


def _leave_out_odd_steps(steps: list[int]) -> list[int]:
    """The steps; where many between them are missing, the longest stretch without a gap: of steps
    that are summed up only those that took long are written by themselves."""
    if not steps or len(steps) >= _MIN_SHARE_WITHOUT_GAPS * (steps[-1] - steps[0] + 1):
        return steps
    stretches: list[list[int]] = []
    for step in steps:
        if stretches and stretches[-1][-1] == step - 1:
            stretches[-1].append(step)
        else:
            stretches.append([step])
    return max(stretches, key=len)


def _find_newest_step(tails: Mapping[int, RankTail]) -> StepFinished | None:
    for rank in sorted(tails):
        if tails[rank].steps:
            return tails[rank].steps[max(tails[rank].steps)]
    return None


def make_row(events: Sequence[StepFinished | StepsSummed]) -> RankStep:
    """The mean step of some steps and sums of steps."""
    count = sum(_count_steps(event) for event in events)
    groups_s = dict.fromkeys(TIME_GROUPS, 0.0)
    communication_s: dict[str, float] = {}
    for event in events:
        for phase, phase_s in event.phases_s.items():
            if math.isfinite(phase_s):
                groups_s[get_time_group_of_phase(phase)] += phase_s / count
        if math.isfinite(event.unaccounted_s):
            groups_s["unaccounted"] += event.unaccounted_s / count
        for name, seconds in event.communication_s.items():
            communication_s[name] = communication_s.get(name, 0.0) + seconds / count
    return RankStep(
        sum(event.step_s for event in events) / count,
        groups_s,
        sum(event.cpu_s for event in events) / count,
        communication_s,
    )


def _count_steps(event: StepFinished | StepsSummed) -> int:
    return int(event.num_steps) if isinstance(event, StepsSummed) else 1


def align_windows(attempt: int, tails: Mapping[int, RankTail]) -> StepTable | None:
    """The windows that all ranks have, each as one row; None where there is no such window.

    A rank that wrote each of its steps has the mean of those in the window.
    """
    summed = [set(tail.windows) for tail in tails.values() if tail.windows]
    windows = sorted(set.intersection(*summed))
    covered = [window for window in windows if all(tail.covers(window) for tail in tails.values())]
    newest = _find_newest_step(tails)
    if not covered or newest is None:
        return None
    rows = {
        rank: tuple(make_row(tail.list_events_within(window)) for window in covered)
        for rank, tail in tails.items()
    }
    last_steps = tuple(last for _, last in covered)
    num_covered = sum(last - first + 1 for first, last in covered)
    return StepTable(attempt, last_steps, rows, newest, num_covered)
