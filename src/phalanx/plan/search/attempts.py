"""Exact plans of screened layouts, in the order in which they are worth it: families by their best,
the fastest first, more recomputation where less does not fit after all."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from phalanx.plan.search.finalists import FinalistPlanner, list_job_keys_of_row
from phalanx.plan.search.result import RankedLayout
from phalanx.plan.search.space import SEARCHED_SCHEDULES, LayoutRows

# Of a step: within it the layout with the fewest mechanisms wins. The model of time is not exact
# enough to tell such layouts apart (docs/planner-validation.md).
TIE_SHARE_OF_STEP = 0.03
MAX_PLANS_PER_FAMILY = 8
MAX_OTHER_SCHEDULES = 3
# Where nothing else fits, so many of the layouts with the smallest estimates are planned: the
# screen errs by less than this share, so that those with larger estimates do not need less.
MAX_SMALLEST_PLANS = 24
SMALLEST_ESTIMATE_SHARE = 1.5


@dataclass(frozen=True)
class ScreenedLayouts:
    """Layouts that a screen let through, the fastest first. `seconds` are NaN where time is not
    predicted."""

    rows: LayoutRows
    seconds: npt.NDArray[np.float64]
    num_considered: int
    find_smallest: Callable[[], LayoutRows]
    """The layouts that need least by the screen's formulas, the best of each family first."""
    recompute_modes: tuple[int, ...]
    """Indices into RECOMPUTE_CHOICES that the job allows, from little recomputation to much."""
    predict_seconds: Callable[[LayoutRows], npt.NDArray[np.float64]]
    """Seconds of a step of other rows of the same search."""


def count_mechanisms_by_row(rows: LayoutRows) -> npt.NDArray[np.int64]:
    """`RankedLayout.num_mechanisms` of each of `rows`."""
    number = np.zeros(len(rows), dtype=np.int64)
    for degree in (rows.tp, rows.pp, rows.cp, rows.ep):
        number += degree > 1
    number += (rows.zero_stage > 0).astype(np.int64) + (rows.zero_stage == 3)
    return number + (rows.recompute > 0) + (rows.offload > 0)


def number_families(rows: LayoutRows) -> npt.NDArray[np.int64]:
    """A number for the mechanisms of each of `rows`: equal for layouts of one family."""
    hybrid = (rows.zero_stage >= 2) & (rows.dp_replicate > 1)
    flags = [rows.tp > 1, rows.pp > 1, rows.cp > 1, rows.ep > 1, hybrid, rows.offload > 0]
    family = rows.zero_stage.copy()
    for flag in flags:
        family = 2 * family + flag
    return family


def group_rows_by_family(screened: ScreenedLayouts) -> Iterator[npt.NDArray[np.intp]]:
    """The rows of each family, the best of each first, families by their best."""
    rows = screened.rows
    if not len(rows):
        return
    family = number_families(rows)
    mechanisms = count_mechanisms_by_row(rows)
    # Rows are ordered: a family's first row is its best, and families come in that order.
    _, first = np.unique(family, return_index=True)
    for start in np.sort(first):
        members = np.flatnonzero(family == family[start])
        seconds = screened.seconds[members]
        if not np.isnan(seconds).any():
            is_tied = seconds <= (1 + TIE_SHARE_OF_STEP) * seconds[0]
            # Of equally simple ones those whose shards stay closest together: slow links and
            # other nodes are what varies.
            spread = rows.num_zero_shards[members] * rows.tp[members]
            keys = (seconds, spread * is_tied, mechanisms[members] * is_tied, ~is_tied)
            members = members[np.lexsort(keys)]
        yield members


def choose_smallest_rows(rows: LayoutRows, estimates: npt.NDArray[np.float64]) -> LayoutRows:
    """The layouts to plan where nothing else fits: those with the smallest estimated bytes, first
    the best of each family, since the estimate errs alike within one."""
    order = np.argsort(estimates, kind="stable")
    order = order[estimates[order] <= SMALLEST_ESTIMATE_SHARE * estimates[order[0]]]
    families = number_families(rows.take(order))
    _, first = np.unique(families, return_index=True)
    first = np.sort(first)
    rest = np.delete(order, first)
    return rows.take(np.concatenate([order[first], rest])[:MAX_SMALLEST_PLANS])


def plan_best_of_families(
    screened: ScreenedLayouts, planner: FinalistPlanner, *, num_families: int
) -> list[RankedLayout]:
    """The best layout of each of the first `num_families` families that an exact plan takes.

    Where none is taken, the layouts that need least by the screen's formulas are planned, too: the
    screen is not exact, and a figure that is shown is a plan's.
    """
    best: list[RankedLayout] = []
    for family in group_rows_by_family(screened):
        ranked = next(plan_rows(screened, planner, family[:MAX_PLANS_PER_FAMILY]), None)
        if ranked is not None:
            best.append(_plan_faster_schedules(screened, planner, family, ranked))
        if len(best) >= num_families:
            break
    if not best:
        best += _plan_smallest(screened, planner)
    return best


def _plan_faster_schedules(
    screened: ScreenedLayouts,
    planner: FinalistPlanner,
    family: npt.NDArray[np.intp],
    ranked: RankedLayout,
) -> RankedLayout:
    """The fastest of `ranked` and of a few of its family in other schedules that the screen says to
    be faster than its plan: the closed form of a pipeline is wrong by some per cent."""
    if ranked.layout.pp == 1 or ranked.step_s is None:
        return ranked
    rows = screened.rows
    is_faster = (1 + TIE_SHARE_OF_STEP) * screened.seconds[family] < ranked.step_s
    kinds = {(ranked.layout.pp, ranked.schedule, ranked.stages_per_rank)}
    faster_rows: list[int] = []
    for row in map(int, family[is_faster]):
        schedule = SEARCHED_SCHEDULES[rows.schedule[row]]
        kind = (int(rows.pp[row]), schedule, int(rows.stages_per_rank[row]))
        if kind not in kinds and len(faster_rows) < MAX_OTHER_SCHEDULES:
            kinds.add(kind)
            faster_rows.append(row)
    plans = [ranked, *plan_rows(screened, planner, faster_rows)]
    return min(plans, key=lambda plan: plan.step_s or math.inf)


def plan_rows(
    screened: ScreenedLayouts, planner: FinalistPlanner, members: Iterable[int]
) -> Iterator[RankedLayout]:
    """The layouts of rows `members` that an exact plan takes, in this order; one that takes more
    memory than the screen said comes again with more recomputation, once it is its turn."""
    costs = _get_costs(screened, screened.rows, screened.seconds)
    pending: list[tuple[float, int, LayoutRows, int]] = []
    number = 0  # of equal costs the first comes first
    for member in map(int, members):
        while pending and pending[0][0] < costs[member]:
            yield from _plan_cheapest(planner, pending)
        ranked, lacks_memory = _plan_row_or_say_why(planner, screened.rows, member)
        if ranked is not None:
            yield ranked
        elif lacks_memory:
            stronger = _list_stronger_recompute(screened, member)
            stronger_costs = _get_costs(screened, stronger, screened.predict_seconds(stronger))
            for index in range(len(stronger)):
                number += 1
                heapq.heappush(pending, (float(stronger_costs[index]), number, stronger, index))
    while pending:
        yield from _plan_cheapest(planner, pending)


def _plan_cheapest(
    planner: FinalistPlanner, pending: list[tuple[float, int, LayoutRows, int]]
) -> Iterator[RankedLayout]:
    """Take the layout with the least cost from the heap; yields it if a plan takes it."""
    _, _, rows, row = heapq.heappop(pending)
    ranked = _plan_row(planner, rows, row)
    if ranked is not None:
        yield ranked


def _plan_row(planner: FinalistPlanner, rows: LayoutRows, row: int) -> RankedLayout | None:
    return planner.plan_layout(list_job_keys_of_row(planner.job, rows, row))


def _plan_row_or_say_why(
    planner: FinalistPlanner, rows: LayoutRows, row: int
) -> tuple[RankedLayout | None, bool]:
    """(the planned layout or None, True where it was refused for its memory)."""
    before = planner.num_shortages
    ranked = _plan_row(planner, rows, row)
    return ranked, planner.num_shortages > before


def _list_stronger_recompute(screened: ScreenedLayouts, row: int) -> LayoutRows:
    """The layout `row` with each mode that recomputes more than its own."""
    mode = int(screened.rows.recompute[row])
    modes = [other for other in screened.recompute_modes if other > mode]
    rows = screened.rows.take(np.full(len(modes), row, dtype=np.intp))
    return replace(rows, recompute=np.array(modes, dtype=np.int64))


def _get_costs(
    screened: ScreenedLayouts, rows: LayoutRows, seconds: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Costs that rows are ordered by: seconds of a step; mechanisms where time is not predicted."""
    if np.isnan(screened.seconds).any():
        return count_mechanisms_by_row(rows).astype(np.float64)
    return seconds


def _plan_smallest(screened: ScreenedLayouts, planner: FinalistPlanner) -> list[RankedLayout]:
    """The layouts with the smallest estimates that an exact plan takes, at most one a family."""
    fitting: dict[str, RankedLayout] = {}
    smallest = screened.find_smallest()
    for row in range(len(smallest)):
        ranked = _plan_row(planner, smallest, row)
        if ranked is not None:
            fitting.setdefault(ranked.family, ranked)
    return list(fitting.values())
