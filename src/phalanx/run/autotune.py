"""Runs the best layouts of a job for a few steps on this machine, and picks by what they took.

Torch-free: ranks are started and supervised as `phalanx train` does it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.core.errors import ExitCode, JobError, LayoutError, PhalanxError
from phalanx.job.copies import apply_job_keys, make_short_copy
from phalanx.job.schema import Job
from phalanx.plan.leaf_tree import require_layouts_may_be_searched
from phalanx.plan.plan import Plan
from phalanx.plan.search.attempts import group_rows_by_family
from phalanx.plan.search.finalists import describe_layout_family, list_job_keys_of_row
from phalanx.plan.search.screening import screen_layouts
from phalanx.plan.search.task import build_search_task
from phalanx.run.plan_job import plan_job
from phalanx.run.plan_time import predict_step_time_of_plan
from phalanx.run.recorded_steps import RecordedSteps, read_recorded_steps
from phalanx.run.scratch import open_scratch_directory
from phalanx.run.train_job import train_job

STEPS = 8
MAX_LAYOUTS_PER_FAMILY = 6
"""Of each family so many are planned, with different micro-batches."""
_TRAIN_KEYS = ("micro_batch_size", "recompute", "recompute_every")


def find_section_of_key(key: str) -> str:
    """The section that `key` of a TunedLayout is in."""
    return "train" if key in _TRAIN_KEYS else "parallel"


@dataclass(frozen=True)
class TunedLayout:
    """A layout that may be run: the keys that make it, its plan, and the predicted seconds of a
    step (None without a profile); then what came out: what was measured, or why nothing was."""

    name: str
    keys: dict[str, Any]
    plan: Plan = field(repr=False)
    predicted_s: float | None
    measured: RecordedSteps | None = None
    why_not: str = ""

    def to_json(self) -> dict[str, Any]:
        measured_s = None
        if self.measured is not None:
            measured_s = self.measured.step_s
        return {
            "name": self.name,
            "keys": self.keys,
            "predicted_s": self.predicted_s,
            "measured_s": measured_s,
            "why_not": self.why_not,
        }


@dataclass(frozen=True)
class AutotuneResult:
    """The layouts that were run, fastest first, then those that failed. `stop_code`: the exit code
    of a stop, with which not all were run."""

    layouts: tuple[TunedLayout, ...]
    num_considered: int
    basis: str
    stop_code: int | None = None

    @property
    def winner(self) -> TunedLayout | None:
        """The fastest as measured; None where none ended."""
        if not self.layouts or self.layouts[0].measured is None:
            return None
        return self.layouts[0]

    def to_json(self) -> dict[str, Any]:
        """The body of phalanx.autotune/1."""
        winner = self.winner
        return {
            "num_considered": self.num_considered,
            "basis": self.basis,
            "is_complete": self.stop_code is None,
            "winner": winner and winner.to_json(),
            "layouts": [layout.to_json() for layout in self.layouts],
        }


def autotune_job(
    job: Job,
    count: int,
    *,
    on_layout: Callable[[int, int, TunedLayout], None] = lambda index, total, layout: None,
) -> AutotuneResult:
    """Run the `count` layouts of `job` that are predicted to be fastest, each for STEPS steps in a
    directory that is removed.

    Degrees that the job fixes stay. `on_layout` is called before each run. Raises LayoutError where
    no layout is legal. A run that fails is a row with its reason; after a stop the result has what
    came before.
    """
    layouts = rank_layouts_by_predicted_time(job)
    basis = predict_step_time_of_plan(layouts[0].plan).basis
    chosen, stop_code = layouts[:count], None
    tuned: list[TunedLayout] = []
    with open_scratch_directory("autotune") as scratch:
        for index, layout in enumerate(chosen):
            on_layout(index, len(chosen), layout)
            result, stop_code = _run_layout_for_some_steps(
                job, layout, scratch.directory / str(index)
            )
            if stop_code is not None:
                break
            tuned.append(result)
    tuned.sort(key=_get_measured_step_s)
    return AutotuneResult(tuple(tuned), len(layouts), basis, stop_code)


def _get_measured_step_s(layout: TunedLayout) -> float:
    if layout.measured is None:
        return math.inf
    return layout.measured.step_s


def rank_layouts_by_predicted_time(job: Job) -> list[TunedLayout]:
    """Layouts that the search lets through and that fit, the one predicted to be fastest first;
    without a profile from the simplest on. Each family is there once, with its best layout, before
    any family's second one. Raises LayoutError where none is legal."""
    require_layouts_may_be_searched(job)
    candidates: list[TunedLayout] = []
    first_refusal: PhalanxError | None = None
    identities = set()
    for keys in _list_layout_keys_to_try(job):
        try:
            plan = plan_job(apply_job_keys(job, keys), checks_initial=False).plan
        except (LayoutError, JobError) as refusal:
            first_refusal = first_refusal or refusal
            continue
        stage, offload = plan.chosen.zero_stage, plan.parallel.offload
        name = describe_layout_family(plan.layout, stage, offload)
        identity = plan.layout, stage, plan.micro_batch_size, plan.activations, offload
        # A plan may settle what the search left open as another row has it.
        if not plan.chosen.fits or identity in identities:
            continue
        identities.add(identity)
        step = predict_step_time_of_plan(plan).step
        predicted_s = None
        if step is not None:
            predicted_s = step.total_s
        short_keys = {key.partition(".")[2]: value for key, value in keys.items()}
        if job.parallel.ranks is not None:
            del short_keys["ranks"]
        candidates.append(TunedLayout(name, short_keys, plan, predicted_s))
    if not candidates:
        raise first_refusal or LayoutError("no layout of this job fits")
    # A stable sort: what nobody predicted comes last, in its order.
    candidates.sort(key=_get_predicted_step_s)
    return _put_best_of_each_family_first(candidates)


def _get_predicted_step_s(layout: TunedLayout) -> float:
    if layout.predicted_s is None:
        return math.inf
    return layout.predicted_s


def _put_best_of_each_family_first(layouts: Sequence[TunedLayout]) -> list[TunedLayout]:
    best, later, families = [], [], set()
    for layout in layouts:
        if layout.name in families:
            later.append(layout)
        else:
            best.append(layout)
        families.add(layout.name)
    return [*best, *later]


def _list_layout_keys_to_try(job: Job) -> Iterator[dict[str, Any]]:
    """The keys of the best layouts of each family by the search, by dotted key: what the job says
    stays, and each family has different micro-batches."""
    planned = plan_job(job, checks_initial=False).plan
    task = build_search_task(
        apply_job_keys(job, {"parallel.ranks": planned.world_size}), vocab_size=planned.vocab_size
    )
    screened = screen_layouts(task)
    rows = screened.rows
    for family in group_rows_by_family(screened):
        best_of_size: dict[int, int] = {}
        for row in map(int, family):
            best_of_size.setdefault(int(rows.micro_batch_size[row]), row)
        chosen = list(best_of_size.values())
        if np.isnan(screened.seconds).any():
            # Nobody says what is fast: few large microbatches have the least overhead.
            chosen.sort(key=lambda row: int(rows.num_microbatches[row]))
        for row in chosen[:MAX_LAYOUTS_PER_FAMILY]:
            yield list_job_keys_of_row(job, rows, row)


def _run_layout_for_some_steps(
    job: Job, layout: TunedLayout, run_dir: Path
) -> tuple[TunedLayout, int | None]:
    """The layout with what its steps took, and the exit code of a stop."""
    keys = {f"{find_section_of_key(key)}.{key}": value for key, value in layout.keys.items()}
    # A layout that goes on with fewer ranks would be another one.
    keys |= {"run.dir": str(run_dir), "resilience.min_ranks": None}
    short = apply_job_keys(make_short_copy(job, STEPS), keys)
    try:
        result = train_job(short, quiet=True)
        if result.exit_code in (ExitCode.INTERRUPTED, ExitCode.PREEMPTED):
            return layout, result.exit_code
        if result.exit_code != ExitCode.OK:
            return replace(layout, why_not=result.error.splitlines()[0]), None
        return replace(layout, measured=read_recorded_steps(run_dir, result.plan)), None
    except PhalanxError as refusal:
        if refusal.exit_code == ExitCode.PREEMPTED:
            return layout, int(ExitCode.PREEMPTED)
        return replace(layout, why_not=str(refusal)), None
