"""What data parallelism adds to a step: gradients that are reduced and parameters that are gathered
beside no computation, and the optimizer on a rank's shard."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.plan.timing import collectives
from phalanx.plan.timing.collectives import GroupLinks
from phalanx.plan.timing.columns import Column, SetupColumns
from phalanx.plan.timing.constants import TimingConstants
from phalanx.plan.timing.machine import MachineRates


@dataclass(frozen=True)
class ShardUnit:
    """Parameters that are reduced and gathered together, and the seconds of one microbatch that
    a rank computes with them."""

    dense: Column
    """Parameters on one rank before ZeRO shards them."""
    experts: Column
    forward_s: Column
    backward_s: Column
    count: Column
    """Such units on one rank."""
    num_tensors: int = 1
    """Parameters of one unit, each with its own name and shape."""


@dataclass(frozen=True)
class DataParallelGroups:
    """The groups that gradients are reduced over: of most parameters, and of experts, which ranks
    of ep do not share."""

    shard: GroupLinks
    replicate: GroupLinks
    expert_shard: GroupLinks
    expert_replicate: GroupLinks


def build_data_parallel_links(
    columns: SetupColumns, machine: MachineRates, constants: TimingConstants
) -> DataParallelGroups:
    """The data-parallel groups of each setup. Ranks of cp reduce gradients, too."""
    # Without ZeRO every rank has all: one group.
    is_sharded = columns.zero_stage > 0
    shard = np.where(
        is_sharded, columns.dp_shard * columns.cp, columns.data_parallel_size * columns.cp
    )
    replicate = np.where(is_sharded, columns.dp_replicate, 1.0)
    folded = np.where(columns.cuts_experts, 1.0, columns.tp)
    expert_shard = np.maximum(1.0, shard * folded / columns.ep)

    def link_group(size: Column, stride: Column) -> GroupLinks:
        return collectives.build_group_links(size, stride, machine, constants)

    return DataParallelGroups(
        shard=link_group(shard, columns.tp),
        replicate=link_group(replicate, columns.tp * shard),
        expert_shard=link_group(expert_shard, columns.ep * columns.tp / folded),
        expert_replicate=link_group(replicate, columns.tp * shard),
    )


def estimate_exposed_communication_s(
    units: tuple[ShardUnit, ...],
    columns: SetupColumns,
    groups: DataParallelGroups,
    constants: TimingConstants,
) -> Column:
    """Seconds of one step in which gradients and parameters travel and nothing is computed."""
    gather = [_gather_s(unit, columns, groups) for unit in units]
    reduce = [_reduce_s(unit, columns, groups) for unit in units]
    replicas = [_replica_reduce_s(unit, columns, groups) for unit in units]
    by_unit = _estimate_exposed_s_per_unit(units, gather, reduce, columns, constants)
    by_unit = by_unit + _estimate_exposed_replica_reduce_s(units, replicas, columns, constants)
    by_step = _estimate_exposed_s_per_bucket(units, gather, reduce, replicas, columns, constants)
    return np.where(columns.zero_stage >= 2, by_unit, by_step)


def _gather_s(unit: ShardUnit, columns: SetupColumns, groups: DataParallelGroups) -> Column:
    """Seconds to gather the parameters of one unit."""
    seconds = collectives.all_gather_s(groups.shard, unit.dense * columns.gather_bytes)
    experts = collectives.all_gather_s(groups.expert_shard, unit.experts * columns.gather_bytes)
    # Each tensor's own message goes around all ranks, however small it is.
    more = (unit.num_tensors - 1) * groups.shard.ring_latency_s * (groups.shard.size > 1)
    seconds = seconds + np.where(columns.gathers_each_tensor, more, 0.0)
    return seconds + np.where(unit.experts > 0, experts, 0.0)


def _reduce_s(unit: ShardUnit, columns: SetupColumns, groups: DataParallelGroups) -> Column:
    """Seconds to reduce the gradients of one unit to their shards."""
    seconds = collectives.all_gather_s(groups.shard, unit.dense * columns.grad_bytes)
    experts = collectives.all_gather_s(groups.expert_shard, unit.experts * columns.grad_bytes)
    return seconds + np.where(unit.experts > 0, experts, 0.0)


def _replica_reduce_s(unit: ShardUnit, columns: SetupColumns, groups: DataParallelGroups) -> Column:
    """Seconds to add a unit's shards of gradients over the replicas."""
    dense = unit.dense * columns.grad_bytes / groups.shard.size
    experts = unit.experts * columns.grad_bytes / groups.expert_shard.size
    seconds = collectives.all_reduce_s(groups.replicate, dense)
    of_experts = collectives.all_reduce_s(groups.expert_replicate, experts)
    return seconds + np.where(unit.experts > 0, of_experts, 0.0)


def _estimate_exposed_s_per_unit(
    units: tuple[ShardUnit, ...],
    gather: list[Column],
    reduce: list[Column],
    columns: SetupColumns,
    constants: TimingConstants,
) -> Column:
    """ZeRO 2 and 3: units are gathered before they are used, and reduced once their gradients are
    there."""
    reduces_always = columns.reduces_each_microbatch | columns.accumulates_sharded
    reductions = np.where(reduces_always, columns.num_microbatches, 1.0)
    # ZeRO 2 gathers once a step, after the optimizer.
    is_stage_3 = columns.zero_stage >= 3
    forwards = np.where(is_stage_3, columns.num_microbatches, 1.0)
    backwards = np.where(is_stage_3 & ~columns.keeps_gathered, columns.num_microbatches, 0.0)
    exposed = np.zeros(1)
    for unit, gathered, reduced in zip(units, gather, reduce, strict=True):
        hidden = collectives.estimate_exposed_collective_s(gathered, unit.forward_s, constants)
        forward = np.where(columns.overlaps_gather, hidden, gathered)
        second_gather = collectives.estimate_exposed_collective_s(
            gathered, unit.backward_s, constants
        )
        backward = np.where(columns.overlaps_gather, second_gather, gathered)
        # Both directions of a backward are busy at once: what is left of the window counts.
        window = np.maximum(unit.backward_s - gathered * (backwards > 0), 0.0)
        hidden = collectives.estimate_exposed_collective_s(reduced, window, constants)
        reduction = np.where(columns.overlaps_reduce, hidden, reduced)
        exposed = exposed + unit.count * (
            forwards * forward + backwards * backward + reductions * reduction
        )
    # Nothing runs before the first unit is there, nor after the last one's gradients.
    first, last = gather[0], reduce[0]
    return (
        exposed
        + np.where(columns.overlaps_gather, (forwards + backwards) * first * 0.5, 0.0)
        + np.where(columns.overlaps_reduce, reductions * last * 0.5, 0.0)
    )


def _estimate_exposed_replica_reduce_s(
    units: tuple[ShardUnit, ...],
    replicas: list[Column],
    columns: SetupColumns,
    constants: TimingConstants,
) -> Column:
    """HSDP: shards of gradients are added over replicas, beside the backward of the last
    microbatch."""
    exposed = np.zeros(1)
    for unit, seconds in zip(units, replicas, strict=True):
        hidden = collectives.estimate_exposed_collective_s(seconds, unit.backward_s, constants)
        exposed = exposed + unit.count * np.where(columns.overlaps_reduce, hidden, seconds)
    return exposed


def _estimate_exposed_s_per_bucket(
    units: tuple[ShardUnit, ...],
    gather: list[Column],
    reduce: list[Column],
    replicas: list[Column],
    columns: SetupColumns,
    constants: TimingConstants,
) -> Column:
    """Plain data parallelism and ZeRO 1: buckets are reduced beside the backward of the last
    microbatch, and parameters gathered beside the forward of the next step."""
    gathered, reduced = np.zeros(1), np.zeros(1)
    forward, backward, num_units = np.zeros(1), np.zeros(1), np.zeros(1)
    for unit, g, r, replica in zip(units, gather, reduce, replicas, strict=True):
        gathered = gathered + unit.count * g
        reduced = reduced + unit.count * (r + replica)
        forward = forward + unit.count * unit.forward_s
        backward = backward + unit.count * unit.backward_s
        num_units = num_units + unit.count
    is_plain = columns.zero_stage < 1
    # An all-reduce carries twice what a reduce-scatter does, all of it beside the backward.
    reduced = np.where(is_plain, 2 * reduced, reduced)
    gathered = np.where(is_plain, 0.0, gathered)
    # The last bucket has no backward beside it.
    last = reduced / np.maximum(num_units, 1.0)
    hidden = collectives.estimate_exposed_collective_s(reduced, backward, constants)
    exposed = np.where(columns.overlaps_reduce, np.maximum(hidden, last), reduced)
    hidden = collectives.estimate_exposed_collective_s(gathered, forward, constants)
    return exposed + np.where(columns.overlaps_gather, hidden, gathered)


def estimate_optimizer_s(
    units: tuple[ShardUnit, ...],
    columns: SetupColumns,
    groups: DataParallelGroups,
    machine: MachineRates,
    constants: TimingConstants,
) -> tuple[Column, Column]:
    """Seconds of the optimizer on a rank's shard, and of what offloading it or the parameters
    adds."""
    is_sharded = columns.zero_stage > 0
    dense = np.where(is_sharded, groups.shard.size, 1.0)
    experts = np.where(is_sharded, groups.expert_shard.size, 1.0)
    params = np.zeros(1)
    for unit in units:
        params = params + unit.count * (unit.dense / dense + unit.experts / experts)
    on_gpu = params * constants.optimizer_bytes
    on_gpu = on_gpu / (machine.memory_bytes_s * constants.memory_efficiency)
    # Gradients go down and weights come up; the host reads and writes what a GPU would.
    moved = params * (columns.grad_bytes + columns.gather_bytes) / (constants.host_gb_s * 1e9)
    on_host = params * constants.optimizer_bytes / (constants.host_adam_gb_s * 1e9)
    fetched = params * columns.gather_bytes * 2 * columns.num_microbatches
    fetched = fetched / (constants.host_gb_s * 1e9)
    offload = np.where(columns.offloads_optimizer, moved + on_host, 0.0)
    offload = offload + np.where(columns.offloads_parameters, fetched, 0.0)
    return np.where(columns.offloads_optimizer, 0.0, on_gpu), offload
