"""The advice on a job's plan or on a search's winner, and their page.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.job.schema import Job
from phalanx.plan.advice.advise import PlanAdvice, advise_on_plan
from phalanx.plan.cluster import Cluster
from phalanx.plan.described_cluster import choose_cluster_of_job
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.plan.search.finalists import apply_job_keys
from phalanx.plan.search.result import SearchResult
from phalanx.plan.search.step_times import build_machine_rates, estimate_planned_step

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


def explain_time_term_of_plan(
    advised: AdvisedPlan, term: str
) -> tuple[ExplainedTerm, float] | None:
    """The formula of `term`, and the total that it is a part of; None where time is not
    predicted."""
    from phalanx.plan.advice.explain_term import (
        MEMORY_FORMULAS,
        explain_memory_term,
        explain_time_term,
    )

    job, plan, cluster = advised.job, advised.plan, advised.cluster
    if term in MEMORY_FORMULAS:
        memory, zero_stage = plan.chosen.predicted_bytes, plan.chosen.zero_stage

        def plan_again() -> Plan:
            return make_plan(
                job, num_ranks=plan.world_size, cluster=cluster, shape=plan.model_shape
            )

        explained = explain_memory_term(term, memory, zero_stage, plan_again)
        return explained, float(plan.chosen.total_bytes)
    machine = build_machine_rates(cluster)
    predicted = None
    if machine is not None:
        predicted = estimate_planned_step(job, plan, plan.model_shape, machine)
    if machine is None or predicted is None:
        return None
    rates = machine
    explained = explain_time_term(
        term,
        predicted.terms,
        lambda: estimate_planned_step(job, plan, plan.model_shape, rates),
    )
    return explained, predicted.total_s


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
