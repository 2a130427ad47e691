"""Every layout that a job leaves open, screened by memory and ordered by time, in bulk."""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from phalanx.core.errors import LayoutError
from phalanx.core.units import plural
from phalanx.plan.cluster import choose_headroom, rank_memory_bytes
from phalanx.plan.search.attempts import (
    ScreenedLayouts,
    choose_smallest_rows,
    count_mechanisms_by_row,
)
from phalanx.plan.search.counts_by_degree import CountsByDegree
from phalanx.plan.search.memory_screen import MemoryScreen
from phalanx.plan.search.space import LayoutRows, OpenKeys, enumerate_layouts_in_least_mode
from phalanx.plan.search.step_times import build_machine_rates, get_sample_work, predict_row_times
from phalanx.plan.search.task import SearchTask
from phalanx.plan.workload import build_workload

SCREEN_SLACK = 1.06  # of what a rank may fill: the screen is not exact, and the plan decides


class NoLayoutError(LayoutError):
    """No layout that the job allows divides ranks and batch."""


def screen_layouts(task: SearchTask) -> ScreenedLayouts:
    """Every layout that the job leaves open, screened by memory and ordered by time."""
    job, shape, cluster = task.job, task.shape, task.cluster
    keys = task.open_keys
    rows = enumerate_layouts_in_least_mode(job, shape, cluster, task.num_ranks, keys)
    if not len(rows):
        raise NoLayoutError(
            f"no layout of {plural(task.num_ranks, 'rank')} divides"
            f" train.global_batch_size {job.train.global_batch_size}"
        )
    counts = _build_counts(task, keys)
    memory_bytes = rank_memory_bytes(job, cluster, task.num_ranks)
    headroom = choose_headroom(cluster.device)
    capacity = headroom.compute_capacity_bytes(memory_bytes, 1)
    groups = count_communicators_by_row(rows)
    limits = np.asarray(capacity - headroom.communicator_bytes * (groups - 1), dtype=np.float64)
    rows_that_fit, bytes_of_rows = MemoryScreen(counts, rows).find_least_recompute(
        SCREEN_SLACK * limits, keys.recompute
    )
    predict = partial(_predict_row_seconds, task, sequence_parallel=counts.work.cuts_sequence)
    seconds = predict(rows_that_fit)
    if np.isnan(seconds).any():
        # The simplest are first, and of these the ones that take least memory.
        order = np.lexsort((bytes_of_rows, count_mechanisms_by_row(rows_that_fit)))
    else:
        order = np.argsort(seconds, kind="stable")
    return ScreenedLayouts(
        rows_that_fit.take(order),
        seconds[order],
        len(rows) * len(keys.recompute),
        partial(_find_smallest_rows, counts, rows, keys.recompute),
        keys.recompute,
        predict,
    )


def _find_smallest_rows(
    counts: CountsByDegree, rows: LayoutRows, modes: tuple[int, ...]
) -> LayoutRows:
    rows = rows.repeat_in_modes(modes)
    return choose_smallest_rows(rows, MemoryScreen(counts, rows).total_bytes())


def estimate_row_bytes(task: SearchTask, rows: LayoutRows) -> npt.NDArray[np.float64]:
    """The bytes of a rank by which the search of `task` screens `rows`."""
    return MemoryScreen(_build_counts(task, task.open_keys), rows).total_bytes()


def _build_counts(task: SearchTask, keys: OpenKeys) -> CountsByDegree:
    # The work of any rank: what is the same in every layout is read of it.
    work = build_workload(
        task.job, task.shape, micro_batch_size=1, num_microbatches=1, tp=keys.tp[-1]
    )
    return CountsByDegree(task.shape, work, gathers_ahead=task.cluster.device != "cpu")


def _predict_row_seconds(
    task: SearchTask, rows: LayoutRows, *, sequence_parallel: bool
) -> npt.NDArray[np.float64]:
    machine, work = build_machine_rates(task.cluster), get_sample_work(task.job, task.shape)
    if machine is None or work is None or not len(rows):
        return np.full(len(rows), np.nan)
    times = predict_row_times(task.job, work, machine, rows, sequence_parallel=sequence_parallel)
    return np.asarray(times.total_s, dtype=np.float64)


def count_communicators_by_row(rows: LayoutRows) -> npt.NDArray[np.int64]:
    """`plan.cluster.count_communicators` of each of `rows`."""
    copies = rows.dp_replicate * rows.num_zero_shards
    num_ranks = copies * rows.pp * rows.tp
    is_hybrid = (rows.dp_replicate > 1) & (rows.num_zero_shards > 1)
    # Where ep spreads whole copies, a job names neither degree.
    is_hybrid &= (rows.zero_stage > 0) | (rows.ep == 1)
    is_one_axis = (num_ranks == rows.tp) | (num_ranks == rows.cp)
    is_one_axis |= num_ranks == rows.dp_replicate * rows.dp_shard
    number = np.ones(len(rows), dtype=np.int64)
    for axis in (rows.tp > 1, rows.cp > 1, copies > 1, is_hybrid):
        number += axis
    number += np.where(rows.ep > 1, 2, 0)
    # In the middle of a pipeline a rank has two neighbours, and each direction to each.
    number += np.where(rows.pp > 2, 4, np.where(rows.pp > 1, 2, 0))
    number = np.where(is_one_axis & (rows.ep == 1) & ~is_hybrid, 1, number)
    return np.where(num_ranks == 1, 0, number)
