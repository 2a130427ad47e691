"""The job of a run that is suspected, as `phalanx verify --job RUN` judges it: at the layout that
the run had, with as little changed as this machine asks for.

Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.core.errors import UsageError
from phalanx.core.units import format_bytes
from phalanx.job.load import load_job_json
from phalanx.job.model import build_model_shape
from phalanx.job.overrides import parse_overrides
from phalanx.job.schema import Job
from phalanx.plan.cluster import Cluster, detect_cluster
from phalanx.plan.plan import Plan
from phalanx.plan.stored_plan import read_stored_plan

AXES_IN_HALVING_ORDER = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
"""In the order in which degrees are halved: replicas are the most alike."""
LAYOUT_KEYS = frozenset(
    {"ranks", *AXES_IN_HALVING_ORDER, "ep", "zero_stage", "schedule", "schedule_file"}
    | {"stages_per_rank", "stage_blocks"}
)
"""Keys of [parallel] that are the run's, whatever else is given."""
RANKS_PER_CORE = 4
MIN_STARTED_RANKS = 8
"""This many ranks are started on any machine."""
FLOAT64_BYTES_PER_PARAM = 48
"""Of a parameter in float64: weight, gradient, two moments, and what they are compared with."""
MAX_PARAMS = 200_000_000
"""As many as `phalanx verify` judges without --shrink."""
LEAST_SEQ_LEN = 64
"""Sequences are not cut shorter than this, whatever they take."""
SEQUENCES_PER_RANK = 2
"""Of a microbatch."""
COPIES_OF_A_HIDDEN_STATE = 40
"""As many hidden states of a token are held for each block until its backward, about."""
FLOPS_PER_CORE = 10 * 60 * 4e9
"""Ten minutes of a core, in float64 and small matmuls."""
PASSES_OF_A_SEQUENCE = 3 * 6 * 2 * 2
"""Microbatches, steps, types (float64 and float32), and the reference beside the layout."""


@dataclass(frozen=True)
class ReducedRunJob:
    """A run's job as it is judged, on `num_ranks` ranks. `changes`: lines about what is not as in
    the run; `needs_small_widths`: fewer blocks alone do not make the model fit. `max_seq_len`: so
    many tokens of a sequence."""

    job: Job
    num_ranks: int
    changes: tuple[str, ...]
    needs_small_widths: bool
    max_seq_len: int


def load_reduced_job_of_run(
    run_dir: Path, overrides: Sequence[str] = (), *, cluster: Cluster | None = None
) -> ReducedRunJob:
    """The job of the run in `run_dir` with `overrides` on top.

    `cluster`: the devices that judge; by default this machine's CPU. Raises UsageError where there
    is no run, or one that was never planned, and for overrides that name a layout; StoredPlanError
    for a plan that no run wrote so.
    """
    if not (run_dir / "job.json").is_file():
        raise UsageError(
            "no run is there", where=str(run_dir), fix="give a directory that phalanx train wrote"
        )
    if not (run_dir / "plan.json").is_file():
        raise UsageError(
            "the run has no plan.json, which says its layout",
            where=str(run_dir),
            fix=f"judge its job in layouts that you name: phalanx verify {run_dir / 'job.json'}"
            " --layouts NAMES",
        )
    _refuse_layout_keys(overrides, run_dir)
    job = load_job_json(run_dir / "job.json", overrides)
    plan = read_stored_plan(run_dir / "plan.json")
    cluster = cluster or detect_cluster("cpu")
    degrees = {axis: int(getattr(plan.layout, axis)) for axis in AXES_IN_HALVING_ORDER}
    most_ranks = cluster.num_devices
    if cluster.device == "cpu":
        most_ranks = max(MIN_STARTED_RANKS, RANKS_PER_CORE * cluster.num_devices)
    fewer = shrink_degrees_to_ranks(degrees, most_ranks)
    changes = []
    if fewer != degrees:
        changes.append(
            f"{math.prod(fewer.values())} ranks in place of {math.prod(degrees.values())}:"
            f" {_describe_degree_changes(degrees, fewer)}"
        )
    body = job.to_json()
    if job.cluster.device == "auto" and plan.device == "cuda":
        # What the run's machine had, which this one may lack.
        body["cluster"]["device"] = plan.device
    is_cut_anew = fewer["pp"] != degrees["pp"]
    body["parallel"] |= _build_layout_keys_of_run(plan, fewer, is_cut_anew=is_cut_anew)
    if not is_cut_anew and load_job_json(run_dir / "job.json").model != job.model:
        # Which blocks the plan gave each stage was said of the run's own model.
        body["parallel"]["stage_blocks"] = job.parallel.stage_blocks
    num_ranks = math.prod(fewer.values())
    num_params, limit = int(plan.num_params), _compute_max_params_in_memory(cluster, num_ranks)
    num_layers = fewest = int(plan.model_shape.num_layers)
    if not job.model.is_foreign:
        fewest = _halve_blocks_to_fit(body, plan, fewer["pp"], limit)
    if fewest != num_layers:
        changes.append(f"{fewest} blocks in place of {num_layers}")
        num_params = _count_params_of_job(body, plan)
    if num_params > limit:
        changes.append(
            f"{num_params:,} parameters, of which {format_bytes(cluster.memory_bytes)} hold"
            f" {limit:,} on {num_ranks} ranks in float64: small widths"
        )
    needs_small_widths = num_params > limit
    max_seq_len = _choose_max_seq_len(
        int(body["data"]["seq_len"]),
        # Small widths have next to none.
        num_params=0 if needs_small_widths else num_params,
        num_layers=fewest,
        vocab_size=int(plan.vocab_size),
        num_ranks=num_ranks,
        cluster=cluster,
    )
    return ReducedRunJob(
        Job.from_json(body), num_ranks, tuple(changes), needs_small_widths, max_seq_len
    )


def _refuse_layout_keys(overrides: Sequence[str], run_dir: Path) -> None:
    """Raise UsageError for overrides that name another layout than the run's, which is judged.
    Blocks of stages may be said of another model, of which the run says nothing."""
    given = parse_overrides(overrides)[0]
    changes_model = any(override.path[0] == "model" for override in given)
    for override in given:
        section, name = map(str, override.path[:2])
        if section != "parallel" or name not in LAYOUT_KEYS:
            continue
        if name == "stage_blocks" and changes_model:
            continue
        raise UsageError(
            f"parallel.{name} has no effect: a run is judged at the layout that it had",
            where=overrides[override.index],
            fix="leave it out, or judge its job in another layout: phalanx verify"
            f" {run_dir / 'job.json'} --layouts NAMES",
        )


def _choose_max_seq_len(
    seq_len: int,
    *,
    num_params: int,
    num_layers: int,
    vocab_size: int,
    num_ranks: int,
    cluster: Cluster,
) -> int:
    """`seq_len`, halved until activations of all ranks and of the reference take a quarter of the
    memory, and all passes ten minutes, by rough estimates of both; at least LEAST_SEQ_LEN."""
    # A block of a decoder has about 12 x dim x dim parameters.
    dim = math.sqrt(num_params / (12 * max(1, num_layers)))
    bytes_per_token = 8 * (COPIES_OF_A_HIDDEN_STATE * num_layers * dim + 3 * vocab_size)
    flops_per_token = 6 * num_params * PASSES_OF_A_SEQUENCE
    while seq_len > LEAST_SEQ_LEN:
        tokens = SEQUENCES_PER_RANK * seq_len * num_ranks
        is_held = 2 * tokens * bytes_per_token <= cluster.memory_bytes / 4
        if is_held and tokens * flops_per_token <= FLOPS_PER_CORE * cluster.num_devices:
            break
        seq_len = max(LEAST_SEQ_LEN, seq_len // 2)
    return seq_len


def shrink_degrees_to_ranks(degrees: dict[str, int], most_ranks: int) -> dict[str, int]:
    """The degrees with at most `most_ranks` ranks, if that can be: each that was above 1 stays
    above it, so that every axis of the run is judged."""
    fewer = dict(degrees)
    for axis in AXES_IN_HALVING_ORDER:
        while math.prod(fewer.values()) > most_ranks and fewer[axis] > 2:
            fewer[axis] = _find_next_smaller_divisor(fewer[axis])
    return fewer


def _find_next_smaller_divisor(degree: int) -> int:
    """The largest divisor of `degree` below it, at least 2."""
    return next((d for d in range(degree // 2, 1, -1) if degree % d == 0), 2)


def _build_layout_keys_of_run(
    plan: Plan, degrees: dict[str, int], *, is_cut_anew: bool
) -> dict[str, Any]:
    """Keys of [parallel] that name the layout of the run, which its job may have left open."""
    pinned: dict[str, Any] = {**degrees, "ranks": math.prod(degrees.values())}
    if plan.layout.ep > 1:
        pinned["ep"] = math.gcd(plan.layout.ep, degrees["dp_shard"] * degrees["cp"])
    if degrees["dp_shard"] * degrees["cp"] > 1 and plan.parallel.zero_stage:
        pinned["zero_stage"] = plan.parallel.zero_stage
    elif degrees["dp_shard"] > 1:
        # Whole copies, of which ep spreads the experts alone: a job names these by ep.
        pinned |= dict.fromkeys(("dp_replicate", "dp_shard", "zero_stage"))
    if degrees["pp"] > 1 and plan.parallel.schedule:
        pinned["schedule"] = plan.parallel.schedule
    if degrees["pp"] > 1:
        pinned["stage_blocks"] = plan.parallel.stage_blocks
    if is_cut_anew:
        # Which blocks each stage has was said of another number of stages.
        pinned |= {"stage_blocks": (), "stages_per_rank": None}
    return pinned


def _compute_max_params_in_memory(cluster: Cluster, num_ranks: int) -> int:
    """The most parameters that half of the memory holds on all ranks and in the reference."""
    in_memory = cluster.memory_bytes // 2 // (FLOAT64_BYTES_PER_PARAM * (num_ranks + 1))
    return min(MAX_PARAMS, in_memory)


def _halve_blocks_to_fit(body: dict[str, Any], plan: Plan, num_stages: int, limit: int) -> int:
    """Halve the blocks of a built-in model in `body` until it fits. Two stay, and of a pipeline
    two for each stage. Returns how many there are."""
    num_layers = int(plan.model_shape.num_layers)
    least = 2
    if num_stages > 1:
        least = 2 * num_stages * plan.parallel.stages_per_rank
    num_params = int(plan.num_params)
    while num_params > limit and num_layers > least:
        num_layers = max(least, num_layers // 2)
        body["model"]["num_layers"] = num_layers
        body["parallel"]["stage_blocks"] = ()
        num_params = _count_params_of_job(body, plan)
    return num_layers


def _count_params_of_job(body: dict[str, Any], plan: Plan) -> int:
    return int(build_model_shape(Job.from_json(body), plan.vocab_size).num_params)


def _describe_degree_changes(before: dict[str, int], after: dict[str, int]) -> str:
    return ", ".join(
        f"{axis} {before[axis]} -> {after[axis]}"
        for axis in AXES_IN_HALVING_ORDER
        if before[axis] != after[axis]
    )
