"""The remarks of a search: what its answer rests on, and what a reader might not expect of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from phalanx.core.errors import LayoutError
from phalanx.core.units import format_bytes, format_seconds, plural
from phalanx.job.copies import apply_job_keys, drop_job_keys
from phalanx.plan.described_cluster import describe_untimed_topologies
from phalanx.plan.host_memory import count_ranks_of_node
from phalanx.plan.notes import describe_wide_products
from phalanx.plan.search.attempts import (
    count_mechanisms_by_row,
    group_rows_by_family,
    plan_rows,
)
from phalanx.plan.search.finalists import FinalistPlanner
from phalanx.plan.search.result import RankedLayout
from phalanx.plan.search.screening import screen_layouts
from phalanx.plan.search.task import SearchTask

# What cuts a model, and what goes with it.
MODEL_CUTTING_KEYS = (
    *("parallel.tp", "parallel.pp", "parallel.cp", "parallel.ep", "parallel.schedule"),
    *("parallel.schedule_file", "parallel.stages_per_rank"),
    *("parallel.dp_replicate", "parallel.dp_shard"),
    *("parallel.sequence_parallel", "parallel.tp_chunks", "parallel.stage_blocks"),
)


def list_remarks_of_task(task: SearchTask) -> tuple[str, ...]:
    """The remarks that hold whether or not something fits."""
    remarks = (
        _describe_assumed_network(task),
        _describe_untimed_topologies(task),
        _describe_unused_nodes(task),
        _describe_unread_length(task),
        _describe_slow_precision(task),
        _describe_wide_products(task),
    )
    return tuple(filter(None, remarks))


def list_remarks_of_winner(
    task: SearchTask, winner: RankedLayout, runners_up: Sequence[RankedLayout] = ()
) -> tuple[str, ...]:
    """The remarks on the layout that is proposed, and on those beside it."""
    remarks = (
        _describe_untried_stages(task, [winner, *runners_up]),
        _describe_unknown_time(task, winner),
        _describe_uncounted_layers(task, winner),
        _describe_uncut_alternative(task, winner),
        _describe_unknown_host_memory(task, winner),
    )
    return tuple(filter(None, remarks))


def _describe_assumed_network(task: SearchTask) -> str:
    """A line where messages between machines are timed by a speed that nobody knows, or ""."""
    if task.cluster.num_nodes == 1 or not task.cluster.network_note:
        return ""
    return f"remark  {task.cluster.network_note}"


def _describe_untimed_topologies(task: SearchTask) -> str:
    """A line where links are of a topology that times do not know, or ""."""
    words = describe_untimed_topologies(task.cluster)
    return f"remark  {words}" if words else ""


def _describe_unused_nodes(task: SearchTask) -> str:
    """A line where the job asks for so few ranks that whole machines of its cluster have none; ""
    elsewhere."""
    per_node, unused = task.cluster.devices_per_node, task.num_unused_devices
    if not per_node or unused < per_node:
        return ""
    return (
        f"remark  {plural(unused, 'GPU')} of {task.num_ranks + unused:,} are left unused: the job"
        f" asks for {plural(task.num_ranks, 'rank')} (parallel.ranks, or its degrees)"
    )


def _describe_unread_length(task: SearchTask) -> str:
    """A line where the job gives a length, and its samples have one of their own; "" elsewhere."""
    shape, data = task.shape, task.job.data
    has_own_samples = bool(getattr(shape, "has_own_samples", False))
    if "seq_len" not in data.model_fields_set or not (shape.reads_images or has_own_samples):
        return ""
    noun = shape.get_sample_noun(of_own_data=has_own_samples)
    length = plural(shape.count_sample_tokens(data.seq_len), "token")
    return f"remark  data.seq_len {data.seq_len} has no effect: {noun} have {length}"


def _describe_slow_precision(task: SearchTask) -> str:
    """A line where GPUs compute in fp32 because the job names no type: outside of tensor cores; ""
    elsewhere."""
    if task.cluster.device != "cuda" or task.job.precision.compute != "fp32":
        return ""
    if not task.precision_reason:
        return ""
    return f"remark  {task.precision_reason}"


def _describe_wide_products(task: SearchTask) -> str:
    """A line where sharded layouts keep less of a traced module than is counted; "" elsewhere."""
    compute_bytes = 4 if task.job.precision.compute == "fp32" else 2
    words = describe_wide_products(task.shape, compute_bytes)
    return f"remark  {words}" if words else ""


def _describe_untried_stages(task: SearchTask, ranked: Sequence[RankedLayout]) -> str:
    """A line where a pipeline is named for a module whose forward nobody has cut yet; ""
    elsewhere."""
    if not task.job.model.is_foreign or all(layout.layout.pp == 1 for layout in ranked):
        return ""
    return (
        "remark  whether this module's forward can be cut into stages (pp) only a run of it shows,"
        " before its first step; phalanx verify --ranks 2 --layouts pp2-1f1b tries it here, with a"
        " small model of the same code"
    )


def _describe_unknown_time(task: SearchTask, winner: RankedLayout) -> str:
    """A line where no time of a step is predicted, with what would have to be known; ""
    elsewhere."""
    if winner.time is not None:
        return ""
    text = "remark  no time is predicted, and the order is by simplicity"
    if task.shape.num_layers == 0:
        return (
            f"{text}: times are counted block by block, and the module shows none; its blocks are"
            " the first ModuleList or Sequential of equal modules, or what block_pattern ="
            ' "..." on it names'
        )
    if task.cluster.accelerator is None:
        return f"{text}: how fast the devices are is not known; set cluster.gpu"
    return text


def _describe_uncounted_layers(task: SearchTask, winner: RankedLayout) -> str:
    """A line where a time leaves out layers that a trace sees no product of; "" elsewhere."""
    names = [holder.name for holder in task.shape.holders if holder.kind == "LSTM"]
    if winner.time is None or not names:
        return ""
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"remark  the time leaves out the LSTM {names[0]}{others}: a step takes longer"


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
