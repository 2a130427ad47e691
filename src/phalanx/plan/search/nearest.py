"""What fits where nothing fits as asked: along each axis, or each two together, the nearest change
that does, each planned exactly before it is named, with its price."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.core.errors import LayoutError
from phalanx.core.units import plural
from phalanx.job.copies import apply_job_keys, drop_job_keys
from phalanx.job.schema import Job
from phalanx.plan.described_cluster import resize_cluster
from phalanx.plan.host_memory import count_ranks_of_node
from phalanx.plan.search.attempts import plan_rows
from phalanx.plan.search.finalists import FinalistPlanner
from phalanx.plan.search.overrides import (
    format_overrides,
    get_default_of_key,
    list_changed_keys,
    passes_job_checks,
)
from phalanx.plan.search.result import NearestFit, RankedLayout
from phalanx.plan.search.screening import screen_layouts
from phalanx.plan.search.search import find_winner
from phalanx.plan.search.task import SearchTask, build_search_task

MAX_DEVICE_MULTIPLE = 64
MAX_PLANS_PER_CHANGE = 16
MAX_PAIRS = 3  # of axes that only help together
DATA_PARALLEL_JOB_KEYS = ("parallel.dp_replicate", "parallel.dp_shard")
# Keys that a search may choose again where the job's own values leave nothing that fits.
OPENED_KEYS = {
    "recompute": ("train.recompute", "train.recompute_every", "train.recompute_budget_gib"),
    "micro-batch": ("train.micro_batch_size",),
    "accumulate": ("parallel.accumulate",),
    "zero": ("parallel.zero_stage", *DATA_PARALLEL_JOB_KEYS),
    "tp": ("parallel.tp", *DATA_PARALLEL_JOB_KEYS),
    "pp": (
        *("parallel.pp", "parallel.schedule", "parallel.schedule_file", "parallel.stages_per_rank"),
        *DATA_PARALLEL_JOB_KEYS,
    ),
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
    """The fastest layout that fits along each axis where one change of the job makes one fit, and
    of each two axes where only both together do; cheapest first, by the device-seconds of a step.

    Where neither does, the fastest with everything left open.
    """
    fits: list[NearestFit] = []
    helpless = []  # axes that do not help alone
    for axis in _list_axes(task):
        fit = _find_best_fit_of_change(task, _open_axes(task, axis))
        if fit is None:
            helpless.append(axis)
        else:
            fits.append(fit)
    pairs = [_open_axes(task, *pair) for pair in itertools.combinations(helpless, 2)]
    fits += _keep_cheapest(filter(None, (_find_best_fit_of_change(task, pair) for pair in pairs)))
    if not fits and len(helpless) > 2:
        fits += filter(None, [_find_best_fit_of_change(task, _open_all_axes(task))])
    fits += _find_fewest_more_devices(task, helpless)
    if not fits:
        fits += filter(None, [_find_best_fit_of_change(task, _open_all_axes(task, offloads=True))])
    return _add_relative_prices(fits)


def _list_axes(task: SearchTask) -> list[str]:
    """The axes that a search could choose for, and does not: what the job fixes, and offload."""
    axes = [
        axis for axis, keys in OPENED_KEYS.items() if any(_is_key_in_job(task, key) for key in keys)
    ]
    if task.job.parallel.offload == "none":
        axes.append("offload")
    return axes


def _open_axes(task: SearchTask, *axes: str) -> _Change:
    """The axes left open."""
    keys = [key for axis in axes for key in OPENED_KEYS.get(axis, ())]
    offloads = "offload" in axes
    if offloads:
        keys.append("parallel.offload")
    job = drop_job_keys(task.job, *keys)
    return _Change(" + ".join(axes), replace(task, job=job, offloads=offloads))


def _open_all_axes(task: SearchTask, *, offloads: bool = False) -> _Change:
    """All keys that the job fixes, left open at once: where no two are enough."""
    job = drop_job_keys(task.job, *(key for keys in OPENED_KEYS.values() for key in keys))
    if offloads:
        job = drop_job_keys(job, "parallel.offload")
    return _Change("layout", replace(task, job=job, offloads=offloads))


def _is_key_in_job(task: SearchTask, key: str) -> bool:
    section, _, name = key.partition(".")
    return name in getattr(task.job, section).model_fields_set


def _keep_cheapest(fits: Iterable[NearestFit]) -> list[NearestFit]:
    """The MAX_PAIRS cheapest of `fits`."""
    return sorted(fits, key=_get_device_seconds)[:MAX_PAIRS]


def _find_fewest_more_devices(task: SearchTask, helpless: Sequence[str]) -> list[NearestFit]:
    """The fewest times as many devices, doubled, over which the job fits; where it fits on none, it
    fits there with one of `helpless` left open, too. Empty where that is not enough."""
    for axes in ((), *((axis,) for axis in helpless if axis != "offload")):
        opened = replace(task, job=_open_axes(task, *axes).task.job)
        times = 2
        while times <= MAX_DEVICE_MULTIPLE:
            change = _build_more_devices_change(opened, times)
            change = replace(change, axis=" + ".join((change.axis, *axes)))
            fit = _find_best_fit_of_change(task, change)
            if fit is not None:
                return [fit]
            times *= 2
    return []


def _build_more_devices_change(task: SearchTask, times: int) -> _Change:
    num_ranks = task.num_ranks * times
    cluster = resize_cluster(task.cluster, num_ranks)
    if task.cluster.device != "cuda":
        # Ranks of a CPU share its memory: more of them means another machine as well.
        cluster = replace(task.cluster, memory_bytes=task.cluster.memory_bytes * times)
    job = drop_job_keys(task.job, "parallel.ranks", *DATA_PARALLEL_JOB_KEYS)
    keys = {"parallel.ranks": num_ranks}
    if task.job.cluster.nodes is not None:
        keys["cluster.nodes"] = cluster.num_nodes
    words = f"{plural(num_ranks, 'rank')} with as much memory each"
    if task.cluster.device == "cuda" and not _has_devices(task, num_ranks):
        gpus = plural(_count_present_devices(task), "GPU")
        words += f", on {cluster.num_nodes} machines like this one, which has {gpus}"
    return _Change(
        "more ranks",
        replace(task, job=apply_job_keys(job, keys), cluster=cluster, num_ranks=num_ranks),
        words,
    )


def _has_devices(task: SearchTask, num_ranks: int) -> bool:
    """True where a key of the job can ask for so many ranks: of a cluster that it describes, or as
    many as this machine has GPUs."""
    return task.cluster.is_described or num_ranks <= _count_present_devices(task)


def _count_present_devices(task: SearchTask) -> int:
    return task.num_ranks + task.num_unused_devices


def _find_best_fit_of_change(task: SearchTask, change: _Change) -> NearestFit | None:
    """The best layout of a change that fits when it is planned; None if none does.

    Its overrides make a job whose own search proposes what is promised.
    """
    try:
        screened = screen_layouts(change.task)
    except LayoutError:
        return None  # no layout divides ranks and batch
    planner = FinalistPlanner(
        change.task.job, change.task.shape, change.task.cluster, change.task.vocab_size
    )
    members = range(min(MAX_PLANS_PER_CHANGE, len(screened.rows)))
    for ranked in plan_rows(screened, planner, members):
        num_ranks_of_node = count_ranks_of_node(change.task.cluster, change.task.num_ranks)
        fit = NearestFit(
            change.axis,
            "",
            ranked,
            change.task.num_ranks,
            host_bytes_per_node=num_ranks_of_node * ranked.memory.host_bytes,
            words=change.words,
        )
        if change.words and not _has_devices(task, change.task.num_ranks):
            return fit  # no key says that there is another machine
        fixed = _fix_open_keys(task, ranked)
        promised = _add_overrides(task, change, fit, apply_job_keys(change.task.job, fixed))
        if promised is not None:
            return promised
    return None


def _fix_open_keys(task: SearchTask, ranked: RankedLayout) -> dict[str, Any]:
    """The keys of a layout with those that a search would choose again: the axes of degree 1 among
    the keys that the job gives, and recomputation, experts and accumulation that it leaves open."""
    keys = dict(ranked.job_keys)
    parallel, train = task.job.parallel, task.job.train
    for axis in ("tp", "pp", "cp"):
        if getattr(parallel, axis) is not None:
            keys.setdefault(f"parallel.{axis}", 1)
    if task.shape.experts is not None:
        keys.setdefault("parallel.ep", 1)
    if "recompute" not in train.model_fields_set and task.shape.activations is not None:
        keys.setdefault("train.recompute", get_default_of_key("train.recompute"))
    accumulates = ranked.num_microbatches > 1 and ranked.layout.pp == 1
    if ranked.zero_stage >= 2 and accumulates and "accumulate" not in parallel.model_fields_set:
        keys.setdefault("parallel.accumulate", get_default_of_key("parallel.accumulate"))
    return keys


def _add_overrides(
    task: SearchTask, change: _Change, fit: NearestFit, target: Job
) -> NearestFit | None:
    """`fit` with the overrides that turn the job of `task` into `target`, and with the layout that
    the search of that job proposes; None where its keys contradict each other."""
    if not passes_job_checks(target):
        return None
    try:
        # As a command makes it that has these overrides: of a described machine the cluster, too.
        cluster = None if task.cluster.is_described else change.task.cluster
        promised = build_search_task(
            target, cluster=cluster, shape=task.shape, vocab_size=task.vocab_size
        )
        winner = find_winner(promised)
    except LayoutError:
        return None
    if winner is None:
        return None
    keys = list_changed_keys(task.job, target)
    if promised.num_ranks == task.num_ranks:
        keys.pop("parallel.ranks", None)
    return replace(fit, change=format_overrides(keys), ranked=winner)


def _add_relative_prices(fits: list[NearestFit]) -> tuple[NearestFit, ...]:
    """`fits` with their device-seconds beside the cheapest one's, in this order."""

    ordered = sorted(_drop_repeated_fits(fits), key=_get_device_seconds)
    if not ordered or not _get_device_seconds(ordered[0]):
        return tuple(ordered)
    cheapest = _get_device_seconds(ordered[0])
    return tuple(replace(fit, slowdown=_get_device_seconds(fit) / cheapest) for fit in ordered)


def _get_device_seconds(fit: NearestFit) -> float:
    """Seconds of a step times devices; 0 where time is not predicted."""
    return (fit.ranked.step_s or 0.0) * fit.num_ranks


def _drop_repeated_fits(fits: list[NearestFit]) -> list[NearestFit]:
    """`fits` without those that change the same keys to the same values as one before."""
    by_change: dict[str, NearestFit] = {}
    for fit in fits:
        by_change.setdefault(fit.change or fit.words, fit)
    return list(by_change.values())
