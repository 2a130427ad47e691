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
    ends = np.maximum(at_start * block + stage.first, at_end * block + stage.last)
    inner = np.where(pp > 2, most, np.minimum(most, np.maximum(at_start, at_end)))
    slowest = np.maximum(ends, inner * block)
    undivided = stage.num_layers * block + stage.first + stage.last
    return np.where(pp > 1, np.minimum(slowest, undivided), undivided)


def _idle_s_per_other_stage(stage: StageTimes, columns: SetupColumns) -> Column:
    """Seconds that a rank idles for each other stage, for one block of each: see
    phalanx.plan.pipeline.closed_forms."""
    forward, backward, weights = stage.forward, stage.backward, stage.weight_gradients
    plain = (forward + backward) / columns.stages_per_rank
    saved = columns.deferred_weights * weights
    # ZB-H1 keeps as few microbatches as 1F1B: a rank waits for the longest pass of the next.
    least = np.where(columns.deferred_weights > 2, 0.0, np.maximum(forward, backward - weights))
    zero = np.maximum(least, forward + backward - saved) / columns.stages_per_rank
    v_shaped = forward / 2
    is_zero_bubble = columns.deferred_weights > 0
    return np.where(columns.is_v_shaped, v_shaped, np.where(is_zero_bubble, zero, plain))
