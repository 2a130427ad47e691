"""The advice on a job's plan or on a search's winner, and their page.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.core.errors import UsageError
from phalanx.job.copies import apply_job_keys
from phalanx.job.schema import Job
from phalanx.plan.advice.advise import PlanAdvice, advise_on_plan
from phalanx.plan.advice.waterfall import list_memory_phases
from phalanx.plan.cluster import Cluster
from phalanx.plan.described_cluster import choose_cluster_of_job
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.plan.search.finalists import add_throughput
from phalanx.plan.search.result import SearchResult
from phalanx.plan.search.search import estimate_economics
from phalanx.plan.search.step_times import build_machine_rates, estimate_planned_step
from phalanx.plan.search.task import SearchTask

if TYPE_CHECKING:
    from phalanx.plan.advice.explain_term import ExplainedTerm
    from phalanx.run.plan_job import PlannedJob
    from phalanx.run.search_job import JobSearch


@dataclass(frozen=True)
class AdvisedPlan:
    """A plan with the job and the cluster that it is of, and the advice on it."""

    job: Job
    plan: Plan
    cluster: Cluster
    advice: PlanAdvice
    result: SearchResult | None = None
    job_text: str = ""
    basis: str = ""
    """What a time is built on that was not predicted from data sheets."""


def advise_on_planned_job(planned: PlannedJob) -> AdvisedPlan:
    """The advice on the plan of a job."""
    cluster = choose_cluster_of_job(planned.job)
    step, basis = None, ""
    if planned.time is not None and planned.time.step is not None:
        step, basis = planned.time.step, planned.time.basis
    advice = advise_on_plan(planned.job, planned.plan, cluster, time=step)
    return AdvisedPlan(planned.job, planned.plan, cluster, advice, basis=basis)


def advise_on_search(searched: JobSearch) -> AdvisedPlan | None:
    """The advice on the winner of a search; None where nothing fits."""
    task, result = searched.task, searched.result
    if result.winner is None:
        return None
    job = apply_job_keys(task.job, result.winner.job_keys)
    plan = make_plan(
        job,
        vocab_size=task.vocab_size,
        num_ranks=task.num_ranks,
        cluster=task.cluster,
        shape=task.shape,
        is_explained=False,
    )
    goodput = result.economics.get("goodput")
    advice = advise_on_plan(
        job,
        plan,
        task.cluster,
        time=result.winner.time,
        goodput=None if goodput is None else goodput["value"],
        spot_cost_ratio=_compute_spot_cost_ratio(result),
    )
    return AdvisedPlan(job, plan, task.cluster, advice, result, searched.job_text)


def _compute_spot_cost_ratio(result: SearchResult) -> float | None:
    """The cost on spot machines in parts of that on demand; None where a price is not known."""
    cost = result.economics.get("cost") or {}
    on_demand = cost.get("dollars_per_billion_tokens")
    spot = cost.get("spot_dollars_per_billion_tokens")
    if not on_demand or spot is None:
        return None
    return float(spot / on_demand)


def explain_term_of_plan(advised: AdvisedPlan, term: str) -> tuple[ExplainedTerm, float] | None:
    """The formula of `term`, and the total that it is a part of (0 for what is no part); None where
    the plan has no such figure: no time is predicted, or no search was made.

    `term`: a name of `list_explainable_terms`.
    """
    from phalanx.plan.advice.explain_term import (
        ANSWER_FORMULAS,
        MEMORY_FORMULAS,
        MEMORY_PHASE_TERMS,
        explain_memory_term,
        explain_sum,
    )

    job, plan, cluster = advised.job, advised.plan, advised.cluster
    memory, zero_stage = plan.chosen.predicted_bytes, plan.chosen.zero_stage
    if term in ANSWER_FORMULAS:
        return _explain_answer_term_of_search(advised, term)
    if term in MEMORY_PHASE_TERMS:
        phases = list_memory_phases(memory, plan.chosen.phases)
        if phases and term not in phases:
            raise UsageError(
                f"what a pipeline's rank has in {term!r} is below its peak, and was not counted",
                where="--explain",
                fix=f"one of {', '.join(phases)}",
            )
        return explain_sum(term, phases.get(term, {}), "bytes"), float(plan.capacity_bytes)
    if term not in MEMORY_FORMULAS:
        return _explain_time_term_of_plan(advised, term)

    def plan_again() -> Plan:
        return make_plan(job, num_ranks=plan.world_size, cluster=cluster, shape=plan.model_shape)

    explained = explain_memory_term(term, memory, zero_stage, plan_again)
    return explained, float(plan.chosen.total_bytes)


def _explain_time_term_of_plan(
    advised: AdvisedPlan, term: str
) -> tuple[ExplainedTerm, float] | None:
    from phalanx.plan.advice.explain_term import STEP_TERM, explain_sum, explain_time_term

    job, plan = advised.job, advised.plan
    machine = build_machine_rates(advised.cluster)
    if machine is None:
        return None
    predicted = estimate_planned_step(job, plan, plan.model_shape, machine)
    if predicted is None:
        return None
    if term == STEP_TERM:
        return explain_sum(term, predicted.terms, "s"), 0.0
    rates = machine
    explained = explain_time_term(
        term, predicted.terms, lambda: estimate_planned_step(job, plan, plan.model_shape, rates)
    )
    return explained, predicted.total_s


def _explain_answer_term_of_search(
    advised: AdvisedPlan, term: str
) -> tuple[ExplainedTerm, float] | None:
    """The formula of goodput, cost or MFU; None where no search was made, or its winner has
    none."""
    from phalanx.plan.advice.explain_term import explain_answer_term

    result = advised.result
    if result is None or result.winner is None or not result.economics:
        return None
    job, shape, cluster = advised.job, advised.plan.model_shape, advised.cluster
    winner = result.winner
    if term == "mfu":
        if winner.mfu is None or cluster.accelerator is None:
            return None
        peak_flops = cluster.accelerator.peak_flops(advised.plan.precision)
        explained = explain_answer_term(
            term, winner.mfu, "share", lambda: add_throughput(winner, job, shape, peak_flops)
        )
        return explained, 0.0
    task = SearchTask(job, shape, cluster, winner.layout.world_size)
    cost = result.economics["cost"]
    value, unit = cost["dollars_per_billion_tokens"], "$"
    if value is None:
        value, unit = cost["hours_per_billion_tokens"], "h"
    if term == "goodput":
        value, unit = result.economics["goodput"]["value"], "share"
    explained = explain_answer_term(term, value, unit, lambda: estimate_economics(task, winner))
    return explained, 0.0


def write_page_of_plan(
    advised: AdvisedPlan, path: Path, on_point: Callable[[int, int], None] | None = None
) -> None:
    """Write the page of a plan. Raises ResourceError."""
    from phalanx.plan.advice.what_if import compute_what_if
    from phalanx.report.plan_collect import collect_page_facts
    from phalanx.report.plan_page import write_plan_page

    grid = compute_what_if(advised.job, advised.plan, advised.cluster, on_point)
    facts = collect_page_facts(
        advised.job,
        advised.plan,
        advised.cluster,
        advised.advice,
        grid,
        advised.result,
        advised.job_text,
        advised.basis,
    )
    write_plan_page(path, facts)
