"""The layouts that a job leaves open on a cluster, as columns of numbers, one row a layout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from phalanx.core.errors import LayoutError
from phalanx.job.checks.experts import check_experts_have_no_conflicts
from phalanx.job.checks.pipeline import check_pipeline_has_no_conflicts
from phalanx.job.costs import ModelCosts
from phalanx.job.nearest import list_divisors
from phalanx.job.schema import Job
from phalanx.plan.cluster import Cluster
from phalanx.plan.degree_checks import check_context_parallel
from phalanx.plan.pipeline.generate import can_run_microbatches
from phalanx.plan.pipeline.requested_schedule import find_requested_schedule
from phalanx.plan.pipeline.schedule import Schedule
from phalanx.plan.rule_checks import can_be_cut_by
from phalanx.plan.rules import list_legal_tp_degrees

Integers = npt.NDArray[np.int64]

# (mode, recompute_every), from little recomputation to much.
RECOMPUTE_CHOICES = (("none", 1), ("selective", 1), ("mixed", 4), ("mixed", 2), ("full", 1))
SEARCHED_SCHEDULES = (
    "1f1b",
    "interleaved",
    "zb-v",
    "gpipe",
    "interleaved-zero-bubble",
    "dualpipe-v",
)
OFFLOAD_CHOICES = ("none", "optimizer", "parameters")
# Beyond these a search takes longer and proposes nothing that is faster.
MAX_MICRO_BATCH_SIZE = 16
# Of short samples (images, sentences) more go at once: as many as have so many tokens.
MAX_MICRO_BATCH_TOKENS = 2**15
MAX_SHORT_SAMPLES = 1024
MAX_PP_DEGREE = 64
MIN_TOKENS_OF_CP_RANK = 2048  # fewer keep no GPU busy while keys and values travel


@dataclass(frozen=True)
class OpenKeys:
    """The values that a search may choose for each key of a job: one where the job says it."""

    tp: tuple[int, ...]
    pp: tuple[int, ...]
    cp: tuple[int, ...]
    ep: tuple[int, ...]
    dp_shard: tuple[int, ...]
    """Empty: any that divides what the other axes leave."""
    dp_replicate: tuple[int, ...]
    zero_stage: tuple[int, ...]
    micro_batch_size: tuple[int, ...]
    """Empty: any up to MAX_MICRO_BATCH_SIZE, or more of short samples."""
    recompute: tuple[int, ...]
    """Indices into RECOMPUTE_CHOICES."""
    schedules: tuple[tuple[str, int], ...]
    """(name, stages per rank)"""
    accumulate: tuple[str, ...]
    offload: tuple[str, ...]
    written: Schedule | None = None
    """That of the job's file, which `schedules` has by the name of one that is like it."""

    @property
    def is_pipeline_given(self) -> bool:
        """True if the job says that there is a pipeline, and of how many ranks."""
        return len(self.pp) == 1 and self.pp[0] > 1

    def can_run(self, schedule: str, pp: int, num_microbatches: int) -> bool:
        """True if a pipeline of `pp` ranks can run so many microbatches."""
        if self.written is not None:
            return num_microbatches == self.written.num_microbatches
        return can_run_microbatches(schedule, pp, num_microbatches)


@dataclass(frozen=True)
class LayoutRows:
    """Layouts as columns of equal length. `schedule`, `recompute` and `offload` are indices into
    SEARCHED_SCHEDULES, RECOMPUTE_CHOICES and OFFLOAD_CHOICES."""

    pp: Integers
    dp_replicate: Integers
    dp_shard: Integers
    cp: Integers
    tp: Integers
    ep: Integers
    zero_stage: Integers
    micro_batch_size: Integers
    num_microbatches: Integers
    schedule: Integers
    stages_per_rank: Integers
    recompute: Integers
    accumulates_sharded: Integers
    offload: Integers

    def __len__(self) -> int:
        return len(self.pp)

    def take(self, rows: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> LayoutRows:
        """The layouts at `rows`: their numbers, or a mask."""
        return LayoutRows(**{key.name: getattr(self, key.name)[rows] for key in fields(self)})

    def repeat_in_modes(self, modes: Sequence[int]) -> LayoutRows:
        """Each layout in each of `modes` of recomputation, one after the other."""
        repeated = self.take(np.repeat(np.arange(len(self)), len(modes)))
        return replace(repeated, recompute=np.tile(np.array(modes, dtype=np.int64), len(self)))

    @property
    def num_zero_shards(self) -> Integers:
        """Ranks that ZeRO splits over: those of cp count."""
        return self.dp_shard * self.cp


def list_open_keys(
    job: Job, shape: ModelCosts, cluster: Cluster, num_ranks: int, *, offloads: bool = False
) -> OpenKeys:
    """The values that a search may choose for `job` on `num_ranks`. `offloads`: host memory may be
    used, too, and tp may leave the innermost links."""
    parallel, train = job.parallel, job.train
    choices = enumerate(RECOMPUTE_CHOICES)
    num_layers = max(1, shape.num_layers)
    recompute = tuple(index for index, (_, interval) in choices if interval <= num_layers)
    if "recompute" in train.model_fields_set or shape.activations is None:
        # Modes between these count as full in the screen; the exact plan has the job's own.
        choice = (train.recompute, train.recompute_every or 1)
        if choice not in RECOMPUTE_CHOICES:
            choice = ("full", 1)
        recompute = (RECOMPUTE_CHOICES.index(choice),)
    offload: tuple[str, ...] = ("none",)
    if "offload" in parallel.model_fields_set:
        offload = (parallel.offload,)
    elif offloads:
        offload = OFFLOAD_CHOICES
    accumulate: tuple[str, ...] = ("unsharded", "sharded")
    if "accumulate" in parallel.model_fields_set:
        accumulate = (parallel.accumulate,)
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    if parallel.zero_stage is not None:
        zero_stages = (parallel.zero_stage,)
    elif parallel.compress != "none":
        zero_stages = (0,)
    requested = find_requested_schedule(job) if parallel.schedule_file is not None else None
    written = requested.written if requested is not None else None
    return OpenKeys(
        tp=_restrict_to_job_value(
            parallel.tp, _list_tp_degrees(job, shape, cluster, num_ranks, any_link=offloads)
        ),
        pp=_restrict_to_job_value(parallel.pp, _list_pp_degrees(job, shape, num_ranks)),
        cp=_restrict_to_job_value(parallel.cp, _list_cp_degrees(job, shape, num_ranks)),
        ep=_restrict_to_job_value(parallel.ep, _list_ep_degrees(job, shape)),
        dp_shard=_restrict_to_job_value(parallel.dp_shard, ()),
        dp_replicate=_restrict_to_job_value(parallel.dp_replicate, ()),
        zero_stage=zero_stages,
        micro_batch_size=_restrict_to_job_value(train.micro_batch_size, ()),
        recompute=recompute,
        schedules=_list_schedule_choices(job) if written is None else (_describe_written(written),),
        accumulate=accumulate,
        offload=offload,
        written=written,
    )


def _restrict_to_job_value(value: int | None, choices: tuple[int, ...]) -> tuple[int, ...]:
    if value is not None:
        return (value,)
    return choices


def _list_tp_degrees(
    job: Job, shape: ModelCosts, cluster: Cluster, num_ranks: int, *, any_link: bool
) -> tuple[int, ...]:
    if shape.heads is None:
        return (1,)  # only sharding rules say, which a job names
    limit = min(cluster.link_domain, num_ranks)
    if any_link:
        limit = min(16, num_ranks)
    degrees = list_legal_tp_degrees(shape.heads.queries, shape.heads.keys)
    degrees = [degree for degree in degrees if degree <= limit and num_ranks % degree == 0]
    # Heads of a module are as its kernel sees them; what cuts its layers are its rules.
    rules = job.parallel.rules
    return (1, *(d for d in degrees if d > 1 and can_be_cut_by(rules, shape, d)))


def _list_pp_degrees(job: Job, shape: ModelCosts, num_ranks: int) -> tuple[int, ...]:
    if check_pipeline_has_no_conflicts.run(_replace_degree(job, pp=2)):
        return (1,)  # what is in the way of a pipeline is in the way of any
    limit = min(MAX_PP_DEGREE, shape.num_layers, num_ranks)
    return (1, *(d for d in list_divisors(num_ranks) if 1 < d <= limit))


def _list_cp_degrees(job: Job, shape: ModelCosts, num_ranks: int) -> tuple[int, ...]:
    if shape.heads is None or job.data.document_masks:
        return (1,)
    try:
        check_context_parallel(_replace_degree(job, cp=2), shape)
    except LayoutError:
        return (1,)
    longest = job.data.seq_len // MIN_TOKENS_OF_CP_RANK
    degrees = [1]
    # Zigzag gives each rank two parts of a sequence.
    while 2 * degrees[-1] <= longest and job.data.seq_len % (4 * degrees[-1]) == 0:
        degrees.append(2 * degrees[-1])
    return tuple(degree for degree in degrees if num_ranks % degree == 0)


def _replace_degree(job: Job, **degree: int) -> Job:
    return job.model_copy(update={"parallel": job.parallel.model_copy(update=degree)})


def _list_ep_degrees(job: Job, shape: ModelCosts) -> tuple[int, ...]:
    # What is in the way of ep is in the way of any degree above 1.
    if shape.experts is None or check_experts_have_no_conflicts.run(_replace_degree(job, ep=2)):
        return (1,)
    return tuple(list_divisors(shape.experts.count))


def _list_schedule_choices(job: Job) -> tuple[tuple[str, int], ...]:
    parallel = job.parallel
    choices: list[tuple[str, int]] = [("1f1b", 1), ("interleaved", 2), ("interleaved", 4)]
    if not job.train.compile:
        choices.append(("zb-v", 2))  # compiled blocks do both halves of a backward at once
    if parallel.schedule is not None:
        counts = _STAGES_PER_RANK_OF_SCHEDULE.get(parallel.schedule, (2, 4))
        choices = [(parallel.schedule, count) for count in counts]
    number = parallel.stages_per_rank
    if number is not None:
        names = dict.fromkeys(name for name, _ in choices)
        if parallel.schedule is None:
            names = dict.fromkeys(name for name in names if _has_schedule_stages(name, number))
        choices = [(name, number) for name in names]
    return tuple(choices)


def _describe_written(written: Schedule) -> tuple[str, int]:
    """(name, stages per rank) of the searched schedule whose stages lie as those of a file."""
    per_rank = max(1, written.num_stages // written.num_ranks)
    if per_rank == 1:
        return "1f1b", 1
    if written.rank_of_stage[0] == written.rank_of_stage[-1]:
        return "zb-v", per_rank
    return "interleaved", per_rank


# Interleaved schedules have any number above 1.
_STAGES_PER_RANK_OF_SCHEDULE = {"gpipe": (1,), "1f1b": (1,), "zb-v": (2,), "dualpipe-v": (2,)}


def _has_schedule_stages(name: str, stages_per_rank: int) -> bool:
    allowed = _STAGES_PER_RANK_OF_SCHEDULE.get(name)
    if allowed is None:
        return stages_per_rank > 1
    return stages_per_rank in allowed


@dataclass(frozen=True)
class ModelParallelBase:
    """Degrees, microbatch and schedule: what the rest of a row is chosen for."""

    tp: int
    pp: int
    cp: int
    data_parallel: int
    micro_batch_size: int
    num_microbatches: int
    schedule: int
    stages_per_rank: int


def enumerate_layouts(
    job: Job, shape: ModelCosts, cluster: Cluster, num_ranks: int, keys: OpenKeys
) -> LayoutRows:
    """Every layout of `num_ranks` that `keys` allow and that divides ranks, batch and blocks, in
    each mode of recomputation; other rules of legality are the planner's."""
    rows = enumerate_layouts_in_least_mode(job, shape, cluster, num_ranks, keys)
    return rows.repeat_in_modes(keys.recompute)


def enumerate_layouts_in_least_mode(
    job: Job, shape: ModelCosts, cluster: Cluster, num_ranks: int, keys: OpenKeys
) -> LayoutRows:
    """The layouts of `enumerate_layouts` in the mode that recomputes least of those that `keys`
    allow."""
    rows = _combine_with_shardings(list(_list_bases(job, shape, num_ranks, keys)), cluster, keys)
    if not len(rows) and keys.is_pipeline_given:
        # What a job asks for is planned, though its ranks wait for most of a step.
        bases = _list_bases(job, shape, num_ranks, keys, with_bubbles=True)
        rows = _combine_with_shardings(list(bases), cluster, keys)
    return rows


def _combine_with_shardings(
    bases: Sequence[ModelParallelBase], cluster: Cluster, keys: OpenKeys
) -> LayoutRows:
    """Each base with each of its shardings, in the mode that recomputes least."""
    # Many bases differ in batch and schedule alone, and have the same shardings.
    listed: dict[tuple[int, int, int, bool, bool], Integers] = {}
    shardings: list[Integers] = []
    for base in bases:
        accumulates = base.num_microbatches > 1 and base.pp == 1
        key = (base.data_parallel, base.cp, base.tp, accumulates, base.pp > 1)
        if key not in listed:
            choices = list(_list_sharding_choices(base, cluster, keys, accumulates=accumulates))
            listed[key] = np.array(choices, dtype=np.int64).reshape(-1, 6)
        shardings.append(listed[key])
    if not bases:
        return LayoutRows(*np.zeros((len(fields(LayoutRows)), 0), dtype=np.int64))
    sharding = np.concatenate(shardings)
    base_of_row = np.repeat(np.arange(len(bases)), [len(choices) for choices in shardings])
    columns = {
        name: np.array([getattr(base, name) for base in bases], dtype=np.int64)[base_of_row]
        for name in _COLUMNS_OF_BASE
    }
    columns |= dict(zip(_COLUMNS_OF_SHARDING, sharding.T, strict=True))
    return LayoutRows(**columns, recompute=np.full(len(sharding), keys.recompute[0]))


_COLUMNS_OF_BASE = (
    *("pp", "cp", "tp", "micro_batch_size", "num_microbatches", "schedule", "stages_per_rank"),
)
_COLUMNS_OF_SHARDING = (
    *("ep", "dp_replicate", "dp_shard", "zero_stage", "accumulates_sharded", "offload"),
)


def _list_sharding_choices(
    base: ModelParallelBase, cluster: Cluster, keys: OpenKeys, *, accumulates: bool
) -> Iterator[tuple[int, ...]]:
    """The values of `_COLUMNS_OF_SHARDING` that go with a base; `accumulates`: gradients of its
    microbatches may add up sharded."""
    offloads = [OFFLOAD_CHOICES.index(name) for name in keys.offload]
    for ep, replicate, shard, stage in list_shardings(base, cluster, keys):
        choices = [0]
        if stage >= 2 and accumulates:
            choices = [int(name == "sharded") for name in keys.accumulate]
        for sharded in choices:
            for offload in offloads:
                if OFFLOAD_CHOICES[offload] == "parameters" and (stage < 2 or base.pp > 1):
                    continue
                yield ep, replicate, shard, stage, sharded, offload


def _list_bases(
    job: Job,
    shape: ModelCosts,
    num_ranks: int,
    keys: OpenKeys,
    *,
    with_bubbles: bool = False,
) -> Iterator[ModelParallelBase]:
    """What the ranks and the batch divide into; `with_bubbles`: with pipelines of few microbatches,
    too."""
    batch = job.train.global_batch_size
    largest = _find_largest_micro_batch_size(shape.count_sample_tokens(job.data.seq_len))
    for tp in keys.tp:
        for cp in keys.cp:
            for pp in keys.pp:
                if num_ranks % (tp * cp * pp) or batch % (num_ranks // (tp * cp * pp)):
                    continue
                share = batch // (num_ranks // (tp * cp * pp))
                copies = num_ranks // (tp * cp * pp)
                sizes = _list_micro_batch_sizes(keys, share, largest, any_divisor=with_bubbles)
                for micro in sizes:
                    base = ModelParallelBase(tp, pp, cp, copies, micro, share // micro, 0, 1)
                    yield from _iterate_schedules_of_base(
                        base, shape, keys, with_bubbles=with_bubbles
                    )


def _find_largest_micro_batch_size(sample_tokens: int) -> int:
    short = MAX_MICRO_BATCH_TOKENS // max(1, sample_tokens)
    return max(MAX_MICRO_BATCH_SIZE, min(MAX_SHORT_SAMPLES, short))


def _list_micro_batch_sizes(
    keys: OpenKeys, share: int, largest: int, *, any_divisor: bool
) -> Iterable[int]:
    """Sizes up to `largest` that divide a rank's `share` of the batch: powers of two, and all of
    it, or any; or what the job says, or its schedule."""
    if keys.micro_batch_size:
        return [size for size in keys.micro_batch_size if share % size == 0]
    if keys.written is not None:
        size, rest = divmod(share, keys.written.num_microbatches)
        return [size] if size and not rest else []
    sizes = [size for size in list_divisors(share) if size <= largest]
    if any_divisor:
        return sizes
    return [size for size in sizes if size & (size - 1) == 0 or size == share]


def _iterate_schedules_of_base(
    base: ModelParallelBase, shape: ModelCosts, keys: OpenKeys, *, with_bubbles: bool
) -> Iterator[ModelParallelBase]:
    if base.pp == 1:
        yield base
        return
    for name, stages in keys.schedules:
        if base.pp * stages > shape.num_layers:
            continue
        if not keys.can_run(name, base.pp, base.num_microbatches):
            continue
        if not with_bubbles and keys.written is None and _is_mostly_bubble(name, base):
            continue
        schedule = SEARCHED_SCHEDULES.index(name)
        # Not `replace`, which takes as long as all of the rest.
        yield ModelParallelBase(
            base.tp,
            base.pp,
            base.cp,
            base.data_parallel,
            base.micro_batch_size,
            base.num_microbatches,
            schedule,
            stages,
        )


def _is_mostly_bubble(schedule: str, base: ModelParallelBase) -> bool:
    """True if ranks would wait for a large part of a step, or for a round that is not full."""
    if schedule.startswith("interleaved") and base.num_microbatches % base.pp:
        return True
    return base.num_microbatches < base.pp


def list_shardings(
    base: ModelParallelBase, cluster: Cluster, keys: OpenKeys
) -> Iterator[tuple[int, int, int, int]]:
    """(ep, dp_replicate, dp_shard, ZeRO stage) of a base."""
    shares = base.data_parallel
    degrees = {
        stage: _list_dp_shard_degrees(base, cluster, keys, stage)
        for stage in keys.zero_stage
        if stage > 0
    }
    for ep in keys.ep:
        least = ep // math.gcd(ep, base.cp)  # the dp_shard that lets ep fold over dp_shard x cp
        if shares % least:
            continue
        for stage in keys.zero_stage:
            if stage == 1 and ep > 1:
                continue  # experts are reduced over other ranks than the rest
            if stage > 0 and shares * base.cp == 1:
                continue
            if stage > 0:
                shards = [degree for degree in degrees[stage] if degree % least == 0]
            elif keys.dp_shard and keys.dp_shard[0] not in (1, least):
                continue  # the job says that something is sharded
            else:
                shards = [least]
            for shard in shards:
                replicate = shares // shard
                if keys.dp_replicate and replicate not in keys.dp_replicate:
                    continue
                yield ep, replicate, shard, stage


def _list_dp_shard_degrees(
    base: ModelParallelBase, cluster: Cluster, keys: OpenKeys, stage: int
) -> list[int]:
    """The degrees of dp_shard to try with a ZeRO stage: all ranks, and for 2 and 3 a node's and a
    few nodes'."""
    shares = base.data_parallel
    if keys.dp_shard:
        degrees = list(keys.dp_shard)
    elif keys.dp_replicate:
        degrees = [shares // copies for copies in keys.dp_replicate if shares % copies == 0]
    else:
        degrees = [shares]
        inside = max(1, cluster.link_domain // (base.tp * base.cp))
        size = inside
        while stage >= 2 and size < shares:
            degrees.append(size)
            size *= 2
    return [degree for degree in dict.fromkeys(degrees) if shares % degree == 0]
