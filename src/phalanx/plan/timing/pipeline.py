"""Pipelines in closed form: the slowest stage, the time until all stages are busy, and messages.

`simulate_finalist` runs the schedule itself instead, for the few setups that are worth it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.plan.timing import collectives
from phalanx.plan.timing.columns import Column, SetupColumns
from phalanx.plan.timing.constants import TimingConstants
from phalanx.plan.timing.machine import MachineRates


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one microbatch: of a mean block, and of what first and last stage have beside
    blocks."""

    num_layers: int
    forward: Column
    backward: Column
    weight_gradients: Column
    first: Column
    last: Column
    block_flops: float
    """FLOPs by which stages are cut, of a mean block, and beside the blocks of both ends."""
    first_flops: float
    last_flops: float


def estimate_bubble_s(
    stage: StageTimes,
    num_bytes: Column,
    columns: SetupColumns,
    machine: MachineRates,
    constants: TimingConstants,
) -> Column:
    """Seconds of one step in which the mean rank waits for other stages: while the pipeline fills
    and drains, for the slowest stage, and for messages of `num_bytes`."""
    pp, v = columns.pp, columns.stages_per_rank
    block = stage.forward + stage.backward
    ends = stage.first + stage.last
    mean = (stage.num_layers * block + ends) / pp
    slowest = _slowest_stage_s(stage, columns)
    waiting = columns.num_microbatches * (slowest - mean)
    blocks_of_rank = stage.num_layers / pp
    fill = (pp - 1) * _idle_s_per_other_stage(stage, columns) * blocks_of_rank + (
        pp - 1
    ) / pp * ends / v
    stride = columns.tp * columns.cp * columns.data_parallel_size
    message = collectives.p2p_send_s(num_bytes, stride, pp, machine, constants)
    exposed = np.where(
        columns.overlaps_p2p & (v > 1), constants.p2p_overlapped, constants.p2p_exposed
    )
    sends = 2 * (pp - 1) + 2 * v * columns.num_microbatches * exposed
    return np.where(pp > 1, waiting + fill + sends * message, 0.0)


def _slowest_stage_s(stage: StageTimes, columns: SetupColumns) -> Column:
    """Seconds of one microbatch on the rank that takes longest, where first and last stage have
    fewer blocks if the blocks do not divide."""
    pp = columns.pp
    block = stage.forward + stage.backward
    # Chunks that do not divide are larger on some ranks and smaller on others.
    most = np.ceil(stage.num_layers / pp)
    missing = pp * most - stage.num_layers
    at_end = np.maximum(most - np.ceil(missing / 2), 0.0)
    at_start = np.maximum(most - np.floor(missing / 2), 0.0)
    is_stated = columns.last_stage_blocks > 0
    at_end = np.where(is_stated, columns.last_stage_blocks, at_end)
    of_others = np.ceil((stage.num_layers - at_end) / np.maximum(pp - 1, 1.0))
    most = np.where(is_stated, of_others, most)
    at_start = np.where(is_stated, stage.num_layers - at_end - (pp - 2) * most, at_start)
    ends = np.maximum(at_start * block + stage.first, at_end * block + stage.last)
    inner = np.where(pp > 2, most, np.minimum(most, np.maximum(at_start, at_end)))
    slowest = np.maximum(ends, inner * block)
    if columns.balances_stages.any():
        slowest = np.where(
            columns.balances_stages, _slowest_balanced_stage_s(stage, columns), slowest
        )
    undivided = stage.num_layers * block + stage.first + stage.last
    return np.where(pp > 1, np.minimum(slowest, undivided), undivided)


def _slowest_balanced_stage_s(stage: StageTimes, columns: SetupColumns) -> Column:
    """Seconds of one microbatch on the rank that takes longest, of ranks that share the blocks so
    that the most FLOPs of one are least; infinite where no number of blocks does."""
    pp, num_layers = columns.pp, stage.num_layers
    # What is recomputed in full is a forward more, a third of a block.
    block = stage.block_flops * (1 + columns.recomputed_matmul / 3)
    # The first and the last stage of a V are on one rank.
    first = stage.first_flops + np.where(columns.is_v_shaped, stage.last_flops, 0.0)
    last = np.where(columns.is_v_shaped, 0.0, stage.last_flops)
    mean = (num_layers * block + stage.first_flops + stage.last_flops) / pp
    least = np.full_like(mean, np.inf)
    # It has some blocks, with or without an end, and is the first such that is no less than the
    # mean and leaves the others room for all.
    for end in (np.zeros(1), first, last):
        fewest = np.maximum(0.0, np.floor((mean - end) / block))
        for more in range(3):
            longest = (fewest + more) * block + end
            rest = [np.floor((longest - other) / block + 1e-9) for other in (first, last)]
            room = rest[0] + rest[1] + (pp - 2) * np.floor(longest / block + 1e-9)
            is_enough = (room >= num_layers) & (rest[0] >= 0) & (rest[1] >= 0)
            least = np.where(is_enough, np.minimum(least, longest), least)
    mean_s = num_layers * (stage.forward + stage.backward) + stage.first + stage.last
    return mean_s / pp * least / mean


def _idle_s_per_other_stage(stage: StageTimes, columns: SetupColumns) -> Column:
    """Seconds that a rank idles for each other stage, for one block of each: see
    phalanx.plan.pipeline.closed_forms."""
    forward, backward, weights = stage.forward, stage.backward, stage.weight_gradients
    plain = (forward + backward) / columns.stages_per_rank
    saved = columns.deferred_weights * weights
    # ZB-H1 keeps as few microbatches as 1F1B: a rank waits for the longest pass of the next.
    least = np.where(columns.deferred_weights > 2, 0.0, np.maximum(forward, backward - weights))
    zero = np.maximum(least, forward + backward - saved) / columns.stages_per_rank
    # Fewer microbatches than 2p - 1 do not fill the V: with p of them a rank waits for a forward,
    # and for what the gradients of inputs take beyond those of weights, as with recomputation.
    filled, unfilled = forward / 2, forward + np.maximum(0.0, backward - 2 * weights)
    missing = 2 * columns.pp - 1 - columns.num_microbatches
    share = np.clip(missing / np.maximum(1.0, columns.pp - 1), 0.0, 1.0)
    v_shaped = filled + share * (unfilled - filled)
    is_zero_bubble = columns.deferred_weights > 0
    return np.where(columns.is_v_shaped, v_shaped, np.where(is_zero_bubble, zero, plain))
