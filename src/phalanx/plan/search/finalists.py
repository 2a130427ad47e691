"""Layouts that a screen let through, planned exactly: what is proposed is what training accepts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx.core.errors import JobError, LayoutError
from phalanx.job.copies import apply_job_keys
from phalanx.job.costs import ModelCosts
from phalanx.job.schema import Job
from phalanx.plan.candidates import NoFitError
from phalanx.plan.cluster import Cluster
from phalanx.plan.host_memory import HostMemoryError
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.plan.predicted_time import predict_step_time
from phalanx.plan.search.result import PeakMemory, RankedLayout
from phalanx.plan.search.space import (
    OFFLOAD_CHOICES,
    RECOMPUTE_CHOICES,
    SEARCHED_SCHEDULES,
    LayoutRows,
)

TOO_MUCH_MEMORY_REASON = "needs more memory than a rank has"
TOO_MUCH_HOST_MEMORY_REASON = "offloads more than a node's host memory holds"


def list_job_keys_of_row(job: Job, rows: LayoutRows, row: int) -> dict[str, Any]:
    """The keys that give a job the layout `row`, by dotted key; what it says already and what
    is the default is left out."""
    shares = int(rows.dp_replicate[row] * rows.dp_shard[row])
    stage, pp, ep = (int(column[row]) for column in (rows.zero_stage, rows.pp, rows.ep))
    degrees = {axis: int(getattr(rows, axis)[row]) for axis in ("tp", "pp", "cp", "ep")}
    num_ranks = shares * degrees["tp"] * pp * degrees["cp"]
    keys: dict[str, Any] = {"parallel.ranks": num_ranks}
    keys |= {f"parallel.{axis}": degree for axis, degree in degrees.items() if degree > 1}
    if stage > 0:
        keys["parallel.zero_stage"] = stage
        keys["parallel.dp_replicate"] = int(rows.dp_replicate[row])
        keys["parallel.dp_shard"] = int(rows.dp_shard[row])
    elif shares > 1 and ep == 1:
        keys["parallel.dp_replicate"] = shares
    if pp > 1 and job.parallel.schedule_file is None:
        keys["parallel.schedule"] = SEARCHED_SCHEDULES[rows.schedule[row]]
        keys["parallel.stages_per_rank"] = int(rows.stages_per_rank[row])
    if rows.accumulates_sharded[row]:
        keys["parallel.accumulate"] = "sharded"
    if rows.offload[row]:
        keys["parallel.offload"] = OFFLOAD_CHOICES[rows.offload[row]]
    keys["train.micro_batch_size"] = int(rows.micro_batch_size[row])
    mode, recompute_every = RECOMPUTE_CHOICES[rows.recompute[row]]
    if mode != job.train.recompute and "recompute" not in job.train.model_fields_set:
        keys["train.recompute"] = mode
        if mode == "mixed":
            keys["train.recompute_every"] = recompute_every
    return keys


def describe_layout_family(layout: Layout, zero_stage: int, offload: str) -> str:
    """The mechanisms of a layout in words: "tp + pp + zero1"."""
    parts = [axis for axis in ("tp", "pp", "cp", "ep") if getattr(layout, axis) > 1]
    if zero_stage >= 2 and layout.dp_replicate > 1:
        parts.append(f"hsdp (zero{zero_stage})")
    elif zero_stage > 0:
        parts.append(f"zero{zero_stage}")
    elif layout.data_parallel_size > 1:
        parts.append("ddp")
    if offload != "none":
        parts.append("offload")
    return " + ".join(parts) or "one rank"


@dataclass
class FinalistPlanner:
    """Plans layouts of one job exactly, and counts why some are refused."""

    job: Job
    shape: ModelCosts
    cluster: Cluster
    vocab_size: int | None = None
    refused: Counter[str] = field(default_factory=Counter)
    smallest_shortage: NoFitError | None = None
    """Of the layouts refused for their memory that which needs least."""
    num_shortages: int = 0
    """Layouts refused for their memory: `smallest_shortage` is the least of so many."""
    smallest_host_shortage: HostMemoryError | None = None
    """Of the layouts refused for what they offload that which offloads least to a node."""
    num_host_shortages: int = 0
    _refused_keys: set[tuple[tuple[str, Any], ...]] = field(default_factory=set, repr=False)

    def plan_layout(self, keys: Mapping[str, Any]) -> RankedLayout | None:
        """The layout of the job with `keys`; None, and a count more, where a plan refuses it. A
        layout that was refused counts once, however often it is tried."""
        identity = tuple(sorted(keys.items()))
        if identity in self._refused_keys:
            return None
        job = apply_job_keys(self.job, keys)
        try:
            plan = make_plan(
                job,
                cluster=self.cluster,
                shape=self.shape,
                vocab_size=self.vocab_size,
                is_explained=False,
                weighs_alternatives=False,
            )
        except (LayoutError, JobError) as error:
            self._keep_smallest_shortage(error)
            self.refused[_shorten_refusal_reason(error)] += 1
            self._refused_keys.add(identity)
            return None
        if plan.chosen.zero_stage != keys.get("parallel.zero_stage", plan.chosen.zero_stage):
            self.refused["is planned as another layout"] += 1
            return None
        return self._build_ranked_layout(job, plan, keys)

    def _keep_smallest_shortage(self, error: LayoutError | JobError) -> None:
        if isinstance(error, NoFitError):
            self.num_shortages += 1
            smallest = self.smallest_shortage
            if smallest is None or error.needed_bytes < smallest.needed_bytes:
                self.smallest_shortage = error
        elif isinstance(error, HostMemoryError):
            self.num_host_shortages += 1
            smallest_host = self.smallest_host_shortage
            if smallest_host is None or error.needed_bytes < smallest_host.needed_bytes:
                self.smallest_host_shortage = error

    def _build_ranked_layout(self, job: Job, plan: Plan, keys: Mapping[str, Any]) -> RankedLayout:
        time = predict_step_time(job, plan, self.shape, self.cluster)
        pipeline, chosen = plan.pipeline, plan.chosen
        rank = 0
        by_rank: tuple[dict[str, int], ...] = ()
        if pipeline is not None and pipeline.rank_memory:
            by_rank = pipeline.rank_memory
            totals = [sum(categories.values()) for categories in by_rank]
            rank = totals.index(max(totals))
        memory = PeakMemory(
            chosen.predicted_bytes,
            plan.capacity_bytes,
            rank,
            by_rank,
            chosen.phases,
            chosen.host_bytes,
        )
        schedule, stages = "", 1
        if pipeline is not None:
            schedule = pipeline.schedule_name
            stages = len(pipeline.rank_of_stage) // pipeline.num_ranks
        ranked = RankedLayout(
            describe_layout_family(plan.layout, chosen.zero_stage, job.parallel.offload),
            plan.layout,
            chosen.zero_stage,
            plan.micro_batch_size,
            plan.num_microbatches,
            schedule,
            stages,
            _describe_recompute(job),
            job.parallel.offload,
            dict(keys),
            memory,
            time,
        )
        if time is None:
            return ranked
        peak_flops = 0.0
        if self.cluster.accelerator is not None:
            peak_flops = self.cluster.accelerator.peak_flops(plan.precision)
        return add_throughput(ranked, job, self.shape, peak_flops)


def add_throughput(
    ranked: RankedLayout, job: Job, shape: ModelCosts, peak_flops: float
) -> RankedLayout:
    """`ranked` with its tokens a second and its share of the peak."""
    assert ranked.time is not None
    num_tokens = job.train.global_batch_size * shape.count_sample_tokens(job.data.seq_len)
    per_device = num_tokens / ranked.time.total_s / ranked.layout.world_size
    flops = shape.flops_per_token(job.data.seq_len)
    mfu = None
    if flops is not None and peak_flops:
        training_flops_per_token = flops["training"]
        mfu = per_device * training_flops_per_token / peak_flops
    return RankedLayout(**{**vars(ranked), "mfu": mfu, "tokens_per_s_per_device": per_device})


def _shorten_refusal_reason(error: LayoutError | JobError) -> str:
    """The reason in so few words that equal reasons count together."""
    if isinstance(error, NoFitError):
        return TOO_MUCH_MEMORY_REASON
    if isinstance(error, HostMemoryError):
        return TOO_MUCH_HOST_MEMORY_REASON
    return str(error).partition(";")[0].partition(" (")[0][:120]


def _describe_recompute(job: Job) -> str:
    """The mode of recomputation, with its interval where it has one: "mixed (1 of 4 in full)"."""
    mode, recompute_every = job.train.recompute, job.train.recompute_every
    if mode == "mixed":
        return f"{mode} (1 of {recompute_every} in full)"
    return mode
