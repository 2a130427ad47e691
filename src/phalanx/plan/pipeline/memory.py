"""Bytes of each rank of a pipeline, by category, from what its stages hold and how many
microbatches are in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from phalanx.job.costs import ModelCosts, PartParams
from phalanx.plan.memory import (
    StateBytes,
    adjust_memory_for_device,
    count_excess_expert_params,
    count_segment_bytes,
    peak_segment_bytes,
    predict_model_state_bytes,
)
from phalanx.plan.memory_phases import BACKWARD, FORWARD, UPDATE, find_peak_phase
from phalanx.plan.pipeline.costs import count_params_of_stages
from phalanx.plan.pipeline.pipeline_plan import Pipeline
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
    num_ranks_per_model_part: int,
) -> tuple[dict[str, int], ...]:
    """Bytes by category of each pipeline rank at the highest moment of a step; arguments as in
    `predict_pipeline_memory_by_phase`."""
    by_rank = predict_pipeline_memory_by_phase(
        shape, work, pipeline, zero_stage, dp_size, device, num_ranks_per_model_part
    )
    return tuple(phases[find_peak_phase(phases)] for phases in by_rank)


def predict_pipeline_memory_by_phase(
    shape: ModelCosts,
    work: Workload,
    pipeline: Pipeline,
    zero_stage: int,
    dp_size: int,
    device: str,
    num_ranks_per_model_part: int,
) -> tuple[dict[str, dict[str, int]], ...]:
    """Bytes by category of each pipeline rank at the highest moment of each phase, on top of
    interpreter and torch.

    Of a user's own module only the states are known. `dp_size`: ranks that share one copy of a
    stage; `num_ranks_per_model_part`: all that hold the same stages, and save them.
    """
    shape = shard_shape(shape, work.tp, work.rules)
    params = shape.count_part_params(pipeline.first_stage, pipeline.last_stage)
    rank_params = shape.count_part_params(pipeline.first_stage, pipeline.last_stage, work.ep)
    late_by_stage: tuple[int, ...] = ()
    if shape.activations is not None and zero_stage < 2:
        late_by_stage = _predict_late_gradient_bytes(shape, work, pipeline)
    activations_by_rank = predict_rank_activation_bytes(shape, work, pipeline)
    staging = predict_rank_staging_bytes(shape, work, pipeline, num_ranks_per_model_part)
    by_rank = []
    for rank in range(pipeline.num_ranks):
        stages = pipeline.stages_of_rank(rank)
        num_params = count_params_of_stages(params, pipeline.stages, stages)
        num_rank_params = count_params_of_stages(rank_params, pipeline.stages, stages)
        num_cast = _count_cast_params(num_rank_params, rank_params, pipeline, stages)
        ranges = [pipeline.stages.block_ranges[stage] for stage in stages]
        uneven = count_excess_expert_params(shape, zero_stage, dp_size, work.ep, ranges)
        states, gathered = _predict_state_and_buffer_bytes(
            num_params, num_rank_params, num_cast, work, zero_stage, dp_size, uneven,
            shape.trained_share,
        )  # fmt: skip
        if device == "cpu" and work.copies_state:
            states["staging"] = staging[rank]
        phases = {UPDATE: states}
        if shape.activations is not None:
            phase, memory = _predict_bytes_while_computing(
                shape, work, pipeline, rank, zero_stage, states, activations_by_rank,
                gathered, late_by_stage,
            )  # fmt: skip
            phases = {phase: memory, UPDATE: states | {"communication": 0}}
        activations = activations_by_rank[rank]
        adjusted = {}
        for phase, memory in phases.items():
            adjusted[phase] = adjust_memory_for_device(
                memory, shape, work, device, zero_stage, activations=activations, is_staged=True
            )
        by_rank.append(adjusted)
    return tuple(by_rank)


def _count_cast_params(
    num_rank_params: int, params: PartParams, pipeline: Pipeline, stages: Sequence[int]
) -> int:
    """The parameters of these stages that have a copy in the compute type, of `num_rank_params`."""
    # Rows of a table are looked up as they are, and have no copy in the compute type.
    num_cast = num_rank_params - (params.looked_up if 0 in stages else 0)
    if len(pipeline.stages.block_ranges) - 1 in stages and 0 in stages:
        num_cast += params.both
    return num_cast


def _predict_bytes_while_computing(
    shape: ModelCosts,
    work: Workload,
    pipeline: Pipeline,
    rank: int,
    zero_stage: int,
    states: dict[str, float],
    activations_by_rank: Sequence[int],
    gathered: float,
    late_by_stage: Sequence[int],
) -> tuple[str, dict[str, float]]:
    """The phase in which a rank of a model whose activations are known has most while it computes,
    and its bytes by category there.

    `gathered`: as `_predict_state_and_buffer_bytes` has it; `late_by_stage`: as
    `_predict_late_gradient_bytes`, below ZeRO 2.
    """
    assert shape.activations is not None, "the caller asks"
    stages = pipeline.stages_of_rank(rank)
    memory = dict(states)
    if zero_stage >= 2:
        # Gradients are whole until the last backward, and split then.
        memory["gradients"] = 0
    memory["activations"] = activations_by_rank[rank]
    # Gradients on their way: in the block, into the stage and out of it.
    message = shape.activations.count_message_bytes(work)
    ranges = [pipeline.stages.block_ranges[stage] for stage in stages]
    passing = (
        max(_predict_in_flight_gradient_bytes(shape, work, blocks) for blocks in ranges)
        + 2 * message
    )
    memory["communication"] = gathered + _predict_p2p_message_bytes(pipeline, rank, message)
    if zero_stage < 2:
        memory["communication"] += max(late_by_stage[stage] for stage in stages)
    phase = BACKWARD
    if pipeline.num_stages - 1 in stages:
        loss = shape.activations.count_loss_bytes(work)
        # The backward comes when the loss has computed its gradients.
        phase = FORWARD if loss.computing > passing else BACKWARD
        memory["loss"] = max(loss.computing, passing)
    else:
        memory["activations"] += passing
    return phase, memory


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
        pipeline.schedule_of_peaks(), [s.saved for s in stages], [s.for_weights for s in stages]
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


# A plan asks for ddp and for zero1.
@lru_cache(maxsize=8)
def _predict_late_gradient_bytes(
    shape: ModelCosts, work: Workload, pipeline: Pipeline
) -> tuple[int, ...]:
    """Bytes by which the end of each stage's backward is above its beginning, at least 0.

    Microbatches share their cast weights, which the first of them made: so autograd comes to these
    last, and their gradients in the compute type pile up, while what blocks have saved goes.
    """
    activations = shape.activations
    assert activations is not None, "the caller asks"
    params_by_block = shape.count_part_params(ep=work.ep).blocks
    # Of the last block only the weight that its backward comes to first has a gradient.
    first_gradient = activations.find_freed_gradients(work.ep).first
    late = []
    for stage, (first, end) in enumerate(pipeline.stages.block_ranges):
        gradients = sum(params_by_block[first + 1 : end]) + first_gradient
        saved, _ = count_segment_bytes(shape, work, first, end)
        gone = sum(saved[1:])
        if stage == pipeline.num_stages - 1:
            gone += (
                activations.count_final_norm_bytes(work)
                + activations.count_loss_bytes(work).waiting
            )
        late.append(max(0, gradients * work.cast_bytes - gone))
    return tuple(late)


def _predict_state_and_buffer_bytes(
    num_params: int,
    num_rank_params: int,
    num_cast: int,
    work: Workload,
    zero_stage: int,
    dp_size: int,
    uneven: float,
    trained: float,
) -> tuple[dict[str, float], float]:
    """Bytes of parameters, gradients and optimizer state; and of what is gathered or cast beside
    them while a step computes.

    ZeRO 2 and 3 gather parameters once for a whole step, and gradients stay whole until its end:
    what they split is there beside it. `num_rank_params`: without the experts of other ranks of ep;
    `num_cast`: of these what is multiplied by.
    """
    per = StateBytes(optimizer=work.optimizer_bytes)
    if zero_stage < 2:
        states = predict_model_state_bytes(
            num_rank_params, zero_stage, dp_size, per, uneven, trained
        )
        # Cast weights, under autocast.
        return states, num_cast * work.cast_bytes
    states = predict_model_state_bytes(num_params, zero_stage, dp_size, per, uneven, trained)
    states["parameters"] = (num_params / dp_size + uneven) * 4
    return states, num_rank_params * (work.compute_bytes + 4)


def predict_rank_staging_bytes(
    shape: ModelCosts, work: Workload, pipeline: Pipeline, num_ranks_per_model_part: int
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
        round(num * (StateBytes().parameters + work.optimizer_bytes) / num_ranks_per_model_part)
        for num in num_params
    )


def _predict_p2p_message_bytes(pipeline: Pipeline, rank: int, sent: int) -> int:
    """Bytes for messages on their way to a rank; 0 if all of its neighbours' stages are its own."""
    stages = pipeline.stages_of_rank(rank)
    neighbours = {s + d for s in stages for d in (-1, 1) if 0 <= s + d < pipeline.num_stages}
    if any(pipeline.rank_of_stage[stage] != rank for stage in neighbours):
        return NUM_RECEIVE_BUFFERS * sent
    return 0
