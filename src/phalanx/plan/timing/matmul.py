"""Matrix products on a GPU: tiles and waves, and the memory that they read and write.

A product of m x k with k x n is cut into tiles, which the multiprocessors take in waves. The last
wave is seldom full, and a tile takes some time to start, whatever k is.
"""

from __future__ import annotations

import numpy as np

from phalanx.plan.timing.columns import Column
from phalanx.plan.timing.constants import TimingConstants
from phalanx.plan.timing.machine import MachineRates
from phalanx.plan.timing.setup import Precision

# (rows, columns, part of the largest tile's speed). A kernel library chooses the best of such a
# menu: smaller tiles reuse less of what they load.
TILE_MENU = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.78), (64, 64, 0.55))
# A last wave that is half full takes less than a full one: clocks rise, and memory is less busy.
PARTIAL_WAVE_WEIGHT = 0.7
ALIGNED_ELEMENTS = 64  # 128 bytes of 16-bit elements
# FLOP/s of a multiprocessor of A100 in 16-bit products, in whose elements a tile's start counts.
REFERENCE_MULTIPROCESSOR_FLOPS_S = 312e12 / 108
# Watts for a TFLOP/s of 16-bit products on the GPU that a generation's efficiency is fitted to.
REFERENCE_WATTS = {70: 300 / 125, 80: 400 / 312, 90: 700 / 989, 100: 1200 / 2500}


def estimate_matmul_s(
    m: Column,
    n: Column,
    k: Column,
    count: Column | float,
    flops_s: Column | float,
    machine: MachineRates,
    constants: TimingConstants,
    prologue: Column | float,
    element_bytes: float = 2.0,
) -> Column:
    """Seconds of `count` equal products m x k by k x n at a rate of `flops_s` for large ones, whose
    tiles take as long to start as `prologue` elements of k."""
    num_sms = machine.accelerator.num_sms
    best: Column | None = None
    for rows, columns, speed in TILE_MENU:
        waves = np.ceil(m / rows) * np.ceil(n / columns) * count / num_sms
        filled = np.ceil(waves)
        cost = np.where(waves > 1, waves + PARTIAL_WAVE_WEIGHT * (filled - waves), 1.0)
        flops = 2.0 * rows * columns * num_sms * (k + prologue)
        seconds = cost * flops / (flops_s * speed)
        best = seconds if best is None else np.minimum(best, seconds)
    assert best is not None
    # Products of fewer than 16 bits have results of 16.
    moved = count * (element_bytes * (m * k + n * k) + max(2.0, element_bytes) * m * n)
    reading = moved / (machine.memory_bytes_s * constants.memory_efficiency)
    return np.asarray(np.maximum(best, reading))


def count_prologue_elements(
    machine: MachineRates, precision: Precision, constants: TimingConstants
) -> Column | float:
    """Elements of a product's inner side that take as long as a tile's start does.

    To fill a pipeline with the first elements and to write a tile takes time, which faster tensor
    cores and smaller types do not shorten: the faster the products, the more elements it is.
    """
    accelerator = machine.accelerator
    peak = accelerator.peak_flops(choose_peak_precision(machine, precision))
    speed = peak / accelerator.num_sms / REFERENCE_MULTIPROCESSOR_FLOPS_S
    return constants.matmul_prologue * speed


def compute_alignment_speed_share(
    inputs: Column, outputs: Column, constants: TimingConstants
) -> Column:
    """The part of its speed that a product with a matrix of `inputs` x `outputs` keeps: rows of
    memory that do not begin at a cache line are read in smaller pieces."""
    is_aligned = (inputs % ALIGNED_ELEMENTS == 0) & (outputs % ALIGNED_ELEMENTS == 0)
    return np.where(is_aligned, 1.0, constants.unaligned_efficiency)


def compute_dense_flops_s(
    machine: MachineRates, precision: Precision, constants: TimingConstants
) -> Column | float:
    """FLOP/s that large products reach in `precision`: the peak, less what clocks and power take.

    A column where constants are.
    """
    name, peak = choose_peak_precision(machine, precision), machine.accelerator.peak_flops
    if name == "fp32":
        # The power that tensor cores take says nothing of products that do not use them.
        return peak(name) * constants.fp32_efficiency
    generation = machine.gpu_generation
    efficiency = {
        70: constants.matmul_efficiency_sm70,
        80: constants.matmul_efficiency_sm80,
        90: constants.matmul_efficiency_sm90,
        100: constants.matmul_efficiency_sm100,
    }[generation]
    if name == "fp8":
        relative = {90: constants.fp8_efficiency_sm90, 100: constants.fp8_efficiency_sm100}
        efficiency = efficiency * relative.get(generation, constants.fp8_efficiency_sm90)
    elif name == "fp4":
        efficiency = efficiency * constants.fp4_efficiency
    power = compute_power_speed_factor(machine, constants)
    return peak(name) * efficiency * power


def compute_power_speed_factor(machine: MachineRates, constants: TimingConstants) -> Column | float:
    """The factor by which large products are faster than on the reference of the generation, for
    the power that a GPU has for them, and for its silicon."""
    accelerator = machine.accelerator
    tflops = accelerator.bf16_tflops or accelerator.fp16_tflops
    reference = REFERENCE_WATTS[machine.gpu_generation]
    watts = accelerator.watts or reference * tflops
    share = machine.power_share * watts / tflops / reference
    factor: Column | float = min(share, 1.3) ** constants.power_exponent
    return factor * constants.ultra_speed if machine.is_blackwell_ultra else factor


def choose_peak_precision(machine: MachineRates, precision: Precision) -> str:
    """The type whose peak the products of blocks have: "fp32", "bf16", "fp16", "fp8" or "fp4"."""
    accelerator = machine.accelerator
    if precision == "fp32":
        return "fp32"
    if precision == "fp4" and accelerator.fp4_tflops:
        return "fp4"
    if precision in ("fp8", "mxfp8", "fp4") and accelerator.fp8_tflops:
        return "fp8"
    if precision == "fp16" or not accelerator.bf16_tflops:
        return "fp16"
    return "bf16"


def choose_head_precision(precision: Precision) -> Precision:
    """The type of the products of a router, of the head and of what comes before the blocks: they
    have no fewer than 16 bits."""
    if precision in ("fp32", "fp16"):
        return precision
    return "bf16"


def count_activation_bytes(precision: Precision) -> float:
    """Bytes of one element of what products give, and of what travels between ranks for them."""
    if precision == "fp32":
        return 4.0
    return 2.0
