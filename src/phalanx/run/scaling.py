"""Trains a job on 1, 2, 4 ... ranks for a few steps, and says how well it scales and what ate the
rest.

Torch-free: ranks are started and supervised as `phalanx train` does it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from phalanx.core.cores import count_allowed_cores
from phalanx.core.errors import ExitCode, PhalanxError, UsageError
from phalanx.core.units import plural
from phalanx.job.copies import apply_job_keys, make_short_copy
from phalanx.job.schema import Job
from phalanx.observe.events import StepFinished
from phalanx.observe.tail import read_recorded_events
from phalanx.observe.units import TEXT_METRIC_UNITS, MetricUnits, choose_metric_units_of_job
from phalanx.report.bottleneck.step_table import StepTable, read_step_table
from phalanx.run.plan_job import plan_job
from phalanx.run.scratch import open_scratch_directory
from phalanx.run.train_job import train_job

GOOD_EFFICIENCY = 0.80
"""Of linear scaling: below it guides of the field say to look for what is lost."""
MAX_CREDIBLE_EFFICIENCY = 1.2
"""Of linear scaling: beyond it the smallest run was slow for a reason of its own."""
_TERMS = {
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "pipeline": "pipeline",
    "checkpoint": "checkpoint",
    "other": "prepare and record",
    "unaccounted": "unaccounted",
}
"""Time groups of a step, and what they are called here."""
BETWEEN_RANKS = "ranks apart"
"""What the slowest rank's step has more than the mean of all ranks."""


@dataclass(frozen=True)
class ScalingRun:
    """The seconds of one run on `num_ranks` ranks: `terms_s` are seconds of a step by term in the
    mean over ranks ("backward", "dp: all_reduce gradients"), which sum to `step_s`."""

    num_ranks: int
    step_s: float
    tokens_per_s: float
    terms_s: Mapping[str, float]


@dataclass(frozen=True)
class ScalingPoint:
    """A number of ranks beside the smallest that ran: of the repeats the one with the median step.

    `efficiency`: tokens/s over those of linear scaling (1 is linear). `lost`: by term the share of
    a step that it takes beyond linear scaling; negative where it takes less.
    """

    num_ranks: int
    layout: str
    global_batch_size: int
    step_s: float
    tokens_per_s: float
    efficiency: float
    lost: Mapping[str, float] = field(default_factory=dict)
    why_not: str = ""

    @property
    def is_good(self) -> bool:
        return self.efficiency >= GOOD_EFFICIENCY and self.is_credible

    @property
    def is_credible(self) -> bool:
        """False where it is so far above linear that the smallest run cannot be its measure."""
        return self.efficiency <= MAX_CREDIBLE_EFFICIENCY

    def to_json(self) -> dict[str, Any]:
        if self.why_not:
            return {"num_ranks": self.num_ranks, "why_not": self.why_not}
        return {
            "num_ranks": self.num_ranks,
            "layout": self.layout,
            "global_batch_size": self.global_batch_size,
            "step_s": self.step_s,
            "tokens_per_s": self.tokens_per_s,
            "efficiency": self.efficiency,
            "is_good": self.is_good,
            "is_credible": self.is_credible,
            "lost": {name: round(share, 4) for name, share in self.lost.items()},
            "why_not": None,
        }


@dataclass(frozen=True)
class ScalingRequest:
    """The runs to make: the job on each of `ranks`, `num_steps` steps, `repeats` times in turn.

    `is_strong`: the batch of a step stays; else each rank keeps its share (weak scaling).
    """

    job: Job
    ranks: Sequence[int]
    num_steps: int
    repeats: int
    is_strong: bool

    @property
    def num_runs(self) -> int:
        return len(self.ranks) * self.repeats


@dataclass(frozen=True)
class ScalingResult:
    """The points, ascending by ranks; `remarks` on what they cannot show. `stop_code`: the exit
    code of a stop, before which the runs of the points were done. `units`: what their speeds, by
    name `tokens_per_s`, are of."""

    points: tuple[ScalingPoint, ...]
    remarks: tuple[str, ...]
    is_strong: bool
    stop_code: int | None = None
    units: MetricUnits = TEXT_METRIC_UNITS

    @property
    def base_ranks(self) -> int:
        """The number of ranks that the others are beside; 0 where none ran."""
        return next((point.num_ranks for point in self.points if not point.why_not), 0)

    def to_json(self) -> dict[str, Any]:
        """The body of phalanx.scaling/1."""
        return {
            "scaling": "strong" if self.is_strong else "weak",
            "good_efficiency": GOOD_EFFICIENCY,
            "rate_unit": self.units.rate_unit,
            "points": [point.to_json() for point in self.points],
            "remarks": list(self.remarks),
        }


@dataclass
class _FinishedRuns:
    """What the runs came to, by number of ranks. `failures`: why one of it failed; `refusal`: what
    the first that was refused raised."""

    runs: dict[int, list[ScalingRun]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    refusal: PhalanxError | None = None
    num_runs: int = 0
    stop_code: int | None = None


def measure_scaling(
    request: ScalingRequest, *, on_run: Callable[[int, int, int], None] = lambda *_: None
) -> ScalingResult:
    """Train the job on each number of ranks in turn, in directories that are removed.

    `on_run(index, total, num_ranks)` is called before each run. A number of ranks that fails is a
    point with its reason. Raises UsageError where the batch cannot be split over a number of ranks,
    or where all of them fail; what the first raised, if it was refused.
    """
    jobs = {ranks: _copy_job_for_ranks(request, ranks) for ranks in request.ranks}
    finished = _train_in_turn(request, jobs, on_run)
    done = {
        ranks: runs
        for ranks, runs in sorted(finished.runs.items())
        if ranks not in finished.failures
    }
    if not done and finished.stop_code is None:
        if finished.refusal is not None:
            raise finished.refusal
        least = min(finished.failures)
        raise UsageError(
            f"the run on {plural(least, 'rank')} failed: {finished.failures[least]}",
            why="and so did those on other numbers of ranks",
        )
    points = []
    for ranks in sorted({*done, *finished.failures}):
        if ranks in done:
            points.append(
                _build_point(jobs[ranks], next(iter(done.values())), done[ranks], request)
            )
        else:
            batch, why_not = jobs[ranks].train.global_batch_size, finished.failures[ranks]
            points.append(
                ScalingPoint(ranks, "", batch, math.nan, math.nan, math.nan, why_not=why_not)
            )
    remarks = _list_remarks_on_runs(request, finished, min(done, default=0))
    if done:
        remarks += _list_remarks(request, jobs[min(done)])
    return ScalingResult(
        tuple(points),
        tuple(remarks),
        request.is_strong,
        finished.stop_code,
        choose_metric_units_of_job(request.job.to_json()),
    )


def _train_in_turn(
    request: ScalingRequest, jobs: Mapping[int, Job], on_run: Callable[[int, int, int], None]
) -> _FinishedRuns:
    """Train on each number of ranks in turn, and no more on one that failed, until all are done or
    somebody stops it."""
    finished = _FinishedRuns()
    with open_scratch_directory("scaling") as scratch:
        for index in range(request.num_runs):
            ranks = request.ranks[index % len(request.ranks)]
            if ranks in finished.failures:
                continue
            on_run(index, request.num_runs, ranks)
            try:
                outcome = _train_on_ranks(jobs[ranks], scratch.directory / str(index))
            except PhalanxError as refusal:
                finished.refusal = finished.refusal or refusal
                outcome = str(refusal)
            if isinstance(outcome, int):
                finished.stop_code = outcome
                break
            if isinstance(outcome, str):
                finished.failures[ranks] = outcome
            else:
                finished.runs.setdefault(ranks, []).append(outcome)
                finished.num_runs += 1
    return finished


def _copy_job_for_ranks(request: ScalingRequest, ranks: int) -> Job:
    batch = request.job.train.global_batch_size
    if not request.is_strong:
        # Each rank keeps what it has of the job's own plan.
        own_ranks = request.job.parallel.ranks or min(request.ranks)
        batch = batch * ranks // own_ranks
        if batch * own_ranks != request.job.train.global_batch_size * ranks:
            raise UsageError(
                f"train.global_batch_size={request.job.train.global_batch_size} of"
                f" {plural(own_ranks, 'rank')} has no whole share for {ranks}",
                fix="give a batch that they divide, or --strong",
            )
    keys = {
        "parallel.ranks": ranks,
        "train.global_batch_size": batch,
        # A run that goes on with fewer ranks would be another point.
        "resilience.min_ranks": None,
    }
    return apply_job_keys(make_short_copy(request.job, request.num_steps), keys)


def _train_on_ranks(job: Job, run_dir: Path) -> ScalingRun | str | int:
    """The seconds of the steps; the reason why the run failed; or the exit code of a stop."""
    result = train_job(apply_job_keys(job, {"run.dir": str(run_dir)}), quiet=True)
    if result.exit_code in (ExitCode.INTERRUPTED, ExitCode.PREEMPTED):
        return int(result.exit_code)
    if result.exit_code != ExitCode.OK:
        return (result.error or f"exit code {result.exit_code}").splitlines()[0]
    table = read_step_table(run_dir)
    if table is None or not table.num_steps:
        return "no step after the first ones was recorded"
    num_targets = _compute_mean_targets(run_dir, table)
    if not num_targets > 0:
        return "no step after the first ones has a target"
    return _summarize_table(table, num_targets)


def _compute_mean_targets(run_dir: Path, table: StepTable) -> float:
    """Targets of a step on all ranks, in the mean over the steps of `table`; 0 without any."""
    # A row may stand for the steps of a window, whose last one it is named after.
    first_step = table.steps[0] - round(table.steps_per_row) + 1
    nums_targets = []
    for envelope in read_recorded_events(run_dir, StepFinished, rank=table.ranks[0]):
        event = envelope.event
        if (
            isinstance(event, StepFinished)
            and envelope.attempt == table.attempt
            and first_step <= event.step <= table.steps[-1]
        ):
            nums_targets.append(int(event.num_targets))
    return fmean(nums_targets) if nums_targets else 0.0


def _summarize_table(table: StepTable, num_targets: float) -> ScalingRun:
    step_s = table.total_s / table.num_steps
    terms_s: dict[str, float] = {}
    for rows in table.rows.values():
        for row in rows:
            for group, name in _TERMS.items():
                _add(terms_s, name, row.seconds.get(group, 0.0))
            for name, seconds in row.communication_s.items():
                _add(terms_s, name, seconds)
    num_rows = table.num_steps * len(table.rows)
    terms_s = {name: seconds / num_rows for name, seconds in terms_s.items()}
    terms_s[BETWEEN_RANKS] = step_s - sum(terms_s.values())
    return ScalingRun(len(table.rows), step_s, num_targets / step_s, terms_s)


def _add(sums: dict[str, float], name: str, seconds: float) -> None:
    sums[name] = sums.get(name, 0.0) + seconds


def _build_point(
    job: Job, smallest: Sequence[ScalingRun], runs: Sequence[ScalingRun], request: ScalingRequest
) -> ScalingPoint:
    """The point of `runs` of `job` beside those on the smallest number of ranks."""
    factor = runs[0].num_ranks / smallest[0].num_ranks
    step_s, tokens_per_s = _find_median_run(runs).step_s, _find_median_run(runs).tokens_per_s
    linear_tokens_per_s = factor * _find_median_run(smallest).tokens_per_s
    # What a term may take in linear scaling: as long as on the smallest number of ranks, or its
    # part where the batch is split.
    shrinks_by = factor if request.is_strong else 1.0
    base_s, terms_s = _find_median_run(smallest).terms_s, _find_median_run(runs).terms_s
    lost = {
        name: (terms_s.get(name, 0.0) - base_s.get(name, 0.0) / shrinks_by) / step_s
        for name in dict.fromkeys((*base_s, *terms_s))
    }
    return ScalingPoint(
        runs[0].num_ranks,
        plan_job(job, checks_initial=False).plan.chosen.name,
        job.train.global_batch_size,
        step_s,
        tokens_per_s,
        tokens_per_s / linear_tokens_per_s,
        lost,
    )


def _find_median_run(runs: Sequence[ScalingRun]) -> ScalingRun:
    """The run with the (lower) median step: medians of terms would not add up."""
    ordered = sorted(runs, key=lambda run: run.step_s)
    return ordered[(len(ordered) - 1) // 2]


def _list_remarks_on_runs(
    request: ScalingRequest, finished: _FinishedRuns, base_ranks: int
) -> list[str]:
    """What the runs that failed, or were not made, leave open."""
    remarks = []
    if finished.stop_code is not None:
        remarks.append(
            f"stopped after {finished.num_runs} of {plural(request.num_runs, 'run')}: what is said"
            " is of these"
        )
    if base_ranks > min(request.ranks):
        remarks.append(
            f"linear scaling is that from {plural(base_ranks, 'rank')}, the fewest that did not"
            " fail"
        )
    return remarks


def _list_remarks(request: ScalingRequest, job: Job) -> list[str]:
    """What runs on this machine cannot show; `job` is one of those that ran."""
    remarks = []
    cores, most = count_allowed_cores(), max(request.ranks)
    device = plan_job(job, checks_initial=False).plan.device
    if device == "cpu" and most > cores:
        remarks.append(
            f"{most} ranks share {plural(cores, 'core')}: from {cores + 1} ranks on the"
            " efficiency is that of too few cores"
        )
    elif device == "cpu":
        remarks.append(
            "ranks share this machine's memory and clock: computation gets slower with each"
        )
    if request.repeats == 1:
        remarks.append("each number of ranks ran once: noise of this machine is not known")
    return remarks
