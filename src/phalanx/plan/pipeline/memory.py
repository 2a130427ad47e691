"""Bytes of each rank of a pipeline, by category, from what its stages hold and how many
microbatches are in flight."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from phalanx.job import counts
from phalanx.job.shape import ModelShape
from phalanx.plan import activations
from phalanx.plan.activations import block_mask_bytes, shared_mask_bytes
from phalanx.plan.memory import (
    LOOKED_UP_BYTES,
    StateBytes,
    allocator_gradient_bytes,
    count_segment_bytes,
    loss_bytes,
    peak_of_segments,
    place_on_device,
    state_bytes,
    uneven_share,
)
from phalanx.plan.pipeline.costs import part_params
from phalanx.plan.pipeline.pipeline_plan import Pipeline
from phalanx.plan.pipeline.schedule import Schedule
from phalanx.plan.pipeline.simulate import peak_bytes
from phalanx.plan.workload import Workload, shard_shape

ASKED_FOR = 2  # messages that a rank has room for before it needs them


@dataclass(frozen=True)
class StageBytes:
    """Of one microbatch in one stage.

    `kept` from its forward to its backward; `redone` on top in its backward: what that recomputes,
    and masks; `for_weights` between the two halves of a backward.
    """

    kept: int
    redone: int
    for_weights: int


def pipeline_memory(
    shape: ModelShape,
    work: Workload,
    pipeline: Pipeline,
    zero_stage: int,
    dp_size: int,
    device: str,
    num_shares: int,
) -> tuple[dict[str, int], ...]:
    """Of each pipeline rank, on top of interpreter and torch.

    Of a user's own module only the states are known.

    `dp_size`: ranks that share one copy of a stage; `num_shares`: all that hold the same stages,
    and save them.
    """
    shape = shard_shape(shape, work.tp, work.rules)
    params = part_params(shape, pipeline.first_stage, pipeline.last_stage)
    here = part_params(shape, pipeline.first_stage, pipeline.last_stage, work.ep)
    schedule = pipeline.schedule()
    kept = rank_activations(shape, work, pipeline) if shape.is_known else ()
    staging = rank_staging(shape, work, pipeline, num_shares)
    share = uneven_share(shape, zero_stage, dp_size, work.ep)
    found = []
    for rank in range(pipeline.num_ranks):
        held = pipeline.stages_of(rank)
        whole, own = (of.of_stages(pipeline.stages, held) for of in (params, here))
        spread = sum(counts.spread_params(shape, *pipeline.stages.ranges[stage]) for stage in held)
        memory = _states(whole, own, work, zero_stage, dp_size, spread * share)
        if kept:
            memory["activations"] = kept[rank]
            memory["loss"] = _loss(shape, work) if pipeline.num_stages - 1 in held else 0
            memory["communication"] += _messages(schedule, rank, sent_bytes(shape, work))
        if device == "cpu" and work.copies_state:
            memory["staging"] = staging[rank]
        freed = allocator_gradient_bytes(shape, work, zero_stage, accumulates=True) if kept else 0.0
        found.append(place_on_device(memory, work, device, freed))
    return tuple(found)


@lru_cache(maxsize=32)
def rank_activations(shape: ModelShape, work: Workload, pipeline: Pipeline) -> tuple[int, ...]:
    """Of each pipeline rank, at the worst moment: all microbatches in flight, and what is redone
    of one of them."""
    stages = [stage_bytes(shape, work, pipeline, stage) for stage in range(pipeline.num_stages)]
    peaks = peak_bytes(
        pipeline.schedule(), [s.kept for s in stages], [s.for_weights for s in stages]
    )
    redone = (
        max(stages[stage].redone for stage in pipeline.stages_of(rank))
        for rank in range(pipeline.num_ranks)
    )
    return tuple(peak + again for peak, again in zip(peaks, redone, strict=True))


def sent_bytes(shape: ModelShape, work: Workload) -> int:
    """Of what a stage hands on of one microbatch, and of its gradient."""
    return work.tokens * shape.dim * work.compute_bytes // work.sequence_parts


def stage_bytes(shape: ModelShape, work: Workload, pipeline: Pipeline, stage: int) -> StageBytes:
    """Of one rank's part of a built-in model (`shard_shape`).

    Segments of recompute end where stages do.
    """
    c, tokens, last = work.compute_bytes, work.tokens, pipeline.num_stages - 1
    begin, end = pipeline.stages.ranges[stage]
    kept, redone = count_segment_bytes(shape, work, begin, end)
    # Masks and tables of angles are made in every stage: a user's forward begins in each of them.
    outside = shared_mask_bytes(shape, work)
    outside += tokens * activations.table_bytes(shape)
    if stage == 0:
        outside += (
            work.micro_batch_size * activations.image_bytes(shape, c) if shape.reads_images else 0
        )
        outside += tokens * LOOKED_UP_BYTES if work.tp > 1 and not shape.reads_images else 0
    outside += _of_the_head(shape, work) if stage == last else sent_bytes(shape, work)
    first_with_experts = shape.num_layers - shape.num_expert_layers
    for_weights = sum(
        activations.weight_input_bytes(shape, c, experts=layer >= first_with_experts)
        for layer in range(begin, end)
    )
    if work.is_compiled:
        for_weights = 0  # the half of the input does both
    whole = tokens * sum(kept) + outside
    passing = tokens * (peak_of_segments(kept, redone) - sum(kept)) + block_mask_bytes(shape, work)
    return StageBytes(whole, passing, tokens * for_weights)


def _of_the_head(shape: ModelShape, work: Workload) -> int:
    """The last norm; and the gradients of hidden states and head, which the loss computes in its
    forward, for each microbatch that waits for its backward."""
    if shape.reads_images:
        return 2 * 4 * work.micro_batch_size * shape.num_classes
    norm = activations.norm_bytes(shape, shape.dim, work.compute_bytes, work.sequence_parts)
    return work.tokens * (norm + shape.dim * work.compute_bytes) + shape.vocab_size * shape.dim * 4


def _loss(shape: ModelShape, work: Workload) -> float:
    """What is there while one microbatch's loss is computed, beside what `_of_the_head` counts."""
    whole = loss_bytes(shape, work)
    if shape.reads_images:
        return whole
    return whole - work.tokens * shape.dim * work.compute_bytes - shape.vocab_size * shape.dim * 4


def _states(
    num_params: int, held: int, work: Workload, zero_stage: int, dp_size: int, uneven: float
) -> dict[str, float]:
    """Parameters, gradients and optimizer state.

    ZeRO 2 and 3 gather parameters once for a whole step, and gradients stay whole until its end:
    what they split is there beside it. `held`: without the experts of other ranks of ep.
    """
    per = StateBytes(optimizer=work.optimizer_bytes)
    if zero_stage < 2:
        memory = state_bytes(held, zero_stage, dp_size, per, uneven)
        memory["communication"] = (
            held * 2 if work.compute_bytes == 2 else 0
        )  # cast weights, under autocast
        return memory
    memory = state_bytes(num_params, zero_stage, dp_size, per, uneven)
    memory["parameters"] = (num_params / dp_size + uneven) * 4
    memory["communication"] = held * (work.compute_bytes + 4)
    return memory


def rank_staging(
    here: ModelShape, work: Workload, pipeline: Pipeline, num_shares: int
) -> tuple[int, ...]:
    """As `plan.memory.staging_bytes`, of each pipeline rank: its part of its stages.

    `here`: `shard_shape`.
    """
    params = part_params(here, pipeline.first_stage, pipeline.last_stage)
    held = (
        params.of_stages(pipeline.stages, pipeline.stages_of(rank))
        for rank in range(pipeline.num_ranks)
    )
    return tuple(
        round(num * (StateBytes().parameters + work.optimizer_bytes) / num_shares) for num in held
    )


def _messages(schedule: Schedule, rank: int, sent: int) -> int:
    """Room for what is on its way to a rank; none if all of its neighbours' stages are its own."""
    stages = schedule.stages_of(rank)
    near = {s + d for s in stages for d in (-1, 1) if 0 <= s + d < schedule.num_stages}
    return ASKED_FOR * sent if any(schedule.rank_of_stage[stage] != rank for stage in near) else 0
