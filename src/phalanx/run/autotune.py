"""Runs the best layouts of a job for a few steps on this machine, and picks by what they took.

Torch-free: ranks are started and supervised as `phalanx train` does it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from phalanx.core.errors import ExitCode, JobError, LayoutError, PhalanxError
from phalanx.job.schema import Job
from phalanx.plan.leaf_tree import require_layouts_may_be_searched
from phalanx.plan.plan import Plan
from phalanx.run.plan_from import RecordedSteps, read_recorded_steps
from phalanx.run.plan_job import plan_job
from phalanx.run.plan_time import predict_step_time_of_plan
from phalanx.run.scratch import open_scratch_directory
from phalanx.run.train_job import train_job

STEPS = 8
DEGREES = ("dp_replicate", "dp_shard", "zero_stage", "tp", "cp", "ep", "pp")
# Layouts of `ranks` ranks, from the simplest on: keys of [parallel].
FAMILIES: dict[str, Callable[[int], Mapping[str, int]]] = {
    "ddp": lambda ranks: {"dp_replicate": ranks},
    "zero1": lambda ranks: {"dp_shard": ranks, "zero_stage": 1},
    "zero2": lambda ranks: {"dp_shard": ranks, "zero_stage": 2},
    "zero3": lambda ranks: {"dp_shard": ranks, "zero_stage": 3},
    "tp": lambda ranks: {"tp": ranks},
    "pp": lambda ranks: {"pp": ranks},
    "tp 2 x ddp": lambda ranks: {"tp": 2, "dp_replicate": ranks // 2},
    "pp 2 x ddp": lambda ranks: {"pp": 2, "dp_replicate": ranks // 2},
}
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class TunedLayout:
    """A layout that may be run: the keys that make it, its plan, and the predicted seconds of a
    step (None without a profile); then what came out: what was measured, or why nothing was."""

    name: str
    keys: dict[str, int]
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
    """Legal layouts of the job that fit, the one predicted to be fastest first; without a profile
    from the simplest on. Each family is there once, with its best micro-batch, before any family's
    second one. Raises the first LayoutError where none is legal."""
    require_layouts_may_be_searched(job)
    candidates: list[TunedLayout] = []
    first_refusal: PhalanxError | None = None
    identities = set()
    for name, keys in _list_layout_keys_to_try(job):
        try:
            plan = plan_job(_copy_job_with_keys(job, keys), checks_initial=False).plan
        except (LayoutError, JobError) as refusal:
            first_refusal = first_refusal or refusal
            continue
        # The micro-batch that the plan takes by itself is among those that are tried.
        identity = name, plan.micro_batch_size, plan.num_microbatches
        if not plan.chosen.fits or identity in identities:
            continue
        identities.add(identity)
        step = predict_step_time_of_plan(plan).step
        predicted_s = None
        if step is not None:
            predicted_s = step.total_s
        candidates.append(TunedLayout(name, keys, plan, predicted_s))
    if not candidates:
        raise first_refusal or LayoutError("no layout of this job fits")
    # A stable sort: what nobody predicted stays in its order.
    candidates.sort(key=_get_predicted_step_s)
    return _put_best_of_each_family_first(candidates)


def _get_predicted_step_s(layout: TunedLayout) -> float:
    return layout.predicted_s or 0.0


def _put_best_of_each_family_first(layouts: Sequence[TunedLayout]) -> list[TunedLayout]:
    best, later, families = [], [], set()
    for layout in layouts:
        if layout.name in families:
            later.append(layout)
        else:
            best.append(layout)
        families.add(layout.name)
    return [*best, *later]


def _list_layout_keys_to_try(job: Job) -> Iterator[tuple[str, dict[str, int]]]:
    """The keys of each layout that leaves alone what the job fixes."""
    ranks = plan_job(job, checks_initial=False).plan.world_size
    is_fixed = any(getattr(job.parallel, name) is not None for name in DEGREES)
    layouts: dict[str, dict[str, int]] = {"as the job says": {}}
    if not is_fixed:
        layouts = {}
        for name, build in FAMILIES.items():
            keys = dict(build(ranks))
            # Of two ranks, say, "tp 2 x ddp" is tp.
            if 1 not in _list_degrees(keys) and math.prod(_list_degrees(keys)) == ranks:
                layouts[name] = keys
        layouts = layouts or {"one rank": {}}
    sizes: Sequence[int | None] = (None, *MICRO_BATCHES)
    if job.train.micro_batch_size is not None:
        sizes = (None,)
    for name, keys in layouts.items():
        for size in sizes:
            if size is None:
                yield name, keys
            elif size < job.train.global_batch_size:
                yield name, {**keys, "micro_batch_size": size}


def _list_degrees(keys: Mapping[str, int]) -> list[int]:
    return [degree for key, degree in keys.items() if key != "zero_stage"]


def _copy_job_with_keys(job: Job, keys: Mapping[str, int], **sections: Mapping[str, Any]) -> Job:
    """The job with `keys` of [parallel] and train.micro_batch_size, and more by section."""
    body = job.to_json()
    for key, value in keys.items():
        section = "train" if key == "micro_batch_size" else "parallel"
        body[section][key] = value
    for section, values in sections.items():
        body[section] |= values
    return Job.model_validate_json(json.dumps(body))


def _run_layout_for_some_steps(
    job: Job, layout: TunedLayout, run_dir: Path
) -> tuple[TunedLayout, int | None]:
    """The layout with what its steps took, and the exit code of a stop."""
    short = _copy_job_with_keys(
        job,
        layout.keys,
        run={"dir": str(run_dir)},
        train={"steps": STEPS, "sample_tokens": 0},
        eval={"every_steps": None, "tokens": 256},
        observe={"sinks": []},
        checkpoint={"at_end": False, "every_steps": None, "every_minutes": None, "url": None},
    )
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
