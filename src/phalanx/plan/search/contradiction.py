"""Why no layout of a job divides ranks and batch: the keys that contradict each other, and the
nearest values with which the search finds something, each searched before it is named."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.core.errors import JobError, LayoutError
from phalanx.core.units import plural
from phalanx.job.copies import apply_job_keys
from phalanx.job.nearest import list_divisors
from phalanx.plan.described_cluster import resize_cluster
from phalanx.plan.rules import TensorDegreeError, list_legal_tp_degrees
from phalanx.plan.search.attempts import plan_best_of_families
from phalanx.plan.search.finalists import FinalistPlanner
from phalanx.plan.search.overrides import (
    ABSENT,
    format_overrides,
    get_default_of_key,
    passes_job_checks,
)
from phalanx.plan.search.screening import NoLayoutError, screen_layouts
from phalanx.plan.search.space import ModelParallelBase, enumerate_layouts, list_shardings
from phalanx.plan.search.task import SearchTask, build_search_task, require_possible_degrees

RANK_AXES = ("tp", "cp", "pp", "dp_replicate", "dp_shard")
LAYOUT_KEYS = (*RANK_AXES, "ep", "zero_stage", "schedule", "schedule_file", "stages_per_rank")
MAX_VALUES_TRIED = 6  # of one key, on each side of what the job says
MAX_RANKS_TRIED = 512
MAX_KEYS_NAMED = 3
MAX_NUMBERS_NAMED = 4
_KEY_PATTERN = re.compile(r"(?:parallel|train)\.[a-z_]+")


@dataclass(frozen=True)
class Conflict:
    """Keys that cannot hold together, in words, and those of them that may be changed, the
    likeliest first."""

    problem: str
    keys: tuple[str, ...]
    why: str | None = None


@dataclass(frozen=True)
class Remedy:
    """Overrides with which a search finds a layout; `fits`: in memory, too."""

    overrides: str
    fits: bool


def explain_contradiction(task: SearchTask, error: LayoutError) -> LayoutError:
    """The error for a job of which no layout can be had: the constraint that has no solution, and
    changes that were searched and give one. `error`: the one that the search raised."""
    is_found_by_search = isinstance(error, NoLayoutError)
    if is_found_by_search:
        conflict = find_conflict(task)
    else:
        named = _KEY_PATTERN.findall(error.what)
        if isinstance(error, TensorDegreeError):
            named.append("parallel.tp")
        conflict = Conflict(error.what, tuple(dict.fromkeys(named)), error.why)
    remedies = list(_find_remedies(task, conflict)) or _find_joint_remedy(task)
    # "nearest: 32" is the value that was searched.
    is_searched = bool(remedies) and (error.fix or "").startswith("nearest:")
    own_fix = "" if is_found_by_search or is_searched else error.fix or ""
    fixes = [_format_remedies(remedies), own_fix]
    if own_fix and _find_keys(fixes[0]) <= _find_keys(own_fix):
        # The same keys, once.
        fixes = [own_fix]
    where = None if is_found_by_search else error.where
    fix = "; or ".join(filter(None, fixes)) or None
    return LayoutError(conflict.problem, where=where, why=conflict.why, fix=fix)


def _find_keys(text: str) -> set[str]:
    return set(_KEY_PATTERN.findall(text))


def _format_remedies(remedies: Sequence[Remedy]) -> str:
    fitting = [remedy.overrides for remedy in remedies if remedy.fits]
    if fitting:
        return f"set {', or '.join(fitting[:MAX_KEYS_NAMED])}"
    dividing = [remedy.overrides for remedy in remedies]
    if not dividing:
        return ""
    return f"with {', or '.join(dividing[:MAX_KEYS_NAMED])} there are layouts, of which none fits"


def find_conflict(task: SearchTask) -> Conflict:
    """The constraint that leaves a job without a layout: the product of its degrees, the blocks of
    its stages, what it shards over, its batch, or the microbatches of its pipeline."""
    bases = [base for base in _list_bases(task) if _can_be_shared(task, base)]
    return (
        _find_product_conflict(task)
        or _find_stage_conflict(task)
        or _find_sharding_conflict(task, bases)
        or _find_offload_conflict(task, bases)
        or _find_batch_conflict(task, bases)
        or _describe_pipeline_conflict(task)
    )


def _list_given_degrees(task: SearchTask) -> dict[str, int]:
    """The degrees above 1 that the job gives, by axis."""
    degrees = {axis: getattr(task.job.parallel, axis) or 1 for axis in RANK_AXES}
    return {axis: degree for axis, degree in degrees.items() if degree > 1}


def _find_product_conflict(task: SearchTask) -> Conflict | None:
    degrees = _list_given_degrees(task)
    product, ranks = math.prod(degrees.values()), plural(task.num_ranks, "rank")
    all_given = all(getattr(task.job.parallel, axis) is not None for axis in RANK_AXES)
    if task.num_ranks % product == 0 and not (all_given and product != task.num_ranks):
        return None
    text = " x ".join(f"parallel.{axis}={degree}" for axis, degree in degrees.items())
    if len(degrees) > 1:
        text += f" = {product}"
    verb = "is not" if task.num_ranks % product == 0 else "does not divide"
    keys = (*(f"parallel.{axis}" for axis in reversed(degrees)), "parallel.ranks")
    return Conflict(f"{text or 'the product of all degrees, 1,'} {verb} the {ranks}", keys)


def _find_stage_conflict(task: SearchTask) -> Conflict | None:
    parallel = task.job.parallel
    pp = parallel.pp or 1
    stages = min((count for _, count in task.open_keys.schedules), default=1)
    if pp * stages <= task.shape.num_layers or pp == 1:
        return None
    text = f"parallel.pp={pp}"
    if parallel.stages_per_rank is not None and stages > 1:
        text += f" x parallel.stages_per_rank={stages}"
    elif stages > 1:
        text += f" with {stages} stages a rank"
        if parallel.schedule is not None:
            text += f" of parallel.schedule={parallel.schedule}"
    keys = ["parallel.pp", "parallel.stages_per_rank"]
    if parallel.schedule is not None:
        keys.append("parallel.schedule")
    return Conflict(
        f"{text} needs a block for each stage, and the model has {task.shape.num_layers}",
        tuple(keys),
    )


def _find_sharding_conflict(
    task: SearchTask, bases: Sequence[ModelParallelBase]
) -> Conflict | None:
    """The conflict where no base has ranks for what is to be sharded, whatever the batch."""
    if bases:
        return None
    parallel = task.job.parallel
    degrees = _list_given_degrees(task)
    axes = " x ".join(f"parallel.{axis}={degree}" for axis, degree in degrees.items())
    model_axes = [axis for axis in degrees if axis in ("tp", "pp")]
    if parallel.zero_stage and math.prod(degrees[axis] for axis in model_axes) == task.num_ranks:
        reason = f"{axes} takes all {plural(task.num_ranks, 'rank')}" if axes else "there is one"
        keys = ("parallel.zero_stage", *(f"parallel.{axis}" for axis in model_axes))
        return Conflict(
            f"parallel.zero_stage={parallel.zero_stage} needs two data-parallel ranks or more to"
            f" shard over, and {reason}",
            keys,
        )
    names = ("zero_stage", "ep", "dp_shard", "dp_replicate", "tp", "cp", "pp")
    keys = tuple(f"parallel.{name}" for name in names if getattr(parallel, name) is not None)
    settings = " x ".join(f"{key}={getattr(parallel, key.partition('.')[2])}" for key in keys)
    return Conflict(f"{settings} cannot be had on {plural(task.num_ranks, 'rank')}", keys)


def _find_offload_conflict(task: SearchTask, bases: Sequence[ModelParallelBase]) -> Conflict | None:
    """The conflict where parameters are to be offloaded, and no layout has shards of them."""
    parallel, keys = task.job.parallel, task.open_keys
    if parallel.offload != "parameters":
        return None
    stages = {
        stage for base in bases for _, _, _, stage in list_shardings(base, task.cluster, keys)
    }
    if max(stages) >= 2:
        return None
    reason = "one rank has none"
    if task.num_ranks > 1:
        names = [f"parallel.{name}" for name in LAYOUT_KEYS if _is_given(task, name)]
        settings = " ".join(f"{key}={getattr(parallel, key.partition('.')[2])}" for key in names)
        reason = f"{settings or plural(task.num_ranks, 'rank')} leaves none"
    return Conflict(
        f"parallel.offload=parameters moves the shards of ZeRO 2 and 3, and {reason}",
        ("parallel.zero_stage", "parallel.tp", "parallel.pp", "parallel.ranks"),
        "parallel.offload=optimizer needs no shards",
    )


def _find_batch_conflict(task: SearchTask, bases: Sequence[ModelParallelBase]) -> Conflict | None:
    train = task.job.train
    micro = train.micro_batch_size or 1
    if any(train.global_batch_size % (base.data_parallel * micro) == 0 for base in bases):
        return None
    numbers = sorted({base.data_parallel for base in bases})
    text = f"{plural(numbers[0], 'data-parallel rank')} do not divide"
    if len(numbers) > 1:
        named = ", ".join(f"{number:,}" for number in numbers[:MAX_NUMBERS_NAMED])
        if len(numbers) > MAX_NUMBERS_NAMED:
            named += ", ..."
        text = f"no number of data-parallel ranks that {plural(task.num_ranks, 'rank')} can have"
        text += f" ({named}) divides"
    text += f" train.global_batch_size {train.global_batch_size}"
    if micro > 1:
        text += f" in microbatches of {micro}"
    keys = ["train.global_batch_size"]
    if micro > 1:
        keys.append("train.micro_batch_size")
    keys += [f"parallel.{axis}" for axis in ("dp_replicate", "dp_shard") if _is_given(task, axis)]
    return Conflict(text, (*keys, "parallel.ranks"))


def _is_given(task: SearchTask, axis: str) -> bool:
    return getattr(task.job.parallel, axis) is not None


def _describe_pipeline_conflict(task: SearchTask) -> Conflict:
    """The conflict where ranks and batch divide, and no schedule has its microbatches."""
    parallel, train = task.job.parallel, task.job.train
    batch = f"train.global_batch_size {train.global_batch_size}"
    micro = ""
    if (train.micro_batch_size or 1) > 1:
        micro = f" in microbatches of {train.micro_batch_size}"
    text = f"{batch}{micro} gives no pipeline of parallel.pp={parallel.pp}"
    if parallel.schedule is not None:
        text += f" with parallel.schedule={parallel.schedule}"
    text += " its microbatches"
    if parallel.pp is None:
        text = f"{plural(task.num_ranks, 'rank')} do not divide {batch}{micro}, and a pipeline of"
        text += " them has too few microbatches"
    keys = ["train.global_batch_size", "parallel.pp", "parallel.schedule"]
    keys += ["parallel.schedule_file", "parallel.ranks"]
    return Conflict(
        text,
        tuple(key for key in keys if key[:8] != "parallel" or _is_given(task, key[9:])),
        _explain_needed_microbatches(task),
    )


def _explain_needed_microbatches(task: SearchTask) -> str:
    """The rule that the microbatches of a pipeline break."""
    parallel, written = task.job.parallel, task.open_keys.written
    if written is not None:
        number = plural(written.num_microbatches, "microbatch", "microbatches")
        return f"{parallel.schedule_file} has {number}"
    if parallel.pp is None:
        return "a pipeline that no key asks for gets as many as it has stages, or more"
    if parallel.schedule == "dualpipe-v":
        return "it needs two of them for each rank"
    return "they go in equal rounds, each of as many as there are ranks or a few more"


def _list_bases(task: SearchTask) -> Iterator[ModelParallelBase]:
    """The model-parallel degrees that divide the ranks, whatever the batch."""
    keys, job = task.open_keys, task.job
    for tp in keys.tp:
        for cp in keys.cp:
            for pp in keys.pp:
                shares, rest = divmod(task.num_ranks, tp * cp * pp)
                if rest or pp > max(1, task.shape.num_layers):
                    continue
                for degree in (job.parallel.dp_shard, job.parallel.dp_replicate):
                    if degree is not None and shares % degree:
                        break
                else:
                    yield ModelParallelBase(tp, pp, cp, shares, 1, 1, 0, 1)


def _can_be_shared(task: SearchTask, base: ModelParallelBase) -> bool:
    """True if the data-parallel ranks of a base have a ZeRO stage and degrees that the job
    allows."""
    return any(True for _ in list_shardings(base, task.cluster, task.open_keys))


# Remedies


def _find_remedies(task: SearchTask, conflict: Conflict) -> Iterator[Remedy]:
    """For each key of a conflict the nearest values that work; those that fit alone where any
    fits."""
    for key in conflict.keys:
        working: dict[Any, bool] = {}
        for values in _list_values_around(task, key):
            value, fits = _find_first_working_value(task, key, values)
            if value is not None:
                working[value] = fits
        if not working and get_default_of_key(key) is None:
            fits_without = _search_with(task, {key: ABSENT})
            if fits_without is not None:
                working[ABSENT] = fits_without
        fitting = [value for value, fits in working.items() if fits]
        if working:
            numbers = " or ".join(map(str, fitting or working))
            yield Remedy(f"{key}={numbers}", bool(fitting))


def _find_joint_remedy(task: SearchTask) -> list[Remedy]:
    """The keys of the layout left out together, and another batch where that is not enough: for
    jobs in which no value of a single key is."""
    names = [f"parallel.{name}" for name in LAYOUT_KEYS if _is_given(task, name)]
    keys: dict[str, Any] = dict.fromkeys(names, ABSENT)
    fits = _search_with(task, keys)
    if fits is None:
        opened = replace(task, job=apply_job_keys(task.job, dict.fromkeys(names)))
        for batch in _list_batches_around(opened)[1][:MAX_VALUES_TRIED]:
            keys["train.global_batch_size"] = batch
            fits = _search_with(task, keys)
            if fits is not None:
                break
    if fits is None:
        return []
    return [Remedy(format_overrides(keys), fits)]


def _find_first_working_value(
    task: SearchTask, key: str, values: Iterable[int]
) -> tuple[int | None, bool]:
    """The first of `values` with which a layout fits, else the first with which there is one."""
    first: int | None = None
    for value, _ in zip(values, range(MAX_VALUES_TRIED), strict=False):
        fits = _search_with(task, {key: value})
        if fits:
            return value, True
        if fits is not None and first is None:
            first = value
    return first, False


def _search_with(task: SearchTask, keys: Mapping[str, Any]) -> bool | None:
    """True if a layout of the job with `keys` fits, False if there are layouts and none fits, None
    if there is none."""
    values = {key: None if value == ABSENT else value for key, value in keys.items()}
    changed = apply_job_keys(task.job, values)
    if not passes_job_checks(changed):
        return None
    try:
        tried = build_search_task(
            changed,
            cluster=None if task.cluster.is_described else task.cluster,
            shape=task.shape,
            vocab_size=task.vocab_size,
        )
        require_possible_degrees(tried)
        planner = FinalistPlanner(tried.job, tried.shape, tried.cluster, tried.vocab_size)
        best = plan_best_of_families(screen_layouts(tried), planner, num_families=1)
    except (LayoutError, JobError):
        return None
    if best:
        return True
    shortages = planner.smallest_shortage, planner.smallest_host_shortage
    return None if shortages == (None, None) else False


def _list_values_around(task: SearchTask, key: str) -> tuple[Iterable[int], Iterable[int]]:
    """The values of a key below what the job says, descending, and above it, ascending."""
    if key == "train.global_batch_size":
        return _list_batches_around(task)
    if key == "parallel.ranks":
        return list_rank_counts_around(task)
    section, _, name = key.partition(".")
    job_value = getattr(getattr(task.job, section), name)
    if not isinstance(job_value, int) or isinstance(job_value, bool):
        return (), ()
    values = _list_values(task, name)
    below = [value for value in reversed(values) if value < job_value]
    return below, [value for value in values if value > job_value]


def _list_values(task: SearchTask, name: str) -> list[int]:
    """The values of a degree, or of the size of a microbatch, that may be, ascending."""
    shape, heads = task.shape, task.shape.heads
    if name == "tp" and heads is not None:
        return list_legal_tp_degrees(heads.queries, heads.keys)
    if name == "pp":
        return [d for d in list_divisors(task.num_ranks) if d <= max(1, shape.num_layers)]
    if name == "ep" and shape.experts is not None:
        return list_divisors(shape.experts.count)
    if name == "micro_batch_size":
        return list_divisors(task.job.train.global_batch_size)
    if name in (*RANK_AXES, "stages_per_rank"):
        return list_divisors(task.num_ranks)
    return []


def _list_batches_around(task: SearchTask) -> tuple[list[int], list[int]]:
    """Batches that some base shares evenly, with a microbatch for each stage of its pipeline."""
    batch, micro = task.job.train.global_batch_size, task.job.train.micro_batch_size or 1
    below: set[int] = set()
    above: set[int] = set()
    for base in _list_bases(task):
        if not _can_be_shared(task, base):
            continue
        unit = base.data_parallel * micro
        # Interleaved schedules want multiples of the stages, and any schedule as many.
        for step in {unit, unit * base.pp}:
            least = unit * base.pp
            below |= {size for size in (batch // step * step,) if least <= size < batch}
            above.add(max(least, (batch // step + 1) * step))
    return sorted(below, reverse=True), sorted(above)


def list_rank_counts_around(task: SearchTask) -> tuple[Iterator[int], Iterator[int]]:
    """Numbers of ranks that the job's degrees divide and that divide its batch: below the task's,
    descending, and above it, ascending."""
    number = task.num_ranks
    below = range(number - 1, max(0, number - 1 - MAX_RANKS_TRIED), -1)
    above = range(number + 1, number + 1 + MAX_RANKS_TRIED)
    return (
        (count for count in below if _has_layouts(task, count)),
        (count for count in above if _has_layouts(task, count)),
    )


def _has_layouts(task: SearchTask, num_ranks: int) -> bool:
    resized = replace(task, num_ranks=num_ranks, cluster=resize_cluster(task.cluster, num_ranks))
    batch = task.job.train.global_batch_size
    if all(batch % base.data_parallel for base in _list_bases(resized)):
        return False  # as most numbers are, and cheap to say
    rows = enumerate_layouts(
        resized.job, resized.shape, resized.cluster, num_ranks, resized.open_keys
    )
    return len(rows) > 0
