"""`search_layouts`: the fastest layout of a job on a cluster, and the best of other families."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from phalanx.core.errors import LayoutError
from phalanx.core.units import format_seconds
from phalanx.job.user_dataset import is_own_dataset
from phalanx.plan.search.attempts import ScreenedLayouts, plan_best_of_families
from phalanx.plan.search.comparison import choose_winner, explain_why_slower
from phalanx.plan.search.economics import HOUR_S, MIN_GOODPUT, estimate_cost, estimate_goodput
from phalanx.plan.search.finalists import FinalistPlanner
from phalanx.plan.search.remarks import list_remarks_of_task, list_remarks_of_winner
from phalanx.plan.search.result import RankedLayout, SearchResult
from phalanx.plan.search.screening import screen_layouts
from phalanx.plan.search.task import SearchTask, require_possible_degrees
from phalanx.plan.workload import build_workload

NUM_RUNNERS_UP = 4


def search_layouts(task: SearchTask) -> SearchResult:
    """The best layout of each family that fits, planned exactly; the fastest wins, and of those
    within TIE_SHARE_OF_STEP of it the one with the fewest mechanisms.

    Raises LayoutError for degrees that the model forbids, NoLayoutError where no layout divides
    ranks and batch (`phalanx.plan.search.contradiction` says which key is in the way).
    """
    require_possible_degrees(task)
    screened = screen_layouts(task)
    planner = FinalistPlanner(task.job, task.shape, task.cluster, task.vocab_size)
    best = plan_best_of_families(screened, planner, num_families=1 + NUM_RUNNERS_UP)
    result = _build_search_result(task, screened)
    result = replace(result, refused=dict(planner.refused))
    if not best:
        return _add_missing_memory(result, planner)
    winner, other_layouts = choose_winner(best)
    runners_up = tuple(
        replace(other, why_not=explain_why_slower(other, winner)) for other in other_layouts
    )
    remarks = (*result.remarks, *list_remarks_of_winner(task, winner, runners_up))
    result = replace(result, winner=winner, runners_up=runners_up, remarks=remarks)
    return replace(result, economics=estimate_economics(task, winner))


def find_winner(task: SearchTask) -> RankedLayout | None:
    """The layout that `search_layouts` proposes; None where nothing fits. Raises LayoutError where
    no layout divides ranks and batch."""
    screened = screen_layouts(task)
    planner = FinalistPlanner(task.job, task.shape, task.cluster, task.vocab_size)
    best = plan_best_of_families(screened, planner, num_families=1 + NUM_RUNNERS_UP)
    if not best:
        return None
    return choose_winner(best)[0]


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
    if goodput.value < MIN_GOODPUT:
        raise LayoutError(
            f"a job that fails every {format_seconds(goodput.mtbf_hours * HOUR_S)} never ends",
            where="checkpoint.mtbf_hours" if job.checkpoint.mtbf_hours is not None else None,
            why=f"to start again takes {format_seconds(goodput.recovery_s)}",
            fix="give the hours between two failures of the whole job",
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
        remarks=list_remarks_of_task(task),
        precision=job.precision.compute,
    )


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
