"""Bytes of one rank for a setup of another framework: states and activations by published
arithmetic (planner's formulas for our own runtime are phalanx.plan.memory's)."""

from __future__ import annotations

import math

from phalanx.job.work import BlockWork, ModelWork
from phalanx.plan.timing.setup import StepSetup

GIB = 2**30
# CUDA's context, NCCL's buffers and workspaces, and what fragments take of the rest.
RUNTIME_BYTES = 1.5 * GIB
USABLE_SHARE = 0.97


def estimate_rank_bytes(work: ModelWork, setup: StepSetup) -> float:
    """Bytes that the fullest rank allocates at its peak: the first stage, whose microbatches in
    flight are most, or the last one, which has the loss."""
    states = _state_bytes(work, setup)
    activations = _activation_bytes(work, setup)
    loss = _loss_bytes(work, setup)
    if setup.layout.pp == 1:
        return states + activations + loss
    return states + max(activations, activations / setup.layout.pp + loss)


def fits_in_memory(work: ModelWork, setup: StepSetup, memory_gib: float) -> bool:
    """True if the estimate leaves room for the runtime."""
    room = memory_gib * GIB * USABLE_SHARE - RUNTIME_BYTES
    return estimate_rank_bytes(work, setup) <= room


def _state_bytes(work: ModelWork, setup: StepSetup) -> float:
    layout, stack = setup.layout, setup.stack
    ep = setup.folded_ep or layout.ep
    expert_parts = ep * (layout.tp if stack.cuts_experts else 1)
    dense, experts = 0.0, 0.0
    for block, count in work.block_kinds:
        cut = block.num_params - block.num_routed_params - block.num_uncut_params
        dense += count * (cut / layout.tp + block.num_uncut_params)
        experts += count * block.num_routed_params / expert_parts
    dense, experts = dense / layout.pp, experts / layout.pp
    ends = [work.num_embedding_params, work.num_head_params + work.num_tied_params]
    dense += (max(ends) if layout.pp > 1 else sum(ends) - work.num_tied_params) / layout.tp
    shard = layout.dp_shard * layout.cp
    folded = 1 if stack.cuts_experts else layout.tp
    expert_shard = max(1.0, shard * folded / ep)
    stage = setup.zero_stage
    # 16-bit weights; gradients as they add up; fp32 weights and two moments.
    weights, grads, optimizer = 2.0, float(stack.grad_bytes), 12.0
    if stage >= 3:
        weights, optimizer = 4.0, 8.0
    elif setup.precision == "fp32":
        weights, grads, optimizer = 4.0, 4.0, 8.0
    total = 0.0
    for params, parts in ((dense, shard), (experts, expert_shard)):
        total += params * weights / (parts if stage >= 3 else 1)
        total += params * grads / (parts if stage >= 2 else 1)
        total += params * optimizer / (parts if stage >= 1 else 1)
    largest = max((block.num_params - block.num_routed_params for block in work.blocks), default=0)
    if stage >= 3:
        # Two gathered units, and the gradient of one.
        total += largest / layout.tp * (2 * 2.0 + stack.grad_bytes)
        total += 2.0 * (work.num_embedding_params + work.num_head_params) / layout.tp
    return total


def _activation_bytes(work: ModelWork, setup: StepSetup) -> float:
    layout = setup.layout
    tokens = setup.micro_batch_size * work.num_tokens / layout.cp
    saved, largest = 0.0, 0.0
    for block, count in work.block_kinds:
        of_block = tokens * _block_bytes(block, work, setup)
        entering = tokens * 2.0 * work.dim / _sequence_parts(setup)
        saved_of_block = of_block
        if setup.recompute == "full":
            saved_of_block = of_block + setup.recompute_share * (entering - of_block)
            largest = max(largest, of_block)
        saved += count * saved_of_block
    return saved / layout.pp * _count_microbatches_in_flight(setup) + largest


def _count_microbatches_in_flight(setup: StepSetup) -> float:
    """Microbatches whose activations the first stage holds at once."""
    pp, v, count = setup.layout.pp, setup.stages_per_rank, setup.num_microbatches
    if setup.schedule == "gpipe":
        return float(count)
    if setup.schedule == "zb-h2":
        return min(count, 2 * pp - 1)
    if v > 1:
        return min(count, (2 * (pp - 1) + (v - 1) * pp + 1) / v)
    return min(count, pp)


def _sequence_parts(setup: StepSetup) -> int:
    return setup.layout.tp if setup.sequence_parallel else 1


def _block_bytes(block: BlockWork, work: ModelWork, setup: StepSetup) -> float:
    """Bytes per token that one block saves for its backward."""
    tp, spread = setup.layout.tp, _sequence_parts(setup)
    # Of what products read, 8-bit ones save the cast copy: about half of all.
    element = 1.5 if setup.precision in ("fp8", "mxfp8", "fp4") else 2.0
    elements = 4.0 * work.dim / spread
    width = (3 if block.is_gated else 2) * block.activation_features / tp
    if setup.recompute in ("selective", "per-op"):
        elements -= 1.5 * work.dim / spread
        width *= 2 / 3
    elements += width
    if block.num_experts:
        elements += 2.0 * block.experts_per_token * work.dim / tp
    num_bytes = element * elements
    attention = block.attention
    if attention is not None:
        heads = attention.num_heads * (attention.head_dim + attention.value_dim)
        keys = attention.num_kv_heads * (attention.head_dim + attention.value_dim)
        num_bytes += element * (heads + keys) / tp + 4.0 * attention.num_heads / tp
        if setup.stack.attention == "unfused" and setup.recompute == "none":
            num_bytes += 5.0 * attention.num_heads / tp * work.num_tokens
    if setup.stack.extra_dropout:
        num_bytes += 2.0 * work.dim / spread
    if setup.stack.kernels == "eager":
        num_bytes *= 1.2
    return num_bytes


def _loss_bytes(work: ModelWork, setup: StepSetup) -> float:
    tokens = setup.micro_batch_size * work.num_head_tokens / setup.layout.cp
    per_logit = 6.0 if setup.stack.is_head_fused else 10.0
    logits = tokens * per_logit * math.ceil(work.head.outputs / setup.layout.tp)
    return logits + 4.0 * tokens * work.dim / _sequence_parts(setup)
