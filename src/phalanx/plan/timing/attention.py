"""Attention between tokens: kernels that never write scores to memory, and those that do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from phalanx.job.work import AttentionWork
from phalanx.plan.timing.columns import Column, SetupColumns
from phalanx.plan.timing.constants import TimingConstants
from phalanx.plan.timing.machine import MachineRates
from phalanx.plan.timing.matmul import (
    choose_peak_precision,
    compute_dense_flops_s,
    compute_power_speed_factor,
    count_activation_bytes,
    count_prologue_elements,
    estimate_matmul_s,
)
from phalanx.plan.timing.setup import Precision

# FlashAttention computes scores again in the backward: 5 products for the forward's 2.
BACKWARD_FLOPS_RATIO = 2.5
# On the diagonal of a causal mask, a tile computes the pairs that are masked, too.
TILE_TOKENS = 128
# FlashAttention takes 16 bits. torch's memory-efficient attention of fp32 computes each product as
# three of TF32 from compute capability 8.0 on (OpMultiplyAddFastF32 of CUTLASS), whose peak is half
# of bf16's; before, as fp32 products.
FP32_ATTENTION_SLOWDOWN = 3 * 2


def estimate_attention_times(
    attention: AttentionWork,
    machine: MachineRates,
    precision: Precision,
    columns: SetupColumns,
    constants: TimingConstants,
) -> tuple[Column, Column]:
    """Seconds of one microbatch's attention in one block of a rank, of queries in `precision`:
    forward and backward."""
    forward = _estimate_flash_attention_times(attention, machine, precision, columns, constants)
    backward = forward * BACKWARD_FLOPS_RATIO / constants.attention_backward_ratio
    if columns.attention_has_8_bits.any():
        eight_bits = columns.attention_has_8_bits
        if attention.has_window:
            # cuDNN's backward of 8 bits computes every pair before the diagonal.
            all_pairs = replace(attention, num_pairs=_count_causal_pairs(attention))
            whole = _estimate_flash_attention_times(
                all_pairs, machine, precision, columns, constants
            )
            whole = whole * BACKWARD_FLOPS_RATIO / constants.attention_backward_ratio
            backward = np.where(eight_bits, whole, backward)
        forward = np.where(eight_bits, forward / constants.fp8_attention_speedup, forward)
        backward = np.where(eight_bits, backward / constants.fp8_attention_speedup, backward)
    if not columns.is_unfused_attention.any():
        return forward, backward
    unfused = _estimate_unfused_attention_times(attention, machine, precision, columns, constants)
    is_unfused = columns.is_unfused_attention
    # Without recomputed scores the backward has twice the forward's products.
    return np.where(is_unfused, unfused, forward), np.where(is_unfused, 2.0 * unfused, backward)


def _count_causal_pairs(attention: AttentionWork) -> int:
    """Pairs of tokens that a causal mask without a window keeps."""
    return attention.num_tokens * (attention.num_tokens + 1) // 2


def _estimate_flash_attention_times(
    attention: AttentionWork,
    machine: MachineRates,
    precision: Precision,
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
    small: Column | float = constants.small_head_efficiency
    if machine.gpu_generation >= 90:
        # Tensor cores became twice as fast from one generation to the next, exponentials did not.
        small = np.where(columns.is_cudnn_attention, constants.small_head_efficiency_cudnn, small)
    efficiency = efficiency * (1.0 - missing * (1.0 - small))
    tokens = attention.num_tokens / columns.cp
    pairs = attention.num_pairs
    if attention.is_causal:
        pairs += attention.num_tokens * TILE_TOKENS // 2
    if attention.has_window:
        # The window's far edge cuts tiles as the diagonal does, and what a tile of queries visits
        # is soon over.
        pairs += attention.num_tokens * TILE_TOKENS // 2
        tokens = np.minimum(tokens, pairs / attention.num_tokens)
    efficiency = efficiency * tokens / (tokens + constants.attention_ramp)
    flops = attention.flops / max(1, attention.num_pairs) * pairs
    local = columns.micro_batch_size * flops / (columns.tp * columns.cp)
    peak = _get_attention_peak_flops(machine, precision)
    power = compute_power_speed_factor(machine, constants)
    return np.asarray(local / (peak * power * efficiency))


def _get_attention_peak_flops(machine: MachineRates, precision: Precision) -> float:
    """FLOP/s that a kernel that never writes scores cannot exceed."""
    peak = machine.accelerator.peak_flops
    if precision != "fp32":
        return peak(choose_peak_precision(machine, precision))
    if machine.gpu_generation < 80:
        return peak("fp32")
    return peak("bf16") / FP32_ATTENTION_SLOWDOWN


def _estimate_unfused_attention_times(
    attention: AttentionWork,
    machine: MachineRates,
    precision: Precision,
    columns: SetupColumns,
    constants: TimingConstants,
) -> Column:
    flops_s = compute_dense_flops_s(machine, precision, constants)
    size_bytes = count_activation_bytes(precision)
    heads = np.maximum(1.0, attention.num_heads / columns.tp) * columns.micro_batch_size
    rows = attention.num_tokens / columns.cp
    all_tokens = np.full_like(rows, attention.num_tokens)
    size, values = np.full_like(rows, attention.head_dim), np.full_like(rows, attention.value_dim)
    prologue = count_prologue_elements(machine, precision, constants)
    shared = (heads, flops_s, machine, constants, prologue, size_bytes)
    scores = estimate_matmul_s(rows, all_tokens, size, *shared)
    use = estimate_matmul_s(rows, values, all_tokens, *shared)
    num_bytes = constants.softmax_bytes * size_bytes / 2 * heads * rows * attention.num_tokens
    return scores + use + num_bytes / (machine.memory_bytes_s * constants.memory_efficiency)
