"""Attention between tokens: kernels that never write scores to memory, and those that do."""

from __future__ import annotations

import numpy as np

from phalanx.job.work import AttentionWork
from phalanx.plan.timing.columns import Column, SetupColumns
from phalanx.plan.timing.constants import TimingConstants
from phalanx.plan.timing.machine import MachineRates
from phalanx.plan.timing.matmul import compute_power_speed_factor, estimate_matmul_s

# FlashAttention computes scores again in the backward: 5 products for the forward's 2.
BACKWARD_FLOPS_RATIO = 2.5
# On the diagonal of a causal mask, a tile computes the pairs that are masked, too.
TILE_TOKENS = 128


def estimate_attention_times(
    attention: AttentionWork,
    machine: MachineRates,
    columns: SetupColumns,
    flops_s: Column | float,
    constants: TimingConstants,
) -> tuple[Column, Column]:
    """Seconds of one microbatch's attention in one block of a rank: forward and backward."""
    forward = _estimate_flash_attention_times(attention, machine, columns, constants)
    backward = forward * BACKWARD_FLOPS_RATIO / constants.attention_backward_ratio
    if not columns.is_unfused_attention.any():
        return forward, backward
    unfused = _estimate_unfused_attention_times(attention, machine, columns, flops_s, constants)
    is_unfused = columns.is_unfused_attention
    # Without recomputed scores the backward has twice the forward's products.
    return np.where(is_unfused, unfused, forward), np.where(is_unfused, 2.0 * unfused, backward)


def _estimate_flash_attention_times(
    attention: AttentionWork,
    machine: MachineRates,
    columns: SetupColumns,
    constants: TimingConstants,
) -> Column:
    flash, cudnn = {
        70: (constants.flash_efficiency_sm80, constants.flash_efficiency_sm80),
        80: (constants.flash_efficiency_sm80, constants.flash_efficiency_sm80),
        90: (constants.flash_efficiency_sm90, constants.cudnn_efficiency_sm90),
        # No FlashAttention 2 was written for it: torch's own is cuDNN's.
        100: (constants.cudnn_efficiency_sm100, constants.cudnn_efficiency_sm100),
    }[machine.gpu_generation]
    efficiency = np.where(columns.is_cudnn_attention, cudnn, flash)
    head_dim = (attention.head_dim + attention.value_dim) / 2
    # Kernels are made for 128 features; of fewer, loads and the softmax take the same time.
    missing = min(1.0, max(0.0, (128 - head_dim) / 64))
    efficiency = efficiency * (1.0 - missing * (1.0 - constants.small_head_efficiency))
    tokens = attention.num_tokens / columns.cp
    efficiency = efficiency * tokens / (tokens + constants.attention_ramp)
    pairs = attention.num_pairs
    if attention.is_causal:
        pairs += attention.num_tokens * TILE_TOKENS // 2
    flops = attention.flops / max(1, attention.num_pairs) * pairs
    local = columns.micro_batch_size * flops / (columns.tp * columns.cp)
    peak = machine.accelerator.peak_flops("bf16") * compute_power_speed_factor(machine, constants)
    return np.asarray(local / (peak * efficiency))


def _estimate_unfused_attention_times(
    attention: AttentionWork,
    machine: MachineRates,
    columns: SetupColumns,
    flops_s: Column | float,
    constants: TimingConstants,
) -> Column:
    heads = np.maximum(1.0, attention.num_heads / columns.tp) * columns.micro_batch_size
    rows = attention.num_tokens / columns.cp
    all_tokens = np.full_like(rows, attention.num_tokens)
    size, values = np.full_like(rows, attention.head_dim), np.full_like(rows, attention.value_dim)
    scores = estimate_matmul_s(rows, all_tokens, size, heads, flops_s, machine, constants)
    use = estimate_matmul_s(rows, values, all_tokens, heads, flops_s, machine, constants)
    num_bytes = constants.softmax_bytes * heads * rows * attention.num_tokens
    return scores + use + num_bytes / (machine.memory_bytes_s * constants.memory_efficiency)
