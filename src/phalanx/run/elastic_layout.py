"""The layout of a run on the ranks that are left, and on all of them again.

Data parallelism shrinks and accumulation grows: the global batch and the order of samples stay what
they were. The other axes stay, too: what they cut, no rank has room for. And so does what the plan
had chosen where the job left it open, for ranks that go on hold the state as it says. Torch-free.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from phalanx.core.errors import LayoutError
from phalanx.core.units import format_bytes, plural
from phalanx.job.copies import apply_job_keys
from phalanx.job.nearest import list_divisors
from phalanx.job.schema import Job
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.run.prepare import PreparedRun

_STAGE, _SIZE = "parallel.zero_stage", "train.micro_batch_size"
_RECOMPUTE_KEYS: dict[str, Any] = {
    "train.recompute": "full",
    # Of other ways to recompute.
    "train.recompute_every": None,
    "train.recompute_budget_gib": None,
}


class ElasticLayout:
    """The job and the plan that ranks are started with, as long as not all ranks can be had.

    All ranks are tried again at the next checkpoint, and where they fail to start at the second
    one after that, at the fourth, and so on.
    """

    def __init__(self, run: PreparedRun) -> None:
        self.job, self.plan = run.job, run.plan
        self._run = run
        # On all ranks: what shrinking begins from and growing returns to.
        self._whole_job, self._whole_plan = run.job, run.plan
        # What layouts are made of, by keys of their own.
        self._open_job = apply_job_keys(run.job, run.chosen_keys)
        self._before = run.plan
        self._num_saves, self._saves_until_growth = 0, 1
        self._has_grown = False
        self._refusal = ""

    def shrink(self) -> int | None:
        """Lay the run out on fewer ranks; the number of them, None where no layout on at least
        `resilience.min_ranks` fits."""
        min_ranks = self._run.job.resilience.min_ranks
        if min_ranks is None:
            return None
        self._refusal = ""
        for layout in list_smaller_layouts(self.plan.layout):
            if layout.world_size < min_ranks:
                return None
            laid_out = self._lay_out_on_fewer_ranks(layout)
            if laid_out is None:
                continue
            if self._has_grown:
                self._saves_until_growth *= 2
            self._before = self.plan
            (self.job, self.plan), self._num_saves = laid_out, 0
            return layout.world_size
        return None

    def _lay_out_on_fewer_ranks(self, layout: Layout) -> tuple[Job, Plan] | None:
        """The job in `layout`, and its plan; None where none fits, of which `_refusal` keeps the
        first."""
        for keys in self._list_ways_to_lay_out(layout):
            job = apply_job_keys(self._open_job, keys)
            try:
                return job, self._run.replan(job)
            except LayoutError as error:
                self._refusal = self._refusal or str(error)
        return None

    def _list_ways_to_lay_out(self, layout: Layout) -> list[dict[str, Any]]:
        """Keys that give the job `layout`, which is smaller: first with the stage of ZeRO that it
        has, then with less to a rank, as far as the user leaves that open."""
        pinned = list_pinned_layout_keys(self.plan, layout)
        stages, sizes = [pinned.get(_STAGE)], [self._run.job.train.micro_batch_size]
        if pinned.get(_STAGE) in (1, 2) and self._run.job.parallel.zero_stage is None:
            stages.append(3)
        if sizes == [None]:
            share = self.plan.global_batch_size // layout.data_parallel_size
            divisors = list_divisors(share)
            smaller = max(size for size in divisors if size <= self.plan.micro_batch_size)
            # Left open, a rank's whole share is one microbatch; a search had chosen the size.
            whole_share = [] if _SIZE in self._run.chosen_keys else [None]
            sizes = [*whole_share, smaller, *([1] if smaller > 1 else [])]
        return [pinned | {_STAGE: stage, _SIZE: size} for stage in stages for size in sizes]

    def choose_survivors(self, ranks: Sequence[int]) -> list[int]:
        """Those of `ranks`, of the layout before the last change, that go on in the layout now, in
        their order: one that holds what no chosen one holds comes before another replica of it."""
        num_ranks = self.plan.layout.world_size
        by_content: dict[tuple[int, ...], list[int]] = {}
        for rank in ranks:
            coordinates = self._before.layout.coordinates(rank)
            content = tuple(n for axis, n in coordinates.items() if axis != "dp_replicate")
            by_content.setdefault(content, []).append(rank)
        # The first replica of everything, then the second one.
        replicas = itertools.zip_longest(*by_content.values())
        in_turn = [rank for replica in replicas for rank in replica if rank is not None]
        return sorted(in_turn[:num_ranks])

    def explain_no_shrink(self) -> str:
        """Why `shrink` found no layout; empty without `resilience.min_ranks`."""
        min_ranks = self._run.job.resilience.min_ranks
        if min_ranks is None:
            return ""
        why = explain_no_smaller_layout(self.plan.layout, min_ranks)
        return why or f"the next smaller layout is refused: {self._refusal}"

    def describe_last_change(self) -> str:
        """Both layouts of the last change, for a person."""
        return describe_layout_change(self._before, self.plan)

    def note_checkpoint(self) -> None:
        """A checkpoint is there from which any layout can go on."""
        self._num_saves += 1

    def should_grow(self) -> bool:
        """True if it is time to try all ranks again."""
        is_small = self.plan.layout.world_size < self._whole_plan.layout.world_size
        return is_small and self._num_saves >= self._saves_until_growth

    def grow(self) -> int:
        """Lay the run out on all ranks again; the number of them."""
        self._before = self.plan
        self.job, self.plan, self._has_grown = self._whole_job, self._whole_plan, True
        return self.plan.layout.world_size

    def lessen_memory(self) -> str:
        """Have the next attempt recompute activations, if the job allows that and they are not
        recomputed yet; how, in words, else empty."""
        if self._run.job.resilience.on_oom != "recompute":
            return ""
        if self.plan.activations.recompute == "full":
            return ""
        before = self.plan
        open_job = apply_job_keys(self._open_job, _RECOMPUTE_KEYS)
        job, whole_job = (_pin_plan(open_job, plan) for plan in (before, self._whole_plan))
        try:
            plan, whole_plan = self._run.replan(job), self._run.replan(whole_job)
        except LayoutError:
            return ""
        self._open_job, self.job, self.plan = open_job, job, plan
        self._whole_job, self._whole_plan = whole_job, whole_plan
        return f"train.recompute=full from here on ({_compare_planned_bytes(before, plan)})"

    def list_memory_advice(self) -> list[str]:
        """Lines on changes of the job that the plan says need less memory; the smallest first."""
        batch = self.plan.micro_batch_size
        laid_out = _pin_plan(self._open_job, self.plan)
        changes: list[dict[str, Any]] = [{"train.recompute": "full"}]
        if batch > 1:
            changes.append({"train.micro_batch_size": batch // 2})
        if self.plan.layout.dp_replicate > 1:
            size = self.plan.layout.data_parallel_size
            changes.append({"parallel.dp_replicate": 1, "parallel.dp_shard": size})
        lines: list[tuple[int, str]] = []
        for keys in changes:
            with contextlib.suppress(LayoutError):
                plan = self._run.replan(apply_job_keys(laid_out, keys))
                if plan.chosen.total_bytes < self.plan.chosen.total_bytes:
                    text = " ".join(f"{key}={value}" for key, value in keys.items())
                    words = _compare_planned_bytes(self.plan, plan)
                    lines.append((plan.chosen.total_bytes, f"less     {text} ({words})"))
        return [line for _, line in sorted(lines)]


def _compare_planned_bytes(before: Plan, after: Plan) -> str:
    return (
        f"{format_bytes(after.chosen.total_bytes)} a rank planned instead of"
        f" {format_bytes(before.chosen.total_bytes)}"
    )


def list_smaller_layouts(layout: Layout) -> Iterator[Layout]:
    """Layouts with fewer ranks that differ in data parallelism alone, the largest first; of equal
    ones that which shards over as many ranks as before comes first."""
    candidates: list[tuple[int, bool, int, Layout]] = []
    degrees = layout.to_json()
    for replicate in range(1, layout.dp_replicate + 1):
        for shard in range(1, layout.dp_shard + 1):
            if (shard * layout.cp) % layout.ep or shard * replicate == layout.data_parallel_size:
                continue
            smaller = Layout.from_json({**degrees, "dp_replicate": replicate, "dp_shard": shard})
            same_shards = shard == layout.dp_shard
            candidates.append((smaller.world_size, same_shards, shard, smaller))
    for *_, smaller in sorted(candidates, key=lambda row: row[:3], reverse=True):
        yield smaller


def explain_no_smaller_layout(layout: Layout, min_ranks: int) -> str:
    """Why ranks that are laid out so cannot become fewer, but at least `min_ranks`; empty where
    there is a smaller layout."""
    smaller = next(list_smaller_layouts(layout), None)
    if smaller is None:
        return f"{_describe_axes(layout)} has no smaller layout, for only data parallelism shrinks"
    if smaller.world_size < min_ranks:
        num_ranks = plural(smaller.world_size, "rank")
        return f"the next smaller layout has {num_ranks}, and resilience.min_ranks is {min_ranks}"
    return ""


def _pin_plan(job: Job, plan: Plan) -> Job:
    """`job` with the layout and the microbatches of `plan`, whatever else is changed in it."""
    keys = list_pinned_layout_keys(plan, plan.layout)
    return apply_job_keys(job, keys | {_SIZE: plan.micro_batch_size})


def list_pinned_layout_keys(plan: Plan, layout: Layout) -> dict[str, Any]:
    """The keys of [parallel] that give the run of `plan` another data parallelism, that of
    `layout`, and nothing else that is another."""
    keys: dict[str, Any] = {"parallel.ranks": layout.world_size}
    stage = plan.parallel.zero_stage
    degrees = {f"parallel.{axis}": getattr(layout, axis) for axis in ("dp_replicate", "dp_shard")}
    if layout.dp_shard > 1 and not stage:
        # Whole copies, of which ep spreads the experts alone: a job names these by ep.
        degrees = dict.fromkeys(degrees)
    elif layout.dp_shard * layout.cp > 1 and stage:
        keys[_STAGE] = stage
    if layout.pp > 1:
        # Where the cut is follows from costs, which recomputation changes.
        keys["parallel.stage_blocks"] = plan.parallel.stage_blocks
    return keys | degrees


def describe_layout_change(before: Plan, after: Plan) -> str:
    """ "4 ranks (dp_replicate=4, 1 microbatches) -> 3 ranks (dp_replicate=3, 1 microbatches)", with
    the stages of ZeRO where they differ."""
    sides = []
    for plan in (before, after):
        num_ranks = plural(plan.layout.world_size, "rank")
        words, stage = _describe_axes(plan.layout), plan.parallel.zero_stage
        if before.parallel.zero_stage != after.parallel.zero_stage:
            words += f", ZeRO-{stage}" if stage else ", no ZeRO"
        sides.append(f"{num_ranks} ({words}, {plan.num_microbatches} microbatches)")
    return " -> ".join(sides)


def _describe_axes(layout: Layout) -> str:
    wide = [f"{axis}={n}" for axis, n in layout.to_json().items() if n > 1]
    return " x ".join(wide) or "one alone"
