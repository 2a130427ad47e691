"""Bytes of each rank of a pipeline, by category, from what its stages hold and how many
microbatches are in flight."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from phalanx.job.costs import ModelCosts
from phalanx.plan.memory import (
    StateBytes,
    adjust_memory_for_device,
    count_excess_expert_params,
    count_segment_bytes,
    peak_segment_bytes,
    state_bytes,
)
from phalanx.plan.pipeline.costs import count_params_of_stages
from phalanx.plan.pipeline.pipeline_plan import Pipeline
from phalanx.plan.pipeline.schedule import Schedule
from phalanx.plan.pipeline.simulate import compute_peak_activation_bytes
from phalanx.plan.workload import Workload, shard_shape

NUM_RECEIVE_BUFFERS = 2  # messages that a rank has room for before it needs them


@dataclass(frozen=True)
class StageBytes:
    """Bytes of one microbatch in one stage.

    `saved` from its forward to its backward; `redone` on top in its backward: what that recomputes,
    and masks; `for_weights` between the two halves of a backward.
    """

    saved: int
    redone: int
    for_weights: int


def predict_pipeline_memory(
    shape: ModelCosts,
    work: Workload,
    pipeline: Pipeline,
    zero_stage: int,
    dp_size: int,
    device: str,
    num_shares: int,
) -> tuple[dict[str, int], ...]:
    """Bytes by category of each pipeline rank, on top of interpreter and torch.

    Of a user's own module only the states are known.

    `dp_size`: ranks that share one copy of a stage; `num_shares`: all that hold the same stages,
    and save them.
    """
    shape = shard_shape(shape, work.tp, work.rules)
    params = shape.count_part_params(pipeline.first_stage, pipeline.last_stage)
    rank_params = shape.count_part_params(pipeline.first_stage, pipeline.last_stage, work.ep)
    schedule = pipeline.schedule()
    activations_by_rank = predict_rank_activation_bytes(shape, work, pipeline)
    staging = predict_rank_staging_bytes(shape, work, pipeline, num_shares)
    memories = []
    for rank in range(pipeline.num_ranks):
        stages = pipeline.stages_of_rank(rank)
        num_params = count_params_of_stages(params, pipeline.stages, stages)
        num_rank_params = count_params_of_stages(rank_params, pipeline.stages, stages)
        ranges = [pipeline.stages.block_ranges[stage] for stage in stages]
        uneven = count_excess_expert_params(shape, zero_stage, dp_size, work.ep, ranges)
        memory = _predict_state_and_buffer_bytes(
            num_params, num_rank_params, work, zero_stage, dp_size, uneven, shape.trained_share
        )
        if shape.activations is not None:
            memory["activations"] = activations_by_rank[rank]
            if pipeline.num_stages - 1 in stages:
                # As without a pipeline: gradients on their way have the room of the loss.
                passing = _predict_in_flight_gradient_bytes(
                    shape, work, pipeline.stages.block_ranges[-1]
                )
                memory["loss"] = max(shape.activations.count_loss_bytes(work).computing, passing)
            message = shape.activations.count_message_bytes(work)
            memory["communication"] += _predict_p2p_message_bytes(schedule, rank, message)
        if device == "cpu" and work.copies_state:
            memory["staging"] = staging[rank]
        memories.append(
            adjust_memory_for_device(memory, shape, work, device, zero_stage, is_staged=True)
        )
    return tuple(memories)


# A plan asks again for each candidate, and these do not depend on its ZeRO stage.
@lru_cache(maxsize=32)
def predict_rank_activation_bytes(
    shape: ModelCosts, work: Workload, pipeline: Pipeline
) -> tuple[int, ...]:
    """Bytes of activations of each pipeline rank, at the worst moment: all microbatches in
    flight, and what is recomputed of one of them; 0 where nobody knows."""
    if shape.activations is None:
        return (0,) * pipeline.num_ranks
    stages = [
        predict_stage_bytes(shape, work, pipeline, stage) for stage in range(pipeline.num_stages)
    ]
    peaks = compute_peak_activation_bytes(
        pipeline.schedule(), [s.saved for s in stages], [s.for_weights for s in stages]
    )
    redone = (
        max(stages[stage].redone for stage in pipeline.stages_of_rank(rank))
        for rank in range(pipeline.num_ranks)
    )
    return tuple(peak + recomputed for peak, recomputed in zip(peaks, redone, strict=True))


def predict_stage_bytes(
    shape: ModelCosts, work: Workload, pipeline: Pipeline, stage: int
) -> StageBytes:
    """Bytes of one stage on one rank of tp (`shape`: from `shard_shape`), of a model whose
    activations are known.

    Segments of recompute end where stages do.
    """
    activations = shape.activations
    assert activations is not None, "the caller asks"
    first, end = pipeline.stages.block_ranges[stage]
    saved, redone = count_segment_bytes(shape, work, first, end)
    # Masks and tables of angles are made in every stage: a user's forward begins in each of them.
    outside = activations.count_bytes_in_every_stage(work)
    if stage == 0:
        outside += activations.count_embedding_bytes(work)
    if stage == pipeline.num_stages - 1:
        # The loss computes the gradients of hidden states and head in its forward, for each
        # microbatch that waits for its backward.
        outside += (
            activations.count_final_norm_bytes(work) + activations.count_loss_bytes(work).waiting
        )
    else:
        outside += activations.count_message_bytes(work)
    for_weights = 0
    if not work.is_compiled:  # else the half of the input does both
        for layer in range(first, end):
            for_weights += activations.block(layer, work).weight_inputs
    recompute_bytes = (
        peak_segment_bytes(saved, redone) - sum(saved) + activations.count_block_mask_bytes(work)
    )
    return StageBytes(sum(saved) + outside, recompute_bytes, for_weights)


def _predict_in_flight_gradient_bytes(
    shape: ModelCosts, work: Workload, blocks: tuple[int, int]
) -> int:
    """Bytes of gradients on their way in the backward of one of `blocks`, of that with most."""
    if shape.activations is None:
        return 0
    passing = (shape.activations.block(layer, work).passing for layer in range(*blocks))
    return max(passing, default=0)


def _predict_state_and_buffer_bytes(
    num_params: int,
    num_rank_params: int,
    work: Workload,
    zero_stage: int,
    dp_size: int,
    uneven: float,
    trained: float,
) -> dict[str, float]:
    """Bytes of parameters, gradients and optimizer state, and of communication.

    ZeRO 2 and 3 gather parameters once for a whole step, and gradients stay whole until its end:
    what they split is there beside it. `num_rank_params`: without the experts of other ranks of ep.
    """
    per = StateBytes(optimizer=work.optimizer_bytes)
    if zero_stage < 2:
        memory = state_bytes(num_rank_params, zero_stage, dp_size, per, uneven, trained)
        # Cast weights, under autocast.
        memory["communication"] = num_rank_params * 2 if work.compute_bytes == 2 else 0
        return memory
    memory = state_bytes(num_params, zero_stage, dp_size, per, uneven, trained)
    memory["parameters"] = (num_params / dp_size + uneven) * 4
    memory["communication"] = num_rank_params * (work.compute_bytes + 4)
    return memory


def predict_rank_staging_bytes(
    shape: ModelCosts, work: Workload, pipeline: Pipeline, num_shares: int
) -> tuple[int, ...]:
    """Bytes of the copy that saves are written from, of each pipeline rank, as
    `plan.memory.staging_bytes`.

    `shape`: from `shard_shape`.
    """
    params = shape.count_part_params(pipeline.first_stage, pipeline.last_stage)
    num_params = (
        count_params_of_stages(params, pipeline.stages, pipeline.stages_of_rank(rank))
        for rank in range(pipeline.num_ranks)
    )
    return tuple(
        round(num * (StateBytes().parameters + work.optimizer_bytes) / num_shares)
        for num in num_params
    )


def _predict_p2p_message_bytes(schedule: Schedule, rank: int, sent: int) -> int:
    """Bytes for messages on their way to a rank; 0 if all of its neighbours' stages are its own."""
    stages = schedule.stages_of_rank(rank)
    neighbours = {s + d for s in stages for d in (-1, 1) if 0 <= s + d < schedule.num_stages}
    if any(schedule.rank_of_stage[stage] != rank for stage in neighbours):
        return NUM_RECEIVE_BUFFERS * sent
    return 0
