"""Bytes that a rank sends to other ranks in a step, by axis, and the buffers that this takes.

Torch-free.
"""

from __future__ import annotations

from phalanx.job.shape import ModelShape
from phalanx.plan.pipeline.memory import message_bytes
from phalanx.plan.pipeline.pipeline_plan import Pipeline
from phalanx.plan.workload import Workload

ROW_EXCHANGES = 4  # of a block and microbatch: to the experts and back, and so the gradients


def cp_buffer_bytes(shape: ModelShape, work: Workload) -> float:
    """Bytes of buffers of one attention at the worst moment of its backward. ring: two blocks of
    keys and values and of their gradients in fp32; all-gather: those of all ranks; ulysses:
    queries, keys, values and outputs with their gradients, before and after the exchange.

    `shape`: of one rank of tp.
    """
    if work.cp == 1 or not shape.is_known:
        return 0
    kv = 2 * work.tokens * shape.num_kv_heads * shape.head_dim
    c = work.compute_bytes
    if work.cp_attention == "all-gather":
        return kv * work.cp * (c + 4)
    if work.cp_attention == "ulysses":
        return 2 * (kv + 2 * work.tokens * shape.num_heads * shape.head_dim) * c
    return 2 * kv * (c + 4)


def cp_bytes_per_step(shape: ModelShape, work: Workload) -> float:
    """Bytes that a rank sends to the others of cp in a step without recomputation.

    `shape`: of one rank of tp.

    Ring and all-gather: (cp - 1) blocks of keys and values in the forward, again in the backward,
    and as many of gradients in at least fp32. Ulysses: (cp - 1)/cp of queries, keys, values and
    outputs, forward and backward.
    """
    num_other_ranks, c = work.cp - 1, work.compute_bytes
    kv, q = (
        2 * work.tokens * heads * shape.head_dim for heads in (shape.num_kv_heads, shape.num_heads)
    )
    num_products = shape.num_layers * work.num_microbatches
    if work.cp_attention == "ulysses":
        return num_products * 2 * (kv + q) * c * num_other_ranks / work.cp
    return num_products * num_other_ranks * kv * (2 * c + max(4, c))


def ep_buffer_bytes(shape: ModelShape, work: Workload) -> float:
    """Bytes of rows on their way to experts of other ranks, at even load: those that leave and
    those that come."""
    return (
        2 * work.tokens * shape.experts_per_token * shape.dim * work.compute_bytes
        if work.ep > 1
        else 0
    )


def ep_bytes_per_step(shape: ModelShape, work: Workload) -> float:
    """Bytes that a rank sends to the others of ep in a step without recomputation, where all
    experts get equally many rows.

    `shape`: of one rank of tp.
    """
    rows = work.tokens * shape.experts_per_token * (work.ep - 1) / work.ep
    num_exchanges = ROW_EXCHANGES * shape.num_expert_layers * work.num_microbatches
    return num_exchanges * rows * shape.dim * work.compute_bytes


def pp_bytes_per_step(shape: ModelShape, work: Workload, pipeline: Pipeline, rank: int) -> int:
    """Bytes that pipeline rank `rank` sends in a step: outputs of its stages, and gradients back.

    `shape`: of one rank of tp.
    """
    owners = pipeline.rank_of_stage
    neighbours = [stage + d for stage in pipeline.stages_of(rank) for d in (-1, 1)]
    num_sends = sum(0 <= stage < len(owners) and owners[stage] != rank for stage in neighbours)
    return num_sends * work.num_microbatches * message_bytes(shape, work)
