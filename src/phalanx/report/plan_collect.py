"""From a plan, its advice and its grid to what the page shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from phalanx.core.units import format_bytes, format_count, format_seconds, plural
from phalanx.job.schema import Job
from phalanx.plan.advice.advise import PlanAdvice
from phalanx.plan.advice.waterfall import build_waterfall
from phalanx.plan.advice.what_if import WhatIfGrid
from phalanx.plan.cluster import Cluster
from phalanx.plan.plan import Candidate, Plan
from phalanx.plan.search.comparison import explain_why_winner
from phalanx.plan.search.describe import (
    describe_counted_amount,
    describe_devices,
    describe_leaner_runner_up,
    describe_nearest_fit,
    find_counted_unit,
    format_amount,
    format_goodput,
)
from phalanx.plan.search.result import RankedLayout, SearchResult
from phalanx.plan.search.step_times import build_machine_rates
from phalanx.plan.timing.constants import list_timing_constants
from phalanx.plan.timing.step import estimate_step_times
from phalanx.report.plan_facts import AnswerTile, LayoutRow, PlanPageFacts

DATA_SHEETS = (
    "Times are predicted from data sheets and the constants below, and were not measured on this"
    " cluster. phalanx bench measures a machine's own."
)
ASSUMPTIONS = (
    "Memory is what the planner counts of a rank's tensors; what CUDA and NCCL take is left free"
    " beside it (docs/memory.md).",
    "All GPUs are equal and work, samples have the full length, and experts are loaded evenly"
    " unless the plan says otherwise.",
)


def collect_page_facts(
    job: Job,
    plan: Plan,
    cluster: Cluster,
    advice: PlanAdvice,
    grid: WhatIfGrid | None = None,
    result: SearchResult | None = None,
    job_text: str = "",
    basis: str = "",
) -> PlanPageFacts:
    """Everything that the page of `plan` shows. Without the result of a search the ranking is the
    plan's own alternatives. `basis`: what its time is built on; "" for data sheets."""
    is_from_data_sheets = advice.time is not None and not basis
    assumptions = list(ASSUMPTIONS)
    if is_from_data_sheets:
        assumptions.insert(0, DATA_SHEETS)
    elif basis:
        assumptions.insert(0, f"The time of a step: {basis}.")
    if result is not None:
        assumptions += result.remarks
    terms_s: Mapping[str, float] = {}
    if advice.time is not None:
        terms_s = advice.time.terms
    stage_memory: Sequence[Mapping[str, float]] = ()
    timeline = None
    if plan.pipeline is not None:
        stage_memory = plan.pipeline.rank_memory
        timeline = plan.pipeline.timeline()
    layouts, economics = list_alternative_rows(plan, cluster, advice), []
    refused: Mapping[str, int] = {}
    verdict = describe_plan_verdict(plan, advice)
    if result is not None:
        leaner = describe_leaner_runner_up(result, cluster)
        if leaner:
            verdict += f" {leaner[:1].upper()}{leaner[1:]}."
        layouts, economics = list_ranked_layout_rows(result), list_economics_rows(result)
        refused = result.refused
    return PlanPageFacts(
        model=advice.facts.model.name,
        cluster=format_cluster_of_plan(cluster, plan),
        fits=plan.chosen.fits,
        verdict=verdict,
        tiles=(*list_answer_tiles(plan, advice), *economics),
        layouts=layouts,
        refused=refused,
        waterfall=build_waterfall(terms_s, advice.facts.goodput),
        memory=plan.chosen.predicted_bytes,
        memory_phases=plan.chosen.phases,
        stage_memory=stage_memory,
        capacity_bytes=plan.capacity_bytes,
        timeline=timeline,
        rules=[verdict.to_json() for verdict in advice.verdicts],
        tables=[answer.to_json() for answer in advice.answers],
        hardware=list_hardware_rows(cluster, advice),
        assumptions=assumptions,
        constants=list_constant_rows() if is_from_data_sheets else (),
        what_if=None if grid is None else grid.to_json(),
        job_text=job_text,
    )


def collect_unfit_facts(result: SearchResult) -> PlanPageFacts:
    """The facts that the page shows where nothing fits: what is missing, and the nearest that
    would."""
    missing = f"{result.failure[:1].upper()}{result.failure[1:]}."
    nearest = []
    for fit in result.nearest:
        row = _build_ranked_layout_row(fit.ranked, is_winner=False)
        nearest.append(replace(row, family=fit.axis, why=describe_nearest_fit(fit)))
    return PlanPageFacts(
        model=result.model,
        cluster=describe_devices(result.num_ranks, result.cluster),
        fits=False,
        verdict=missing,
        nearest=nearest,
        refused=result.refused,
        assumptions=(*ASSUMPTIONS, *result.remarks),
    )


def list_ranked_layout_rows(result: SearchResult) -> list[LayoutRow]:
    """The winner and the runners-up of a search, numbered as in the terminal."""
    rows = []
    if result.winner is not None:
        row = _build_ranked_layout_row(result.winner, is_winner=True)
        why = explain_why_winner(result.winner, [result.winner, *result.runners_up])
        rows.append(replace(row, why=why, number=1))
    for number, ranked in enumerate(result.runners_up, start=2):
        rows.append(replace(_build_ranked_layout_row(ranked, is_winner=False), number=number))
    return rows


def _build_ranked_layout_row(ranked: RankedLayout, *, is_winner: bool) -> LayoutRow:
    micro_batches = plural(ranked.num_microbatches, "micro-batch", "micro-batches")
    settings = [f"{micro_batches} of {ranked.micro_batch_size}"]
    if ranked.schedule:
        settings.append(ranked.schedule)
    if ranked.recompute != "none":
        settings.append(f"recompute {ranked.recompute}")
    if ranked.offload != "none":
        settings.append(f"offload {ranked.offload}")
    return LayoutRow(
        ranked.family,
        str(ranked.layout),
        ", ".join(settings),
        math.nan if ranked.step_s is None else ranked.step_s,
        ranked.memory.total_bytes,
        ranked.why_not,
        ranked.memory.categories,
        is_winner,
    )


def list_economics_rows(result: SearchResult) -> list[AnswerTile]:
    """Goodput, cost and energy of the winner."""
    tiles = []
    goodput = result.economics.get("goodput")
    if goodput is not None:
        detail = f"a failure every {format_amount(goodput['mtbf_hours'])} h expected"
        tiles.append(AnswerTile("Goodput", format_goodput(goodput["value"], " %"), detail))
    cost = result.economics.get("cost")
    if cost is None:
        return tiles
    dollars, spot = cost["dollars_per_billion_tokens"], cost["spot_dollars_per_billion_tokens"]
    # As the terminal says it.
    amount, share = describe_counted_amount(result)
    value, details = f"{share * cost['hours_per_billion_tokens']:.3g} h", []
    if dollars is not None:
        value = f"${format_amount(share * dollars)}"
        details.append("on demand")
    if spot is not None:
        details.append(f"${format_amount(share * spot)} on spot machines with their pre-emptions")
    if cost.get("price_note"):
        details.append(cost["price_note"])
    if cost["kwh_per_billion_tokens"] is not None:
        details.append(f"{format_amount(share * cost['kwh_per_billion_tokens'])} kWh")
    tiles.append(AnswerTile(amount.capitalize(), value, "; ".join(details)))
    return tiles


def format_cluster_of_plan(cluster: Cluster, plan: Plan) -> str:
    """'64 x h100-sxm'."""
    return describe_devices(plan.world_size, cluster.name or cluster.device)


def describe_plan_verdict(plan: Plan, advice: PlanAdvice) -> str:
    """The answer in a sentence or two."""
    batch = f"{plan.global_batch_size:,} {_find_sample_noun(plan)}"
    if _find_counted_unit_of(plan, advice) == "tokens":
        batch += f" of {advice.setup.seq_len:,} tokens"
    sentences = [f"{plan.chosen.name} as {plan.layout}, {batch} a step."]
    total, capacity = plan.chosen.total_bytes, plan.capacity_bytes
    share = f"{format_bytes(total)} of the {format_bytes(capacity)} that a rank may fill"
    if advice.facts.peak_bytes is None:
        share += ", without the activations, which are not known"
    sentences.append(f"Memory: {share}.")
    failing = [verdict for verdict in advice.verdicts if verdict.state == "fails"]
    if failing:
        sentences.append(f"{plural(len(failing), 'rule')} of thumb not kept.")
    return " ".join(sentences)


def _find_sample_noun(plan: Plan) -> str:
    return plan.model_shape.get_sample_noun(of_own_data=False)


def _find_counted_unit_of(plan: Plan, advice: PlanAdvice) -> str:
    return find_counted_unit(_find_sample_noun(plan), advice.setup.seq_len)


def list_answer_tiles(plan: Plan, advice: PlanAdvice) -> list[AnswerTile]:
    """The numbers of the answer: time, speed, utilisation, memory, batch."""
    tiles, unit = [], _find_counted_unit_of(plan, advice).capitalize()
    if advice.time is None:
        tiles.append(AnswerTile("Step time", "not predicted", "for this device or model"))
    else:
        time = advice.time
        interval = f"{format_seconds(time.low_s)} to {format_seconds(time.high_s)} in 80 %"
        tiles.append(AnswerTile("Step time", format_seconds(time.total_s), interval))
        speed = advice.facts.batch.num_tokens / time.total_s
        per_device = speed / plan.world_size
        tiles.append(
            AnswerTile(f"{unit}/s per GPU", f"{per_device:,.0f}", f"{format_count(speed)} in all")
        )
        mfu = compute_model_flops_utilization(plan, advice)
        if mfu is not None:
            tiles.append(AnswerTile("MFU", f"{100 * mfu:.1f} %", "of the data sheet's peak"))
    tiles.append(
        AnswerTile(
            "Peak memory",
            format_bytes(plan.chosen.total_bytes),
            f"of {format_bytes(plan.capacity_bytes)}{_describe_peak_rank(plan)}",
        )
    )
    micro_batches = plural(plan.num_microbatches, "micro-batch", "micro-batches")
    tiles.append(
        AnswerTile(
            f"{unit} a step",
            format_count(advice.facts.batch.num_tokens),
            f"{micro_batches} of {plan.micro_batch_size} per rank",
        )
    )
    tiles.append(
        AnswerTile("Parameters", format_count(plan.num_params), f"{plan.precision} products")
    )
    return tiles


def _describe_peak_rank(plan: Plan) -> str:
    if plan.pipeline is None or not plan.pipeline.predicted_rank_bytes:
        return ""
    totals = plan.pipeline.predicted_rank_bytes
    return f", rank {totals.index(max(totals))} of the pipeline"


def compute_model_flops_utilization(plan: Plan, advice: PlanAdvice) -> float | None:
    """FLOPs of the model over what the devices could do in the step's time, 0 to 1."""
    peak_flops = advice.facts.hardware.peak_flops
    if advice.time is None or peak_flops is None or plan.flops_per_token is None:
        return None
    flops = plan.flops_per_token * advice.facts.batch.num_tokens
    return float(flops / (peak_flops * plan.world_size * advice.time.total_s))


def list_alternative_rows(plan: Plan, cluster: Cluster, advice: PlanAdvice) -> list[LayoutRow]:
    """The plan's alternatives, the chosen one first."""
    machine = build_machine_rates(cluster)
    rows = []
    for candidate in sorted(plan.alternatives, key=lambda candidate: not candidate.chosen):
        step_s = math.nan
        if candidate.chosen and advice.time is not None:
            step_s = advice.time.total_s
        elif machine is not None and advice.time is not None:
            setup = replace(advice.setup, layout=candidate.layout, zero_stage=candidate.zero_stage)
            step_s = estimate_step_times(plan.model_shape, machine, setup).total_s
        rows.append(
            LayoutRow(
                candidate.name,
                str(candidate.layout),
                _describe_candidate_settings(plan, candidate),
                step_s,
                candidate.total_bytes,
                candidate.why,
                candidate.predicted_bytes,
                candidate.chosen,
            )
        )
    return rows


def _describe_candidate_settings(plan: Plan, candidate: Candidate) -> str:
    settings = [f"micro-batch {plan.micro_batch_size} x {plan.num_microbatches}"]
    if plan.activations.recompute != "none":
        settings.append(f"recompute {plan.activations.recompute}")
    if not candidate.fits:
        settings.append("does not fit")
    return ", ".join(settings)


def list_hardware_rows(cluster: Cluster, advice: PlanAdvice) -> dict[str, str]:
    """The assumptions about devices and links, for a table."""
    hardware = advice.facts.hardware
    rows = {
        "devices": f"{describe_devices(hardware.num_devices, hardware.name)},"
        f" {hardware.devices_per_node} a node",
        "memory": format_bytes(hardware.memory_bytes),
    }
    if hardware.peak_flops:
        rows["peak"] = (
            f"{hardware.peak_flops / 1e12:,.0f} TFLOP/s, dense, in {advice.setup.precision}"
        )
    if hardware.memory_gb_s:
        rows["memory bandwidth"] = f"{hardware.memory_gb_s:,.0f} GB/s"
    for level in cluster.links:
        rows[f"{level.name} links"] = (
            f"{level.gb_s:,.4g} GB/s per device and direction, among {level.num_devices:,} devices"
        )
    if cluster.accelerator is not None:
        rows["data sheet"] = cluster.accelerator.source
    return rows


def list_constant_rows() -> list[tuple[str, str, str]]:
    """(name, value with bounds, source) of every constant of the time model."""
    rows = []
    for name, spec in list_timing_constants().items():
        value = f"{spec.value:g} ({spec.low:g} to {spec.high:g})"
        rows.append((name, value, f"{spec.moves}. {spec.source}"))
    return rows
