"""What fits where nothing fits as asked: along each axis the nearest change that does, each planned
exactly before it is named, with its price."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from phalanx.core.errors import LayoutError
from phalanx.core.units import plural
from phalanx.plan.described_cluster import resize_cluster
from phalanx.plan.memory import StateBytes
from phalanx.plan.search.finalists import (
    FinalistPlanner,
    apply_job_keys,
    drop_job_keys,
    list_job_keys_of_row,
)
from phalanx.plan.search.result import NearestFit
from phalanx.plan.search.search import ScreenedLayouts, SearchTask, screen_layouts
from phalanx.plan.workload import build_workload

MAX_DEVICE_MULTIPLE = 64
MAX_PLANS_PER_CHANGE = 16
DATA_PARALLEL_JOB_KEYS = ("parallel.dp_replicate", "parallel.dp_shard")
# Keys that a search may choose again where the job's own values leave nothing that fits.
OPENED_KEYS = {
    "recompute": ("train.recompute", "train.recompute_every", "train.recompute_budget_gib"),
    "micro-batch": ("train.micro_batch_size",),
    "accumulate": ("parallel.accumulate",),
    "zero": ("parallel.zero_stage", *DATA_PARALLEL_JOB_KEYS),
    "tp": ("parallel.tp", *DATA_PARALLEL_JOB_KEYS),
    "pp": ("parallel.pp", "parallel.schedule", "parallel.stages_per_rank", *DATA_PARALLEL_JOB_KEYS),
    "cp": ("parallel.cp", *DATA_PARALLEL_JOB_KEYS),
    "ep": ("parallel.ep", *DATA_PARALLEL_JOB_KEYS),
}


@dataclass(frozen=True)
class _Change:
    """One way to ask for something else: the axis, and the search that this makes."""

    axis: str
    task: SearchTask
    words: str = ""


def find_nearest_fits(task: SearchTask) -> tuple[NearestFit, ...]:
    """The fastest layout that fits along each axis where one change of the job makes one fit;
    cheapest first, by the device-seconds of a step."""
    fits = []
    for make_change in (_list_axis_changes, _list_offload_change):
        fits += [
            fit for change in make_change(task) if (fit := _find_best_fit_of_change(task, change))
        ]
    more = _find_fewest_more_devices(task)
    if more is not None:
        fits.append(more)
    if not fits:
        fits += [
            fit
            for change in _list_change_of_all_keys(task)
            if (fit := _find_best_fit_of_change(task, change))
        ]
    return _add_relative_prices(fits)


def _list_axis_changes(task: SearchTask) -> Iterator[_Change]:
    """Each axis that the job fixes, left open."""
    for axis, keys in OPENED_KEYS.items():
        if not any(_is_key_in_job(task, key) for key in keys):
            continue
        yield _Change(axis, replace(task, job=drop_job_keys(task.job, *keys)))


def _is_key_in_job(task: SearchTask, key: str) -> bool:
    section, _, name = key.partition(".")
    return name in getattr(task.job, section).model_fields_set


def _list_offload_change(task: SearchTask) -> Iterator[_Change]:
    if task.job.parallel.offload == "none":
        job = drop_job_keys(task.job, "parallel.offload")
        yield _Change("offload", replace(task, job=job, offloads=True))


def _list_change_of_all_keys(task: SearchTask) -> Iterator[_Change]:
    """All keys that the job fixes, left open at once: where no single one is enough."""
    keys = {key for group in OPENED_KEYS.values() for key in group}
    job = drop_job_keys(task.job, *keys, "parallel.offload")
    yield _Change("layout", replace(task, job=job))
    yield _Change("layout", replace(task, job=job, offloads=True))


def _find_fewest_more_devices(task: SearchTask) -> NearestFit | None:
    """The fewest times as many devices, doubled, over which the job fits."""
    times = 2
    while times <= MAX_DEVICE_MULTIPLE:
        num_ranks = task.num_ranks * times
        job = drop_job_keys(task.job, "parallel.ranks", *DATA_PARALLEL_JOB_KEYS)
        cluster = resize_cluster(task.cluster, num_ranks)
        if task.cluster.device != "cuda":
            # Ranks of a CPU share its memory: more of them means another machine as well.
            cluster = replace(task.cluster, memory_bytes=task.cluster.memory_bytes * times)
        job = apply_job_keys(job, {"parallel.ranks": num_ranks})
        change = _Change(
            "more ranks",
            replace(task, job=job, cluster=cluster, num_ranks=num_ranks),
            f"{plural(num_ranks, 'rank')} with as much memory each",
        )
        fit = _find_best_fit_of_change(task, change)
        if fit is not None:
            return fit
        times *= 2
    return None


def _find_best_fit_of_change(task: SearchTask, change: _Change) -> NearestFit | None:
    """The best layout of a change that fits when it is planned; None if none does."""
    try:
        screened = screen_layouts(change.task)
    except LayoutError:
        return None  # no layout divides ranks and batch
    planner = FinalistPlanner(
        change.task.job, change.task.shape, change.task.cluster, change.task.vocab_size
    )
    for row in range(min(MAX_PLANS_PER_CHANGE, len(screened.rows))):
        ranked = planner.plan_layout(_list_changed_keys(change, screened, row))
        if ranked is None:
            continue
        host_bytes = _count_host_bytes(change.task, ranked.offload)
        host_memory = change.task.cluster.host_memory_bytes
        if host_memory is not None and host_bytes > host_memory:
            continue
        words = change.words or _format_key_overrides(task, ranked.job_keys)
        return NearestFit(
            change.axis, words, ranked, change.task.num_ranks, host_bytes_per_node=host_bytes
        )
    return None


def _count_host_bytes(task: SearchTask, offload: str) -> int:
    """Bytes of states that wait in the host memory of one node, without staging buffers."""
    if offload == "none":
        return 0
    work = build_workload(task.job, task.shape, micro_batch_size=1, num_microbatches=1, tp=1)
    per_param = float(work.optimizer_bytes)
    if offload == "parameters":
        per_param += StateBytes().parameters + StateBytes().gradients
    return round(task.shape.num_params * per_param / task.cluster.num_nodes)


def _list_changed_keys(change: _Change, screened: ScreenedLayouts, row: int) -> dict[str, Any]:
    return list_job_keys_of_row(change.task.job, screened.rows, row)


def _format_key_overrides(task: SearchTask, keys: Mapping[str, Any]) -> str:
    """The keys that a job must say otherwise, as overrides."""
    changed = []
    for key, value in keys.items():
        section, _, name = key.partition(".")
        if getattr(getattr(task.job, section), name) != value:
            changed.append(f"{key}={value}")
    return " ".join(changed)


def _add_relative_prices(fits: list[NearestFit]) -> tuple[NearestFit, ...]:
    """`fits` with their device-seconds beside the cheapest one's, in this order."""

    def device_seconds(fit: NearestFit) -> float:
        return (fit.ranked.step_s or 0.0) * fit.num_ranks

    ordered = sorted(_drop_repeated_fits(fits), key=device_seconds)
    if not ordered or not device_seconds(ordered[0]):
        return tuple(ordered)
    cheapest = device_seconds(ordered[0])
    return tuple(replace(fit, slowdown=device_seconds(fit) / cheapest) for fit in ordered)


def _drop_repeated_fits(fits: list[NearestFit]) -> list[NearestFit]:
    """`fits` without those that change the same keys to the same values as one before."""
    by_change: dict[str, NearestFit] = {}
    for fit in fits:
        by_change.setdefault(fit.change, fit)
    return list(by_change.values())
