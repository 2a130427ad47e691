"""Predicted step times of screened layouts, and of one layout exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np

from phalanx.core.errors import LayoutError
from phalanx.job.costs import ModelCosts
from phalanx.job.schema import Job
from phalanx.job.work import ModelWork
from phalanx.plan.cluster import Cluster
from phalanx.plan.plan import Plan
from phalanx.plan.search.simulated_bubble import add_simulated_bubble
from phalanx.plan.search.space import (
    OFFLOAD_CHOICES,
    RECOMPUTE_CHOICES,
    SEARCHED_SCHEDULES,
    LayoutRows,
)
from phalanx.plan.timing import collectives
from phalanx.plan.timing.columns import (
    SetupColumns,
    build_setup_columns,
    compute_recomputed_shares,
)
from phalanx.plan.timing.constants import load_timing_constants
from phalanx.plan.timing.machine import LinkRate, MachineRates
from phalanx.plan.timing.matmul import count_activation_bytes
from phalanx.plan.timing.setup import (
    PHALANX_COMPILED_STACK,
    PHALANX_STACK,
    Precision,
    Recompute,
    SoftwareStack,
    StepSetup,
)
from phalanx.plan.timing.step import StepTimeColumns, estimate_step_columns
from phalanx.plan.timing.step_time import StepTime

GB = 1e9


def build_machine_rates(cluster: Cluster) -> MachineRates | None:
    """The rates of a cluster that the time model reads; None where its devices are not in the
    table."""
    if cluster.accelerator is None:
        return None
    links = [
        LinkRate(
            level.num_devices,
            level.gb_s * GB,
            level.oversubscription,
            (level.latency_us or 0.0) / 1e6,
        )
        for level in cluster.links
    ]
    if not links:
        links = [LinkRate(cluster.num_devices, cluster.accelerator.link_gb_s * GB)]
    per_node = cluster.devices_per_node or cluster.num_devices
    power = 1.0
    if cluster.watts and cluster.accelerator.watts:
        power = min(1.0, cluster.watts / cluster.accelerator.watts)
    return MachineRates(cluster.accelerator, tuple(links), per_node, power)


def choose_software_stack(job: Job) -> SoftwareStack:
    """The software stack with which phalanx computes this job."""
    if job.train.compile:
        return PHALANX_COMPILED_STACK
    return PHALANX_STACK


def get_sample_work(job: Job, shape: ModelCosts) -> ModelWork | None:
    """The work of one sample of the job; None where only a trace of the module says."""
    return shape.work(job.data.seq_len)


def predict_row_times(
    job: Job, work: ModelWork, machine: MachineRates, rows: LayoutRows, *, sequence_parallel: bool
) -> StepTimeColumns:
    """Seconds of a step of each of `rows`. `sequence_parallel`: tp cuts the sequence, too."""
    columns = _build_setup_columns(job, rows, sequence_parallel=sequence_parallel)
    return estimate_step_columns(work, machine, cast(Precision, job.precision.compute), columns)


def _build_setup_columns(job: Job, rows: LayoutRows, *, sequence_parallel: bool) -> SetupColumns:
    """The columns of `rows`: those of one setup of the job, with the rows' own in their place."""
    basis = StepSetup(
        seq_len=job.data.seq_len,
        stack=choose_software_stack(job),
        sequence_parallel=sequence_parallel,
        cp_attention=job.parallel.cp_attention,
    )
    columns: dict[str, Any] = {}
    for name, column in vars(build_setup_columns([basis])).items():
        columns[name] = np.broadcast_to(column, (len(rows),))
    for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "zero_stage"):
        columns[name] = getattr(rows, name).astype(np.float64)
    for name in ("micro_batch_size", "num_microbatches", "stages_per_rank"):
        columns[name] = getattr(rows, name).astype(np.float64)
    shares = np.array(
        [
            compute_recomputed_shares(
                "full" if mode == "mixed" else mode, 1 / interval, "selective"
            )
            for mode, interval in RECOMPUTE_CHOICES
        ]
    )[rows.recompute]
    for index, part in enumerate(("matmul", "attention", "elementwise")):
        columns[f"recomputed_{part}"] = shares[:, index]
    is_fsdp = rows.zero_stage >= 2
    names = np.array(SEARCHED_SCHEDULES)[rows.schedule]
    offloads = np.array(OFFLOAD_CHOICES)[rows.offload]
    # FSDP gathers what it computes with; copies and ZeRO 1 have fp32 weights.
    gathered = 2.0
    if job.precision.compute == "fp32":
        gathered = 4.0
    columns |= {
        "accumulates_sharded": rows.accumulates_sharded > 0,
        "offloads_optimizer": offloads != "none",
        "offloads_parameters": offloads == "parameters",
        "gather_bytes": np.where(is_fsdp, gathered, 4.0),
        "overlaps_reduce": is_fsdp | (rows.pp == 1),
        "overlaps_gather": is_fsdp,
        "is_gpipe": names == "gpipe",
        "is_interleaved": rows.stages_per_rank > 1,
        "deferred_weights": np.where(names == "interleaved-zero-bubble", 2.0, 0.0),
        "is_v_shaped": (names == "zb-v") | (names == "dualpipe-v"),
    }
    return SetupColumns(**columns)


def estimate_planned_step(
    job: Job, plan: Plan, shape: ModelCosts, machine: MachineRates
) -> StepTime | None:
    """The predicted seconds of a step of an exact plan; None where nobody knows the model's
    work."""
    work = get_sample_work(job, shape)
    if work is None:
        return None
    setup = build_step_setup(job, plan)
    columns = build_setup_columns([setup])
    try:
        times = estimate_step_columns(work, machine, setup.precision, columns)
    except LayoutError:
        return None
    time = times.take(0)
    if plan.pipeline is None:
        return time
    num_bytes = count_activation_bytes(setup.precision) * plan.micro_batch_size
    num_bytes *= work.num_tokens * work.dim
    parts = plan.layout.cp * (plan.layout.tp if setup.sequence_parallel else 1)
    constants = load_timing_constants()
    stride = columns.tp * columns.cp * columns.data_parallel_size
    send_s = collectives.p2p_send_s(
        np.array([num_bytes / parts]), stride, columns.pp, machine, constants
    )
    return add_simulated_bubble(time, plan.pipeline, plan.num_microbatches, float(send_s[0]))


def build_step_setup(job: Job, plan: Plan) -> StepSetup:
    """The setup that an exact plan of `job` runs."""
    pipeline, stack = plan.pipeline, choose_software_stack(job)
    mode, share, mode_of_others = _summarise_recompute(plan)
    schedule, per_rank = "1f1b", 1
    if pipeline is not None:
        schedule = pipeline.schedule_name
        per_rank = len(pipeline.rank_of_stage) // pipeline.num_ranks
    zero_stage = plan.chosen.zero_stage
    is_fsdp = zero_stage >= 2
    # Copies and ZeRO 1 reduce gradients after a pipeline, and gather after the update.
    stack = replace(
        stack,
        overlaps_reduce=is_fsdp or plan.layout.pp == 1,
        overlaps_gather=is_fsdp,
        gather_bytes=2 if is_fsdp and plan.precision != "fp32" else stack.gather_bytes,
    )
    return StepSetup(
        plan.layout,
        zero_stage,
        plan.micro_batch_size,
        plan.num_microbatches,
        plan.seq_len,
        cast(Precision, plan.precision),
        schedule,
        per_rank,
        mode,
        share,
        sequence_parallel=bool(plan.parallel.sequence_parallel),
        recompute_of_others=mode_of_others,
        cp_attention=job.parallel.cp_attention,
        accumulate=job.parallel.accumulate,
        offload=job.parallel.offload,
        stack=stack,
    )


def _summarise_recompute(plan: Plan) -> tuple[Recompute, float, Recompute]:
    """A mode of recompute, the part of the blocks that has it, and the mode of the others: as plans
    mix them, some in full and all others selectively, or one mode and nothing."""
    segments, num_layers = plan.activations.recompute_segments, plan.model_shape.num_layers
    if not segments or not num_layers:
        return "none", 0.0, "none"
    num_full = sum(segment.num_blocks for segment in segments if segment.mode == "full")
    num_selective = sum(segment.num_blocks for segment in segments if segment.mode != "full")
    if num_full and num_selective:
        return "full", num_full / num_layers, "selective"
    if num_full:
        return "full", num_full / num_layers, "none"
    return "selective", num_selective / num_layers, "none"
