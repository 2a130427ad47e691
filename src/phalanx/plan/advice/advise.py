"""`advise_on_plan`: the time, the rules and the tables of one plan, from its job and cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from phalanx.core.errors import PhalanxError
from phalanx.job.schema import Job
from phalanx.plan.advice.check_rules import evaluate_rules_of_thumb
from phalanx.plan.advice.decision_tables import TableAnswer, look_up_decision_tables
from phalanx.plan.advice.facts import BatchFacts, HardwareFacts, ModelFacts, PlanFacts
from phalanx.plan.advice.rule import RuleVerdict
from phalanx.plan.cluster import Cluster, rank_memory_bytes
from phalanx.plan.pipeline.bubble import find_busiest_rank
from phalanx.plan.pipeline.costs import compute_model_part_costs
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.plan.search.step_times import (
    build_machine_rates,
    build_step_setup,
    estimate_planned_step,
)
from phalanx.plan.timing.block import BlockTimeEstimator
from phalanx.plan.timing.columns import build_setup_columns
from phalanx.plan.timing.constants import load_timing_constants
from phalanx.plan.timing.machine import LinkRate
from phalanx.plan.timing.matmul import choose_peak_precision
from phalanx.plan.timing.setup import StepSetup
from phalanx.plan.timing.step import estimate_step_times
from phalanx.plan.timing.step_time import StepTime

# Enough for any plan: what it needs is asked, not whether it fits.
UNLIMITED_GIB = 1e9
# Times the tokens of a micro-batch at which the last wave of tiles no longer counts.
SATURATING_TOKENS_FACTOR = 64
GB = 1e9


@dataclass(frozen=True)
class PlanAdvice:
    """The advice on a plan: its facts, its time (None where nobody can predict it), the
    verdicts of the rules, and what the decision tables say."""

    facts: PlanFacts
    setup: StepSetup
    time: StepTime | None
    verdicts: tuple[RuleVerdict, ...]
    answers: tuple[TableAnswer, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "time": self.time and self.time.to_json(),
            "rules": [verdict.to_json() for verdict in self.verdicts],
            "decision_tables": [answer.to_json() for answer in self.answers],
        }


def advise_on_plan(
    job: Job,
    plan: Plan,
    cluster: Cluster,
    *,
    time: StepTime | None = None,
    goodput: float | None = None,
    spot_cost_ratio: float | None = None,
) -> PlanAdvice:
    """The advice on `plan`, which was made of `job` for `cluster`.

    `time` is predicted where it is not given. Plans once more for what other choices would need.
    """
    setup, machine = build_step_setup(job, plan), build_machine_rates(cluster)
    if time is None and machine is not None:
        time = estimate_planned_step(job, plan, plan.model_shape, machine)
    facts = collect_plan_facts(job, plan, cluster, setup, time)
    facts = replace(facts, goodput=goodput, spot_cost_ratio=spot_cost_ratio)
    return PlanAdvice(
        facts,
        setup,
        time,
        tuple(evaluate_rules_of_thumb(facts)),
        tuple(look_up_decision_tables(facts)),
    )


def collect_plan_facts(
    job: Job, plan: Plan, cluster: Cluster, setup: StepSetup, time: StepTime | None
) -> PlanFacts:
    """Everything that rules read of a plan."""
    terms_s: Mapping[str, float] = {}
    if time is not None:
        terms_s = time.terms
    activations_are_known = plan.model_shape.activations is not None
    facts = PlanFacts(
        collect_model_facts(job, plan),
        collect_hardware_facts(job, plan, cluster),
        plan.layout,
        BatchFacts(
            # As the step's time counts them: of an image its patches.
            plan.model_shape.count_sample_tokens(job.data.seq_len),
            plan.micro_batch_size,
            plan.num_microbatches,
            plan.global_batch_size,
        ),
        zero_stage=plan.chosen.zero_stage,
        element_bytes=4 if plan.precision == "fp32" else 2,
        stages_per_rank=setup.stages_per_rank,
        sequence_parallel=setup.sequence_parallel,
        recompute=plan.activations.recompute,
        optimizer=job.optim.kind,
        lr_scaling=job.optim.lr_scaling,
        reference_batch_size=job.optim.reference_batch_size,
        offload=plan.parallel.offload,
        terms_s=terms_s,
        peak_bytes=plan.chosen.total_bytes if activations_are_known else None,
        capacity_bytes=plan.capacity_bytes,
    )
    data_parallel_bytes, data_parallel_step_s = _predict_zero3_bytes_and_seconds(job, plan, cluster)
    stage_1_bytes, stage_1_step_s = _predict_zero1_bytes_and_seconds(job, plan, cluster)
    return replace(
        facts,
        stage_1_bytes=stage_1_bytes,
        stage_1_step_s=stage_1_step_s,
        bubble=_predict_pipeline_bubble(plan),
        busiest_stage_ratio=_compute_busiest_rank_ratio(job, plan),
        wave_loss=_estimate_wave_quantization_loss(plan, cluster, setup),
        single_domain_efficiency=_compute_step_ratio_with_fast_links(plan, cluster, setup, time),
        data_parallel_bytes=data_parallel_bytes,
        data_parallel_step_s=data_parallel_step_s,
        smaller_zero_bytes=_find_lower_zero_stage_bytes(plan),
        plain_bytes=_predict_bytes_without_recompute(job, plan, cluster),
    )


def collect_model_facts(job: Job, plan: Plan) -> ModelFacts:
    """The sizes of a plan's model."""
    shape = plan.model_shape
    work = shape.work(job.data.seq_len)
    heads, experts = shape.heads, shape.experts
    name = str(job.model.preset or job.model.kind)
    return ModelFacts(
        name=name,
        num_params=plan.num_params,
        num_active_params=shape.num_active_params,
        num_layers=shape.num_layers,
        hidden_size=work.dim if work is not None else 0,
        vocab_size=plan.vocab_size,
        num_query_heads=heads.queries if heads is not None else None,
        num_kv_heads=heads.keys if heads is not None else None,
        num_experts=experts.count if experts is not None else 0,
        experts_per_token=experts.per_token if experts is not None else 0,
        reads_images=shape.reads_images,
    )


def collect_hardware_facts(job: Job, plan: Plan, cluster: Cluster) -> HardwareFacts:
    """The devices and links of a cluster, as rules read them."""
    memory_bytes = rank_memory_bytes(job, cluster, plan.world_size)
    hardware = HardwareFacts(
        cluster.name or cluster.device,
        plan.world_size,
        # 0 where nobody says: one machine.
        min(cluster.devices_per_node or plan.world_size, plan.world_size),
        memory_bytes,
    )
    machine = build_machine_rates(cluster)
    if machine is None:
        return hardware
    network_gb_s = None
    if len(machine.links) > 1:
        network_gb_s = min(link.effective_bytes_s for link in machine.links[1:]) / GB
    precision = build_step_setup(job, plan).precision
    return replace(
        hardware,
        link_domain=cluster.link_domain,
        peak_flops=machine.accelerator.peak_flops(choose_peak_precision(machine, precision)),
        memory_gb_s=machine.accelerator.memory_gb_s,
        link_gb_s=machine.links[0].effective_bytes_s / GB,
        network_gb_s=network_gb_s,
    )


def _predict_pipeline_bubble(plan: Plan) -> float | None:
    if plan.pipeline is None:
        return None
    return plan.pipeline.estimate_bubble()


def _compute_busiest_rank_ratio(job: Job, plan: Plan) -> float | None:
    if plan.pipeline is None or plan.model_shape.flops(job.data.seq_len) is None:
        return None
    costs = compute_model_part_costs(job, plan.model_shape).layer_costs
    stages = plan.pipeline.stages
    _, ratio = find_busiest_rank(costs.sum_by_stage(stages), plan.pipeline.rank_of_stage)
    return float(ratio)


def _estimate_wave_quantization_loss(
    plan: Plan, cluster: Cluster, setup: StepSetup
) -> float | None:
    """The part of the blocks' products that would be saved at the speed of many tokens."""
    machine, work = build_machine_rates(cluster), plan.model_shape.work(setup.seq_len)
    if machine is None or work is None:
        return None
    seconds = []
    for times in (1, SATURATING_TOKENS_FACTOR):
        many = replace(setup, micro_batch_size=setup.micro_batch_size * times)
        timer = BlockTimeEstimator(
            machine,
            setup.precision,
            build_setup_columns([many]),
            load_timing_constants(),
            work.num_tokens,
        )
        total = 0.0
        for block, count in work.block_kinds:
            for matmul in block.matmuls:
                total += count * float(timer.estimate_block_matmul_times(matmul)[0][0])
        seconds.append(total / times)
    return max(0.0, 1 - seconds[1] / seconds[0])


def _compute_step_ratio_with_fast_links(
    plan: Plan, cluster: Cluster, setup: StepSetup, time: StepTime | None
) -> float | None:
    """Seconds of the step with every link as fast as inside a node, in parts of the predicted."""
    machine = build_machine_rates(cluster)
    if machine is None or time is None:
        return None
    inner = LinkRate(2**31, machine.links[0].effective_bytes_s)
    with_fast_links = estimate_step_times(plan.model_shape, replace(machine, links=(inner,)), setup)
    return min(1.0, with_fast_links.total_s / time.total_s)


def _predict_zero3_bytes_and_seconds(
    job: Job, plan: Plan, cluster: Cluster
) -> tuple[int | None, float | None]:
    """(bytes per rank, seconds of a step) of ZeRO-3 over all ranks, for a plan with model
    parallelism; None where there is no such plan, or its time is not predicted."""
    layout = plan.layout
    if max(layout.pp, layout.cp, layout.tp, layout.ep) == 1:
        return None, None
    alone = dict.fromkeys(
        ("tp", "pp", "cp", "ep", "dp_replicate", "dp_shard", "schedule", "schedule_file",
         "sequence_parallel", "stages_per_rank")
    )  # fmt: skip
    changes = {"parallel": {**alone, "zero_stage": 3, "stage_blocks": ()}}
    return _predict_bytes_and_seconds(job, plan, cluster, changes)


def _predict_zero1_bytes_and_seconds(
    job: Job, plan: Plan, cluster: Cluster
) -> tuple[int | None, float | None]:
    """(bytes per rank, seconds of a step) of a pipeline of a higher ZeRO stage with stage 1, like
    `_predict_zero3_bytes_and_seconds`."""
    if plan.layout.pp == 1 or plan.chosen.zero_stage <= 1:
        return None, None
    return _predict_bytes_and_seconds(job, plan, cluster, {"parallel": {"zero_stage": 1}})


def _predict_bytes_and_seconds(
    job: Job, plan: Plan, cluster: Cluster, changes: Mapping[str, Mapping[str, Any]]
) -> tuple[int | None, float | None]:
    other = plan_changed_job(job, plan, cluster, changes)
    if other is None:
        return None, None
    machine, step_s = build_machine_rates(cluster), None
    if machine is not None:
        time = estimate_planned_step(
            change_job_keys(job, plan, changes), other, plan.model_shape, machine
        )
        step_s = None if time is None else time.total_s
    return other.chosen.total_bytes, step_s


def _find_lower_zero_stage_bytes(plan: Plan) -> int | None:
    """Bytes per rank of the ZeRO stage below, where the plan weighed it."""
    for candidate in plan.alternatives:
        if candidate.zero_stage == plan.chosen.zero_stage - 1:
            return candidate.total_bytes
    return None


def _predict_bytes_without_recompute(job: Job, plan: Plan, cluster: Cluster) -> int | None:
    """Bytes per rank without recomputation, for a plan that has some; else None."""
    if plan.activations.recompute == "none":
        return None
    plain = {"recompute": "none", "recompute_every": None, "recompute_budget_gib": None}
    other = plan_changed_job(job, plan, cluster, {"train": plain})
    if other is None:
        return None
    return other.chosen.total_bytes


def plan_changed_job(
    job: Job, plan: Plan, cluster: Cluster, changes: Mapping[str, Mapping[str, Any]]
) -> Plan | None:
    """The plan of the job with other values of some keys, however much memory it needs; None where
    that is no plan."""
    unlimited = replace(cluster, memory_bytes=round(UNLIMITED_GIB * 2**30))
    try:
        return make_plan(
            change_job_keys(job, plan, changes),
            cluster=unlimited,
            shape=plan.model_shape,
            is_explained=False,
            weighs_alternatives=False,
        )
    except PhalanxError:
        return None


def change_job_keys(job: Job, plan: Plan, changes: Mapping[str, Mapping[str, Any]]) -> Job:
    """The job with other values of some keys, and as many ranks as the plan has."""
    sections: dict[str, dict[str, Any]] = {name: dict(keys) for name, keys in changes.items()}
    sections["parallel"] = {"ranks": plan.world_size} | sections.get("parallel", {})
    # A changed plan is asked what it needs, not whether that fits.
    sections["cluster"] = sections.get("cluster", {}) | {"memory_gib": None}
    update = {}
    for name, keys in sections.items():
        update[name] = getattr(job, name).model_copy(update=keys)
    return job.model_copy(update=update)
