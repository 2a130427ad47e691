"""Bytes that a rank sends to other ranks in a step, by axis, and the buffers that this takes.

Torch-free.
"""

from __future__ import annotations

from phalanx.job.costs import AttentionHeads, ExpertCosts, ModelCosts
from phalanx.plan.pipeline.pipeline_plan import Pipeline
from phalanx.plan.workload import Workload

# Of a block and microbatch: to the experts and back, and so the gradients.
ROW_EXCHANGES_PER_BLOCK = 4


def cp_buffer_bytes(shape: ModelCosts, work: Workload) -> float:
    """Bytes of buffers of one attention at the worst moment of its backward.

    `shape`: of one rank of tp.
    """
    heads = shape.heads
    if work.cp == 1 or heads is None:
        return 0
    c, q, kv = work.compute_bytes, *_count_attention_elements(heads, work)
    # Keys and values of all ranks in the compute type, and their gradients in fp32.
    if work.cp_attention == "all-gather":
        return kv * work.cp * (c + 4)
    # Queries, keys, values and outputs with their gradients, before and after the exchange.
    if work.cp_attention == "ulysses":
        return 2 * (kv + q) * c
    # ring: two blocks of keys and values, and of their gradients in fp32.
    return 2 * kv * (c + 4)


def _count_attention_elements(heads: AttentionHeads, work: Workload) -> tuple[int, int]:
    """Elements of queries and outputs, and of keys and values, of one attention on this rank."""
    each = 2 * work.tokens * heads.size
    return each * heads.queries, each * heads.keys


def cp_sent_bytes_per_step(shape: ModelCosts, work: Workload) -> float:
    """Bytes that a rank sends to the others of cp in a step without recomputation; 0 where nobody
    knows the heads.

    `shape`: of one rank of tp.
    """
    heads = shape.heads
    if heads is None:
        return 0
    num_other_ranks, c = work.cp - 1, work.compute_bytes
    q, kv = _count_attention_elements(heads, work)
    num_products = shape.num_layers * work.num_microbatches
    # (cp - 1)/cp of queries, keys, values and outputs, forward and backward.
    if work.cp_attention == "ulysses":
        return num_products * 2 * (kv + q) * c * num_other_ranks / work.cp
    # (cp - 1) blocks of keys and values in the forward, again in the backward, and as many of
    # gradients in at least fp32.
    return num_products * num_other_ranks * kv * (2 * c + max(4, c))


def ep_buffer_bytes(shape: ModelCosts, work: Workload) -> float:
    """Bytes of rows on their way to experts of other ranks, at even load: those that leave and
    those that come."""
    if work.ep == 1 or shape.experts is None:
        return 0
    return 2 * _routed_row_bytes(shape.experts, work)


def _routed_row_bytes(experts: ExpertCosts, work: Workload) -> int:
    """Bytes of all rows that a rank's tokens send to experts of one block."""
    return work.tokens * experts.per_token * experts.dim * work.compute_bytes


def ep_sent_bytes_per_step(shape: ModelCosts, work: Workload) -> float:
    """Bytes that a rank sends to the others of ep in a step without recomputation, where all
    experts get equally many rows.

    `shape`: of one rank of tp.
    """
    experts = shape.experts
    if experts is None:
        return 0
    rows = work.tokens * experts.per_token * (work.ep - 1) / work.ep
    num_exchanges = ROW_EXCHANGES_PER_BLOCK * len(experts.layers) * work.num_microbatches
    return num_exchanges * rows * experts.dim * work.compute_bytes


def pp_sent_bytes_per_step(shape: ModelCosts, work: Workload, pipeline: Pipeline, rank: int) -> int:
    """Bytes that pipeline rank `rank` sends in a step: outputs of its stages, and gradients back;
    0 where nobody knows what goes between blocks.

    `shape`: of one rank of tp.
    """
    if shape.activations is None:
        return 0
    owners = pipeline.rank_of_stage
    neighbours = [stage + d for stage in pipeline.stages_of_rank(rank) for d in (-1, 1)]
    num_sends = sum(0 <= stage < len(owners) and owners[stage] != rank for stage in neighbours)
    return num_sends * work.num_microbatches * shape.activations.count_message_bytes(work)
