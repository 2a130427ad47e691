"""`search_layouts`: the fastest layout of a job on a cluster, and the best of other families."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.core.batch import BYTE_VOCAB_SIZE
from phalanx.core.errors import LayoutError
from phalanx.core.units import format_bytes, format_seconds, plural
from phalanx.job.costs import ModelCosts
from phalanx.job.model import build_model_shape
from phalanx.job.module_probe import SampleForm, TellProgress, measure_foreign_shape
from phalanx.job.schema import Job
from phalanx.job.user_dataset import is_own_dataset
from phalanx.plan.advice.waterfall import TERM_LABELS
from phalanx.plan.cluster import Cluster, choose_headroom, rank_memory_bytes
from phalanx.plan.degree_checks import (
    check_context_parallel,
    check_gradient_compression,
    check_tensor_parallel,
)
from phalanx.plan.degrees import choose_num_ranks
from phalanx.plan.described_cluster import choose_cluster_of_job, resize_cluster
from phalanx.plan.host_memory import count_ranks_of_node
from phalanx.plan.notes import describe_wide_products
from phalanx.plan.precision import require_gpus_multiply, resolve_precision
from phalanx.plan.search.attempts import (
    TIE_SHARE_OF_STEP,
    ScreenedLayouts,
    choose_smallest_rows,
    count_mechanisms_by_row,
    group_rows_by_family,
    plan_best_of_families,
    plan_rows,
)
from phalanx.plan.search.economics import estimate_cost, estimate_goodput
from phalanx.plan.search.finalists import (
    FinalistPlanner,
    apply_job_keys,
    drop_job_keys,
)
from phalanx.plan.search.result import RankedLayout, SearchResult
from phalanx.plan.search.screen import MemoryScreen
from phalanx.plan.search.space import (
    LayoutRows,
    OpenKeys,
    enumerate_layouts,
    list_open_keys,
)
from phalanx.plan.search.step_times import build_machine_rates, get_sample_work, predict_row_times
from phalanx.plan.workload import Workload, build_workload

SCREEN_SLACK = 1.06  # of what a rank may fill: the screen is not exact, and the plan decides
NUM_RUNNERS_UP = 4
# What cuts a model, and what goes with it.
MODEL_CUTTING_KEYS = (
    *("parallel.tp", "parallel.pp", "parallel.cp", "parallel.ep", "parallel.schedule"),
    *("parallel.stages_per_rank", "parallel.dp_replicate", "parallel.dp_shard"),
    *("parallel.sequence_parallel", "parallel.tp_chunks", "parallel.stage_blocks"),
)


class NoLayoutError(LayoutError):
    """No layout that the job allows divides ranks and batch."""


@dataclass(frozen=True)
class SearchTask:
    """One search: a job whose precision is decided, its model, and the cluster with its ranks."""

    job: Job
    shape: ModelCosts
    cluster: Cluster
    num_ranks: int
    vocab_size: int | None = None
    offloads: bool = False
    """Host memory may be used, and tp may leave the innermost links."""
    num_unused_devices: int = 0
    """GPUs of the cluster that the job asks for no rank on."""
    precision_reason: str = ""
    """Why the job computes in its type of numbers; "" where it names the type itself."""

    @property
    def open_keys(self) -> OpenKeys:
        return list_open_keys(
            self.job, self.shape, self.cluster, self.num_ranks, offloads=self.offloads
        )


def build_search_task(
    job: Job,
    *,
    cluster: Cluster | None = None,
    shape: ModelCosts | None = None,
    vocab_size: int | None = None,
    sample_form: SampleForm | None = None,
    tell: TellProgress | None = None,
) -> SearchTask:
    """The search for a job, on all devices of the cluster that it describes (or of this machine),
    or on the ranks that it names. `sample_form`: of a user's own dataset for a module of theirs.
    `tell` hears how far the measuring of a module is."""
    cluster = cluster or choose_cluster_of_job(job)
    job, why_precision = resolve_precision(job, cluster)
    require_gpus_multiply(job, cluster)
    if shape is None:
        measured = measure_foreign_shape(job, sample_form=sample_form, tell=tell)
        shape = measured or build_model_shape(job, vocab_size or BYTE_VOCAB_SIZE)
    num_ranks = job.parallel.ranks or _multiply_fixed_degrees(job) or cluster.num_devices
    if cluster.device != "cuda" and job.parallel.ranks is None:
        num_ranks = choose_num_ranks(job, cluster, None).value
    if cluster.device == "cuda" and num_ranks > cluster.num_devices:
        raise LayoutError(
            f"{plural(num_ranks, 'rank')} were asked for and the cluster has"
            f" {plural(cluster.num_devices, 'GPU')}",
            fix=f"set cluster.nodes={resize_cluster(cluster, num_ranks).num_nodes}",
        )
    num_unused = 0
    if cluster.device == "cuda" and num_ranks < cluster.num_devices:
        num_unused = cluster.num_devices - num_ranks
        cluster = resize_cluster(cluster, num_ranks)
    return SearchTask(
        job,
        shape,
        cluster,
        num_ranks,
        vocab_size,
        num_unused_devices=num_unused,
        precision_reason=why_precision,
    )


def _multiply_fixed_degrees(job: Job) -> int | None:
    """The ranks that the job's degrees make, where it gives both data-parallel ones."""
    parallel = job.parallel
    if not (parallel.dp_replicate and parallel.dp_shard):
        return None
    shares = parallel.dp_replicate * parallel.dp_shard
    return shares * parallel.degrees.model_parallel_size


def search_layouts(task: SearchTask, *, num_runners_up: int = NUM_RUNNERS_UP) -> SearchResult:
    """The best layout of each family that fits, planned exactly; the fastest wins, and of those
    within TIE_SHARE_OF_STEP of it the one with the fewest mechanisms.

    Raises LayoutError for degrees that the model forbids, NoLayoutError where no layout divides
    ranks and batch (`phalanx.plan.search.contradiction` says which key is in the way).
    """
    require_possible_degrees(task)
    screened = screen_layouts(task)
    planner = FinalistPlanner(task.job, task.shape, task.cluster, task.vocab_size)
    best = plan_best_of_families(screened, planner, num_families=1 + num_runners_up)
    result = _build_search_result(task, screened)
    result = replace(result, refused=dict(planner.refused))
    if not best:
        return _add_missing_memory(result, planner)
    winner, other_layouts = _choose_winner(best)
    runners_up = tuple(
        replace(other, why_not=explain_why_slower(other, winner)) for other in other_layouts
    )
    remarks = (
        *result.remarks,
        _describe_uncut_alternative(task, winner),
        _describe_unknown_host_memory(task, winner),
    )
    remarks = tuple(filter(None, remarks))
    result = replace(result, winner=winner, runners_up=runners_up, remarks=remarks)
    return replace(result, economics=estimate_economics(task, winner))


def require_possible_degrees(task: SearchTask) -> None:
    """Raises LayoutError for degrees of the job that its model, or other keys, forbid on any number
    of ranks."""
    check_tensor_parallel(task.job, task.shape)
    check_context_parallel(task.job, task.shape)
    check_gradient_compression(task.job, task.num_ranks)


def find_winner(task: SearchTask) -> RankedLayout | None:
    """The layout that `search_layouts` proposes; None where nothing fits. Raises LayoutError where
    no layout divides ranks and batch."""
    screened = screen_layouts(task)
    planner = FinalistPlanner(task.job, task.shape, task.cluster, task.vocab_size)
    best = plan_best_of_families(screened, planner, num_families=1 + NUM_RUNNERS_UP)
    if not best:
        return None
    return _choose_winner(best)[0]


def _add_missing_memory(result: SearchResult, planner: FinalistPlanner) -> SearchResult:
    """`result` with the bytes of the planned layout that needs least, and of those it may fill, on
    a rank and in a node's host memory; without them where that is not what layouts were refused
    for."""
    shortage, host_shortage = planner.smallest_shortage, planner.smallest_host_shortage
    if shortage is not None:
        result = replace(
            result,
            smallest_bytes=shortage.needed_bytes,
            capacity_bytes=shortage.capacity_bytes,
            num_planned=planner.num_shortages,
        )
    if host_shortage is not None:
        result = replace(
            result,
            smallest_host_bytes=host_shortage.needed_bytes,
            host_capacity_bytes=host_shortage.capacity_bytes,
            num_planned=planner.num_host_shortages,
        )
    return result


def _describe_unknown_host_memory(task: SearchTask, winner: RankedLayout) -> str:
    """A line where something is offloaded, and nobody says how much host memory a node has; ""
    elsewhere."""
    if not winner.memory.host_bytes or task.cluster.host_memory_bytes is not None:
        return ""
    needed = count_ranks_of_node(task.cluster, task.num_ranks) * winner.memory.host_bytes
    return (
        f"that a node's host memory holds what is offloaded is not known: {format_bytes(needed)}"
        " are needed, set cluster.host_memory_gib"
    )


def _describe_uncut_alternative(task: SearchTask, winner: RankedLayout) -> str:
    """A line where the job cuts the model and whole copies, or shards alone, would fit as well;
    "" where they do not."""
    fixed = task.job.parallel.degrees.degrees_above_one("tp", "pp", "cp", "ep")
    if not fixed:
        return ""
    opened = drop_job_keys(task.job, *MODEL_CUTTING_KEYS)
    opened = apply_job_keys(opened, {f"parallel.{axis}": 1 for axis in ("tp", "pp", "cp", "ep")})
    try:
        screened = screen_layouts(replace(task, job=opened))
    except LayoutError:
        return ""  # so many data-parallel ranks do not divide the batch
    planner = FinalistPlanner(opened, task.shape, task.cluster, task.vocab_size)
    number = count_mechanisms_by_row(screened.rows)
    # The simplest first: what is asked is whether the cut is needed at all.
    firsts = sorted(
        (int(family[0]) for family in group_rows_by_family(screened)), key=lambda row: number[row]
    )
    ranked = next(plan_rows(screened, planner, firsts), None)
    if ranked is None:
        return ""
    words = " x ".join(f"{axis}={degree}" for axis, degree in fixed.items())
    text = f"remark  {words} is as the job says; {ranked.family} fits without it"
    text += f" ({format_bytes(ranked.memory.total_bytes)} per rank"
    if ranked.step_s is not None and winner.step_s is not None:
        text += f", {format_seconds(ranked.step_s)} a step instead of"
        text += f" {format_seconds(winner.step_s)}"
    return f"{text})"


def screen_layouts(task: SearchTask) -> ScreenedLayouts:
    """Every layout that the job leaves open, screened by memory and ordered by time."""
    job, shape, cluster = task.job, task.shape, task.cluster
    keys = task.open_keys
    rows = enumerate_layouts(job, shape, cluster, task.num_ranks, keys)
    if not len(rows):
        raise NoLayoutError(
            f"no layout of {plural(task.num_ranks, 'rank')} divides"
            f" train.global_batch_size {job.train.global_batch_size}"
        )
    work = _build_any_workload(task, keys)
    memory_bytes = rank_memory_bytes(job, cluster, task.num_ranks)
    headroom = choose_headroom(cluster.device)
    capacity = headroom.compute_capacity_bytes(memory_bytes, 1)
    num_modes = len(keys.recompute)
    groups = count_communicators_by_row(rows.take(np.arange(0, len(rows), num_modes)))
    limits = np.asarray(capacity - headroom.communicator_bytes * (groups - 1), dtype=np.float64)
    cheapest, bytes_of_cheapest = MemoryScreen(shape, work, rows).find_least_recompute(
        SCREEN_SLACK * limits, num_modes
    )
    rows_that_fit = rows.take(cheapest)
    predict = partial(_predict_row_seconds, task, sequence_parallel=work.cuts_sequence)
    seconds = predict(rows_that_fit)
    if np.isnan(seconds).any():
        # The simplest are first, and of these the ones that take least memory.
        order = np.lexsort((bytes_of_cheapest, count_mechanisms_by_row(rows_that_fit)))
    else:
        order = np.argsort(seconds, kind="stable")
    return ScreenedLayouts(
        rows_that_fit.take(order),
        seconds[order],
        len(rows),
        partial(_find_smallest_rows, shape, work, rows),
        keys.recompute,
        predict,
    )


def _find_smallest_rows(shape: ModelCosts, work: Workload, rows: LayoutRows) -> LayoutRows:
    return choose_smallest_rows(rows, MemoryScreen(shape, work, rows).total_bytes())


def estimate_row_bytes(task: SearchTask, rows: LayoutRows) -> npt.NDArray[np.float64]:
    """The bytes of a rank by which the search of `task` screens `rows`."""
    return MemoryScreen(task.shape, _build_any_workload(task, task.open_keys), rows).total_bytes()


def _build_any_workload(task: SearchTask, keys: OpenKeys) -> Workload:
    """The work of a rank, of which a screen reads what is the same in every layout."""
    return build_workload(
        task.job, task.shape, micro_batch_size=1, num_microbatches=1, tp=keys.tp[-1]
    )


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


def _choose_winner(best: list[RankedLayout]) -> tuple[RankedLayout, list[RankedLayout]]:
    """(the winner, the others in order): the fastest, or one within TIE_SHARE_OF_STEP with fewer
    mechanisms."""
    if any(ranked.step_s is None for ranked in best):
        ordered = sorted(best, key=lambda ranked: ranked.num_mechanisms)
        return ordered[0], ordered[1:]
    ordered = sorted(best, key=lambda ranked: ranked.step_s or 0.0)
    fastest = ordered[0].step_s or 0.0
    tied = [
        ranked for ranked in ordered if (ranked.step_s or 0.0) <= (1 + TIE_SHARE_OF_STEP) * fastest
    ]
    winner = min(tied, key=_simplicity_sort_key)
    return winner, [ranked for ranked in ordered if ranked is not winner]


def _simplicity_sort_key(ranked: RankedLayout) -> tuple[int, int]:
    """Smaller is simpler: mechanisms, then ranks over which a copy of the model is spread."""
    layout = ranked.layout
    spread = layout.tp * layout.pp * layout.cp
    if ranked.zero_stage > 0:
        spread *= layout.dp_shard
    return ranked.num_mechanisms, spread


def explain_why_slower(other: RankedLayout, winner: RankedLayout) -> str:
    """The term by which `other` loses to `winner`, in words."""
    if other.time is None or winner.time is None:
        extra = other.num_mechanisms - winner.num_mechanisms
        if extra > 0:
            return f"{plural(extra, 'mechanism')} more, and nothing says that it is faster"
        size = format_bytes(other.memory.total_bytes)
        return f"as simple; needs {size} where the winner needs" + (
            f" {format_bytes(winner.memory.total_bytes)}"
        )
    slower_s = other.time.total_s - winner.time.total_s
    differences = {
        term: seconds - winner.time.terms[term] for term, seconds in other.time.terms.items()
    }
    term = max(differences, key=lambda name: differences[name])
    # As where the winner's time goes.
    label = TERM_LABELS.get(term, term)
    if slower_s < 0:
        faster = f"{-slower_s / winner.time.total_s:.1%} faster, which is a tie"
        return f"{faster}; {_explain_why_less_simple(other, winner)}"
    if slower_s <= TIE_SHARE_OF_STEP * winner.time.total_s:
        return f"{slower_s / winner.time.total_s:+.1%} of the step, most of it {label}"
    return f"{label}: {format_seconds(differences[term])} more"


def _explain_why_less_simple(other: RankedLayout, winner: RankedLayout) -> str:
    """What the winner of a tie has fewer of than `other`, which is faster."""
    extra = other.num_mechanisms - winner.num_mechanisms
    if extra > 0:
        return f"{plural(extra, 'mechanism')} more"
    (_, spread), (_, spread_of_winner) = map(_simplicity_sort_key, (other, winner))
    return f"a copy spread over {plural(spread, 'rank')}, not {spread_of_winner}"


def estimate_economics(task: SearchTask, winner: RankedLayout) -> dict[str, Any]:
    """Goodput, cost and energy of the winner; empty where its time is not known."""
    if winner.step_s is None or winner.tokens_per_s_per_device is None:
        return {}
    job = task.job
    work = build_workload(job, task.shape, micro_batch_size=1, num_microbatches=1, tp=1)
    # What a checkpoint holds: weights and optimizer state, of which each rank writes its part.
    state_bytes = task.shape.num_params * (4.0 + work.optimizer_bytes) / task.num_ranks
    goodput = estimate_goodput(
        task.cluster, state_bytes, mtbf_hours=job.checkpoint.mtbf_hours, is_spot=False
    )
    spot = estimate_goodput(
        task.cluster, state_bytes, mtbf_hours=job.checkpoint.mtbf_hours, is_spot=True
    )
    tokens_per_s = winner.tokens_per_s_per_device * winner.layout.world_size
    tokens_per_step = tokens_per_s * winner.step_s
    cost = estimate_cost(
        task.cluster,
        tokens_per_s=tokens_per_s,
        job_tokens=tokens_per_step * job.train.steps,
        goodput=goodput.value,
        spot_goodput=spot.value,
    )
    return {
        "goodput": goodput.to_json(),
        "spot_goodput": spot.to_json(),
        "cost": cost.to_json(),
        # None: the default of a job, whose cost nobody asked for.
        "job_steps": job.train.steps if "steps" in job.train.model_fields_set else None,
    }


def _build_search_result(task: SearchTask, screened: ScreenedLayouts) -> SearchResult:
    job = task.job
    model = job.model.preset or job.model.kind or "small"
    return SearchResult(
        model=model,
        num_params=task.shape.num_params,
        cluster=task.cluster.name or task.cluster.device,
        num_ranks=task.num_ranks,
        seq_len=job.data.seq_len,
        global_batch_size=job.train.global_batch_size,
        winner=None,
        num_considered=screened.num_considered,
        defaults=_list_defaults_of_step_size(task),
        tokens_per_sample=task.shape.count_sample_tokens(job.data.seq_len),
        sample_noun=task.shape.get_sample_noun(of_own_data=is_own_dataset(job.data.source)),
        num_fitting=len(screened.rows),
        remarks=(
            *_describe_assumed_network(task),
            *_describe_unused_nodes(task),
            *_describe_slow_precision(task),
            *_describe_wide_products(task),
        ),
        precision=job.precision.compute,
    )


def _describe_assumed_network(task: SearchTask) -> tuple[str, ...]:
    """A line where messages between machines are timed by a speed that nobody knows."""
    if task.cluster.num_nodes == 1 or not task.cluster.network_note:
        return ()
    return (f"remark  {task.cluster.network_note}",)


def _describe_unused_nodes(task: SearchTask) -> tuple[str, ...]:
    """A line where the job asks for so few ranks that whole machines of its cluster have none."""
    per_node, unused = task.cluster.devices_per_node, task.num_unused_devices
    if not per_node or unused < per_node:
        return ()
    return (
        f"remark  {plural(unused, 'GPU')} of {task.num_ranks + unused:,} are left unused: the job"
        f" asks for {plural(task.num_ranks, 'rank')} (parallel.ranks, or its degrees)",
    )


def _describe_slow_precision(task: SearchTask) -> tuple[str, ...]:
    """A line where GPUs compute in fp32 because the job names no type: outside of tensor cores."""
    if task.cluster.device != "cuda" or task.job.precision.compute != "fp32":
        return ()
    if not task.precision_reason:
        return ()
    return (f"remark  {task.precision_reason}",)


def _describe_wide_products(task: SearchTask) -> tuple[str, ...]:
    """A line where sharded layouts keep less of a traced module than is counted."""
    compute_bytes = 4 if task.job.precision.compute == "fp32" else 2
    words = describe_wide_products(task.shape, compute_bytes)
    return (f"remark  {words}",) if words else ()


def _list_defaults_of_step_size(task: SearchTask) -> tuple[str, ...]:
    """The keys that say how many tokens a step has and that the job leaves out."""
    job = task.job
    defaults = []
    reads_seq_len = task.shape.count_sample_tokens(job.data.seq_len) == job.data.seq_len
    if reads_seq_len and "seq_len" not in job.data.model_fields_set:
        defaults.append("data.seq_len")
    if "global_batch_size" not in job.train.model_fields_set:
        defaults.append("train.global_batch_size")
    return tuple(defaults)
