"""`WhatIfGrid`: the plan of one layout at many sequence lengths, micro-batches, numbers of devices,
memories, networks and recomputations, computed by the planner, for a page to interpolate."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from phalanx.core.errors import PhalanxError
from phalanx.job.schema import Job
from phalanx.plan.advice.advise import UNLIMITED_GIB, change_job_keys
from phalanx.plan.cluster import Cluster, rank_capacity_bytes
from phalanx.plan.described_cluster import resize_cluster
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.plan.search.describe import find_counted_unit
from phalanx.plan.search.step_times import (
    build_machine_rates,
    build_step_setup,
    estimate_planned_step,
)
from phalanx.plan.timing.machine import MachineRates
from phalanx.plan.timing.setup import StepSetup

GIB = 2**30
SEQ_LEN_AND_DEVICE_FACTORS = (0.5, 1, 2, 4)
MICRO_BATCH_FACTORS = (0.5, 1, 2)
NETWORK_FACTORS = (0.5, 1, 2)
MEMORY_FACTORS = (0.5, 1, 1.5, 2)
AxisKind = Literal["range", "stops", "choice"]


@dataclass(frozen=True)
class WhatIfAxis:
    """One slider. "range" may stand between points, "stops" only on them, "choice" has words."""

    name: str
    label: str
    unit: str
    kind: AxisKind
    values: tuple[Any, ...]
    start: int
    """The index of the plan's own value."""

    def to_json(self) -> dict[str, Any]:
        # Numbers that double are read between points as they are spaced: geometrically.
        return dict(vars(self)) | {"values": list(self.values), "log": self.kind == "range"}


@dataclass(frozen=True)
class WhatIfGrid:
    """The planner's results at every combination of the axes' values, the last axis fastest;
    None where there is no such plan."""

    axes: tuple[WhatIfAxis, ...]
    memory_axis: WhatIfAxis
    """Memory decides what may be filled and nothing else: it is no axis of the columns."""
    step_s: tuple[float | None, ...]
    tokens_per_s: tuple[float | None, ...]
    """Tokens a second of one device."""
    peak_gib: tuple[float | None, ...]
    capacity_gib: tuple[float, ...]
    """What a rank may fill at each point of `memory_axis`."""
    counted_unit: str = "tokens"
    """What `tokens_per_s` counts."""

    def to_json(self) -> dict[str, Any]:
        columns = {
            name: [_round_to_six_digits(value) for value in getattr(self, name)]
            for name in ("step_s", "tokens_per_s", "peak_gib", "capacity_gib")
        }
        axes = [axis.to_json() for axis in self.axes]
        return {
            "axes": axes,
            "memory_axis": self.memory_axis.to_json(),
            "counted_unit": self.counted_unit,
            **columns,
        }


def _round_to_six_digits(value: float | None) -> float | None:
    # Six digits keep the page small, and are more than a prediction has.
    if value is None:
        return None
    return float(f"{value:.6g}")


@dataclass(frozen=True)
class _GridPoint:
    """A plan at one combination of what changes a plan, with its job and the rates of as many
    devices; the network changes only its time."""

    peak_bytes: int
    setup: StepSetup
    job: Job
    plan: Plan
    machine: MachineRates


def compute_what_if(
    job: Job, plan: Plan, cluster: Cluster, on_point: Callable[[int, int], None] | None = None
) -> WhatIfGrid | None:
    """The grid around a plan; None where its time cannot be predicted.

    tp, pp, cp and ep stay, data parallelism takes the other devices, and the global batch stays.
    The links of more devices, or of fewer, are those of a cluster of that size.
    `on_point` is told how many of all plans are made. 30 ms a plan.
    """
    if cluster.accelerator is None or plan.model_shape.work(job.data.seq_len) is None:
        return None
    axes = _build_axes(plan, job, cluster)
    seq_lens, micro_batches, devices, networks, recomputes = (axis.values for axis in axes)
    plans: dict[tuple[Any, ...], _GridPoint | None] = {}
    combinations = list(itertools.product(seq_lens, micro_batches, devices, recomputes))
    for number, combination in enumerate(combinations):
        if on_point is not None:
            on_point(number, len(combinations))
        plans[combination] = _plan_grid_point(job, plan, cluster, *combination)
    planned_gb_s = networks[axes[3].start]
    steps, speeds, peaks = [], [], []
    for seq_len, micro, num_devices, network, recompute in itertools.product(
        seq_lens, micro_batches, devices, networks, recomputes
    ):
        point = plans[seq_len, micro, num_devices, recompute]
        step_s, speed, peak = _compute_point_values(
            point, _predict_step_s_with_network(point, network / planned_gb_s)
        )
        steps.append(step_s)
        speeds.append(speed)
        peaks.append(peak)
    memory_axis = _build_memory_axis(cluster)
    capacities = [
        _compute_capacity_gib(job, cluster, gib, plan.world_size) for gib in memory_axis.values
    ]
    return WhatIfGrid(
        axes,
        memory_axis,
        tuple(steps),
        tuple(speeds),
        tuple(peaks),
        tuple(capacities),
        find_counted_unit(
            plan.model_shape.get_sample_noun(of_own_data=False),
            plan.model_shape.count_sample_tokens(job.data.seq_len),
        ),
    )


def _compute_point_values(
    point: _GridPoint | None, step_s: float | None
) -> tuple[float | None, float | None, float | None]:
    """(seconds of a step, tokens a second of a device, GiB at the peak)."""
    if point is None or step_s is None:
        return None, None, None
    setup = point.setup
    num_tokens = setup.num_sequences * setup.seq_len
    return step_s, num_tokens / step_s / setup.layout.world_size, point.peak_bytes / GIB


def _build_memory_axis(cluster: Cluster) -> WhatIfAxis:
    memory = cluster.memory_bytes / GIB
    memories = [round(memory * factor, 1) for factor in MEMORY_FACTORS]
    return _build_axis("memory", "Memory of a GPU", "GiB", "range", memories, memories[1])


def _build_axes(plan: Plan, job: Job, cluster: Cluster) -> tuple[WhatIfAxis, ...]:
    seq_lens = _list_scaled_values(
        job.data.seq_len, SEQ_LEN_AND_DEVICE_FACTORS, multiple=max(2 * plan.layout.cp, 128)
    )
    shape = plan.model_shape
    # Images, and samples of a user's own, are as long as they are.
    if shape.count_sample_tokens(1) == shape.count_sample_tokens(2):
        seq_lens = [job.data.seq_len]
    longest = shape.longest_sequence
    if longest:
        seq_lens = [value for value in seq_lens if value <= longest]
    num_ranks = plan.world_size
    model_parallel = num_ranks // plan.layout.data_parallel_size
    devices = [
        value
        for value in _list_scaled_values(num_ranks, SEQ_LEN_AND_DEVICE_FACTORS)
        if value % model_parallel == 0 and plan.global_batch_size % (value // model_parallel) == 0
    ]
    micro = _list_scaled_values(plan.micro_batch_size, MICRO_BATCH_FACTORS)
    networks: list[float] = [1.0]
    # The plan may stand in one node, and the most devices not.
    links = _resize_where_other_size(cluster, max(devices)).links
    if len(links) > 1:
        networks = [round(links[-1].gb_s * factor, 3) for factor in NETWORK_FACTORS]
    recomputes = ["none", "selective", "full"]
    if plan.activations.recompute not in recomputes:
        recomputes.append(plan.activations.recompute)
    return (
        _build_axis("seq_len", "Sequence length", "tokens", "range", seq_lens, job.data.seq_len),
        _build_axis(
            "micro",
            f"{shape.get_sample_noun(of_own_data=False).capitalize()} of a micro-batch",
            "",
            "stops",
            micro,
            plan.micro_batch_size,
        ),
        _build_axis("devices", "GPUs", "", "stops", devices, num_ranks),
        _build_axis(
            "network", "Network per GPU", "GB/s", "range", networks, networks[len(networks) // 2]
        ),
        _build_axis(
            "recompute", "Recomputation", "", "choice", recomputes, plan.activations.recompute
        ),
    )


def _build_axis(
    name: str, label: str, unit: str, kind: AxisKind, values: Sequence[Any], planned_value: Any
) -> WhatIfAxis:
    return WhatIfAxis(name, label, unit, kind, tuple(values), list(values).index(planned_value))


def _list_scaled_values(value: int, factors: Sequence[float], multiple: int = 1) -> list[int]:
    """Whole numbers at these factors of a value, itself among them; others are multiples of
    `multiple`."""
    values = set()
    for factor in factors:
        scaled = value * factor
        if scaled >= 1 and scaled == int(scaled) and (factor == 1 or scaled % multiple == 0):
            values.add(int(scaled))
    return sorted(values)


def _plan_grid_point(
    job: Job,
    plan: Plan,
    cluster: Cluster,
    seq_len: int,
    micro_batch_size: int,
    num_devices: int,
    recompute: str,
) -> _GridPoint | None:
    """The plan's layout with other values; None where that is no plan."""
    layout = plan.layout
    num_shares = num_devices // (layout.world_size // layout.data_parallel_size)
    replicas, shards = _split_data_parallel_degrees(plan, num_shares)
    if replicas * shards != num_shares:
        return None
    parallel = {
        "ranks": num_devices,
        "tp": layout.tp,
        "pp": layout.pp,
        "cp": layout.cp,
        "ep": layout.ep,
        "dp_replicate": replicas,
        "dp_shard": shards if plan.chosen.zero_stage else None,
        "zero_stage": plan.chosen.zero_stage or None,
    }
    train: dict[str, Any] = {"micro_batch_size": micro_batch_size}
    if recompute != plan.activations.recompute:
        train |= {"recompute": recompute, "recompute_every": None, "recompute_budget_gib": None}
    changed = change_job_keys(job, plan, {"parallel": parallel, "train": train})
    changed = changed.model_copy(update={"data": job.data.model_copy(update={"seq_len": seq_len})})
    resized = _resize_where_other_size(cluster, num_devices)
    machine = build_machine_rates(resized)
    assert machine is not None
    unlimited = replace(resized, memory_bytes=round(UNLIMITED_GIB * GIB))
    try:
        point = make_plan(changed, cluster=unlimited, shape=plan.model_shape, is_explained=False)
    except PhalanxError:
        return None
    if point.layout.gradient_reduction_layout.world_size != num_devices:
        return None
    setup = build_step_setup(changed, point)
    return _GridPoint(point.chosen.total_bytes, setup, changed, point, machine)


def _resize_where_other_size(cluster: Cluster, num_devices: int) -> Cluster:
    """`cluster` with so many devices: as it stands where it has them, so that the plan's own point
    is the plan."""
    if num_devices == cluster.num_devices:
        return cluster
    return resize_cluster(cluster, num_devices)


def _split_data_parallel_degrees(plan: Plan, num_shares: int) -> tuple[int, int]:
    """(dp_replicate, dp_shard) of `num_shares` data-parallel ranks, as the plan splits its own: the
    shards of a hybrid stay as many, and replicas are added."""
    layout = plan.layout
    if plan.chosen.zero_stage == 0:
        return num_shares, 1
    if layout.dp_replicate == 1:
        return 1, num_shares
    return max(1, num_shares // layout.dp_shard), min(layout.dp_shard, num_shares)


def _predict_step_s_with_network(point: _GridPoint | None, factor: float) -> float | None:
    """Seconds of a step where the network carries `factor` times what it does, at each level beyond
    the innermost; predicted as those of the plan are."""
    if point is None:
        return None
    inner, *outer = point.machine.links
    links = (inner, *(replace(level, bytes_s=level.bytes_s * factor) for level in outer))
    machine = replace(point.machine, links=links)
    time = estimate_planned_step(point.job, point.plan, point.plan.model_shape, machine)
    return None if time is None else time.total_s


def _compute_capacity_gib(job: Job, cluster: Cluster, memory_gib: float, num_devices: int) -> float:
    """GiB that a rank may fill of a device with `memory_gib`."""
    section = job.cluster.model_copy(update={"memory_gib": memory_gib})
    changed = job.model_copy(update={"cluster": section})
    return rank_capacity_bytes(changed, cluster, num_devices) / GIB
