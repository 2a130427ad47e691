"""The layout of a job that leaves it open, chosen by a search over every axis.

The job stays what the user said; what was chosen is in the plan. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from phalanx.core.errors import LayoutError
from phalanx.core.units import format_seconds
from phalanx.job.copies import apply_job_keys
from phalanx.job.costs import ModelCosts
from phalanx.job.schema import Job
from phalanx.plan.candidates import NoFitError
from phalanx.plan.cluster import Cluster
from phalanx.plan.plan import Plan, compute_job_digest
from phalanx.plan.planner import make_plan
from phalanx.plan.predicted_time import predict_step_time
from phalanx.plan.search.describe import describe_layout, describe_nearest_fit
from phalanx.plan.search.nearest import find_nearest_fits
from phalanx.plan.search.result import RankedLayout
from phalanx.plan.search.search import search_layouts
from phalanx.plan.search.task import build_search_task

LAYOUT_KEYS = ("tp", "pp", "cp", "ep", "dp_replicate", "dp_shard", "zero_stage")
MAX_ADVICE_CHANGES = 3  # changes that an error names


@dataclass(frozen=True)
class ChosenLayout:
    """The keys that a search chose for a job, and why; no keys where the job, or the simple choice
    between copies and ZeRO, decides."""

    keys: dict[str, Any]
    reason: str = ""

    def make_plan(self, job: Job, *, cluster: Cluster, **facts: Any) -> Plan:
        """The plan of `job` with these keys, with its predicted time. Arguments and errors are
        those of `phalanx.make_plan`."""
        laid_out = apply_job_keys(job, self.keys) if self.keys else job
        plan = make_plan(laid_out, cluster=cluster, **facts)
        if self.keys:
            # A run is known by what the user said, wherever it is laid out.
            digest = compute_job_digest(job)
            if job.precision.compute == "auto":
                digest = _digest_job_in_planned_precision(job, plan)
            plan = replace(plan, job_digest=digest, reasons=(self.reason, *plan.reasons))
        time = predict_step_time(laid_out, plan, plan.model_shape, cluster)
        return replace(plan, step_time=time)


def _digest_job_in_planned_precision(job: Job, plan: Plan) -> str:
    """The digest of the job in the precision that its plan chose, as every plan has it."""
    return compute_job_digest(apply_job_keys(job, {"precision.compute": plan.precision}))


def is_layout_left_open(job: Job) -> bool:
    """True for a job that says nothing of how its ranks share the model."""
    return all(getattr(job.parallel, key) is None for key in LAYOUT_KEYS)


def choose_layout(
    job: Job,
    *,
    cluster: Cluster,
    shape: ModelCosts | None = None,
    vocab_size: int | None = None,
    num_ranks: int | None = None,
) -> ChosenLayout:
    """The layout for a job on `cluster`.

    On GPUs whose speed is known, the fastest by prediction. Elsewhere the simplest of copies and
    ZeRO that fits, and where none does, what fits with the fewest mechanisms.

    Raises NoFitError with the nearest changes that fit where nothing does, LayoutError for what the
    job says wrong.
    """
    is_open, is_known = is_layout_left_open(job), cluster.accelerator is not None
    failure: NoFitError | None = None
    try:
        make_plan(job, cluster=cluster, num_ranks=num_ranks, shape=shape, vocab_size=vocab_size)
    except NoFitError as error:
        failure = error
    if failure is None and not (is_open and is_known):
        return ChosenLayout({})
    searched = job
    if num_ranks is not None:
        searched = apply_job_keys(job, {"parallel.ranks": num_ranks})
    try:
        task = build_search_task(searched, cluster=cluster, shape=shape, vocab_size=vocab_size)
        result = search_layouts(task)
    except LayoutError:
        if failure is not None:
            raise failure from None
        return ChosenLayout({})  # nothing divides but what the plan chose
    if result.winner is None:
        if failure is None:
            return ChosenLayout({})
        raise _replace_advice_of_failure(
            failure, [describe_nearest_fit(fit) for fit in find_nearest_fits(task)]
        )
    if not is_open:
        assert failure is not None
        keys = " ".join(f"{key}={value}" for key, value in result.winner.job_keys.items())
        raise _replace_advice_of_failure(failure, [keys])
    return ChosenLayout(dict(result.winner.job_keys), _explain_why_chosen(result.winner, failure))


def _explain_why_chosen(winner: RankedLayout, failure: NoFitError | None) -> str:
    layout = describe_layout(winner)
    if winner.step_s is not None:
        return f"{layout}: the fastest by prediction, {format_seconds(winner.step_s)} a step"
    assert failure is not None
    return f"{layout}: the fewest mechanisms that fit; copies and ZeRO alone do not"


def _replace_advice_of_failure(failure: NoFitError, changes: list[str]) -> NoFitError:
    """`failure` with changes that were planned and fit in place of its own advice."""
    if not changes:
        return failure
    return NoFitError(
        failure.what,
        where=failure.where,
        why=failure.why,
        fix="; or ".join(changes[:MAX_ADVICE_CHANGES]),
        needed_bytes=failure.needed_bytes,
        capacity_bytes=failure.capacity_bytes,
    )
