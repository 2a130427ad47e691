"""Notes of a plan besides its choice: what follows from the job and might surprise its owner, one
line each.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from phalanx.core.units import format_bytes, plural
from phalanx.job.checks.experts import EXPERT_REDUCTION_REASON
from phalanx.job.costs import ModelCosts
from phalanx.job.learning_rate import resolve_peak_learning_rate
from phalanx.job.model import explain_scaled_widths
from phalanx.job.schema import Job, Parallel
from phalanx.job.user_dataset import is_given_unknown_samples
from phalanx.plan.candidates import CandidateEvaluator, list_ep_degrees
from phalanx.plan.cluster import Cluster, choose_headroom, count_communicators, rank_memory_bytes
from phalanx.plan.communication import (
    cp_sent_bytes_per_step,
    ep_sent_bytes_per_step,
)
from phalanx.plan.degrees import choose_cp_load_balance
from phalanx.plan.explain import explain_pipeline
from phalanx.plan.leaf_tree import LAYOUT_FREE, LeafTree
from phalanx.plan.memory import activation_bytes
from phalanx.plan.plan import Candidate
from phalanx.plan.rule_checks import combine_and_check_rules, describe_unsharded_matrices
from phalanx.plan.workload import Workload, has_error_feedback, shard_shape

SHARDING_ONLY_KEYS = (
    "accumulate",
    "blocks_per_unit",
    "keep_whole_below",
    "prefetch",
)  # ZeRO 2 and 3
DDP_ONLY_KEYS = ("static_graph",)
# Of a pipeline: a stage is gathered whole for a step, and a gradient that a rank lacks counts as
# zeros, if another has one.
KEYS_IGNORED_IN_PIPELINES = ("blocks_per_unit", "prefetch", "static_graph", "unused_parameters")
MAX_PROPOSED_EP = 8  # ranks of one node: rows of every token travel in every block
# Of a rank's memory: what spreading experts must save to be worth a line.
MIN_SAVED_MEMORY_SHARE = 0.05


def list_plan_notes(
    job: Job, evaluator: CandidateEvaluator, chosen: Candidate, reasons: Mapping[str, str]
) -> list[str]:
    """The notes of a plan, one line each. `reasons`: why keys of [parallel] have their values."""
    shape, work = evaluator.shape, evaluator.work
    notes = [*explain_scaled_widths(job.model), *describe_ignored_keys(job, chosen)]
    if work.tp > 1:
        notes += _list_tp_notes(job, evaluator)
    notes += list_cp_notes(job, shape, work)
    notes += list_ep_notes(job, evaluator, chosen)
    pipeline = evaluator.build_pipeline_with_memory(chosen)
    if pipeline is not None:
        notes += explain_pipeline(job, shape, work, pipeline, reasons)
    if shape.activations is None:
        cut = ""
        if work.tp > 1:
            cut = ", as sharding rules cut them"
        notes.append(
            f"memory of your own model counts weights, gradients and optimizer{cut}; activations,"
            f" logits and what is gathered are not predicted"
            f"{_explain_untraced_module(job, shape)}:"
            " that it"
            " fits is not known"
        )
    if chosen.zero_stage >= 2:
        notes.append(describe_wide_products(shape, work.compute_bytes))
    notes.append(_describe_staging_copy(evaluator))
    notes.append(_describe_offload_host_memory(chosen))
    notes += list_compression_notes(job, shape, evaluator.num_ranks)
    notes.append(_describe_layout_free(job, evaluator))
    waits_on_host = work.offloads_activations and evaluator.device == "cuda"
    if waits_on_host and shape.activations is not None:
        size = format_bytes(activation_bytes(shard_shape(shape, work.tp, work.rules), work))
        notes.append(f"activations wait for the backward in pinned host memory, {size} per rank")
    notes.append(resolve_peak_learning_rate(job).why or "")
    return [line for line in notes if line]


def _describe_layout_free(job: Job, evaluator: CandidateEvaluator) -> str:
    """The cost of train.deterministic = "layout-free"; empty for other jobs."""
    if job.train.deterministic != LAYOUT_FREE:
        return ""
    tree, work = LeafTree.of_job(job), evaluator.work
    gradients = 4 * round(evaluator.shape.num_params * evaluator.shape.trained_share)
    text = (
        "layout-free: the gradients of"
        f" {plural(tree.num_leaves, 'microbatch', 'microbatches')} of {work.micro_batch_size} are"
        f" added along one tree: the same bits on up to {plural(tree.num_classes, 'rank')} (powers"
        f" of two), {plural(work.gradient_copies, 'set')} of gradients"
        f" ({format_bytes(work.gradient_copies * gradients)}) at one time on each, one thread"
    )
    if evaluator.num_ranks > 1:
        sent = 2 * gradients * (evaluator.num_ranks - 1) / evaluator.num_ranks
        text += f"; each sends {format_bytes(round(sent))} per step, after the backward"
    return text


def _explain_untraced_module(job: Job, shape: ModelCosts) -> str:
    """Why a module was not traced, in brackets; "" where nobody says."""
    why = getattr(shape, "why_untraced", "")
    if not why and is_given_unknown_samples(job):
        why = "what a sample is only the dataset says; phalanx plan --dry-run reads one"
    return f" ({why})" if why else ""


def describe_wide_products(shape: ModelCosts, compute_bytes: int) -> str:
    """What the memory of a traced module with grouped experts does not know; "" for others."""
    list_wide_products = getattr(shape, "list_wide_products", None)
    names = list_wide_products(compute_bytes) if list_wide_products else ()
    if not names:
        return ""
    return (
        f"activations of {', '.join(names)} are counted in fp32, in which torch multiplies groups"
        " of rows by fp32 weights; with ZeRO 2 and 3 these weights are in 16 bits, and about half"
        " is kept"
    )


def _list_tp_notes(job: Job, evaluator: CandidateEvaluator) -> list[str]:
    shape, work, requested = evaluator.shape, evaluator.work, job.parallel.sequence_parallel
    lines = [
        describe_unsharded_matrices(
            combine_and_check_rules(job.parallel.rules, shape, work.tp), shape
        )
    ]
    if work.cuts_sequence:
        how = "cut between regions (sequence parallelism)"
    elif requested is False:
        how = "whole on every rank, as the job says"
    elif shape.is_per_token_outside_regions is False:
        how = f"whole on every rank: a {shape.kind} cannot do with a part of it"
    else:
        how = (
            "cut between regions if the module says that it can (is_per_token_outside_regions),"
            " else whole"
        )
    lines.append(f"tp: the sequence is {how}")
    if job.parallel.rules and shape.has_proven_rules:
        lines.append(
            "memory is predicted for the model's own sharding rules, not for what parallel.rules"
            " replaces"
        )
    return lines


def _describe_staging_copy(evaluator: CandidateEvaluator) -> str:
    if not evaluator.work.copies_state:
        return ""
    size = evaluator.staging_bytes()
    where = "memory"
    if evaluator.device == "cuda":
        where = "pinned host memory"
    return (
        f"training goes on while it is saved, from a copy of the state: {format_bytes(size)} of"
        f" {where} per rank; checkpoint.asynchronous=false does without"
    )


def _describe_offload_host_memory(chosen: Candidate) -> str:
    """The host's memory that offloading takes, beside what the plan of a GPU counts."""
    if not chosen.host_bytes:
        return ""
    return (
        f"host memory: {format_bytes(chosen.host_bytes)} per rank for what waits there or is saved"
        " from there; interpreter, torch and the loader's workers are not counted"
    )


def describe_ignored_keys(job: Job, chosen: Candidate) -> list[str]:
    """A line for the keys that were set for another layout than `chosen`, one for those that
    compile rules out."""
    layout = {"one": "one rank", "tp": "tp alone"}.get(chosen.name, chosen.name)
    if chosen.layout.pp > 1 and chosen.name != "pp":
        layout += " with pp"
    lines = [_describe_keys_without_effect(job, _list_ignored_keys(chosen), f"under {layout}")]
    if (
        job.parallel.zero_stage
        and chosen.layout.gradient_reduction_layout.dp_shard == 1
        and chosen.layout.world_size > 1
    ):
        problem = f"parallel.zero_stage={job.parallel.zero_stage} shards nothing"
        lines.append(f"{problem}: {layout} leaves no ranks to shard over")
    if chosen.layout.tp == 1:
        lines.append(_describe_keys_without_effect(job, ("rules",), "without parallel.tp"))
    elif job.train.compile:
        lines.append(_describe_keys_without_effect(job, ("tp_chunks",), "under train.compile"))
    return [line for line in lines if line]


def _list_ignored_keys(chosen: Candidate) -> tuple[str, ...]:
    """The keys of [parallel] that a layout does not read, each once."""
    ignored: list[str] = []
    if chosen.zero_stage < 2:
        ignored += SHARDING_ONLY_KEYS
    if chosen.zero_stage > 0 or chosen.layout.gradient_reduction_layout.data_parallel_size == 1:
        ignored += DDP_ONLY_KEYS
    if chosen.layout.pp > 1:
        ignored += KEYS_IGNORED_IN_PIPELINES
    return tuple(dict.fromkeys(ignored))


def _describe_keys_without_effect(job: Job, keys: Sequence[str], where: str) -> str:
    """A line on those of `keys` that the job sets to anything but their default; "" if none is."""
    changed = []
    for key in keys:
        default = Parallel.model_fields[key].get_default(call_default_factory=True)
        if getattr(job.parallel, key) != default:
            changed.append(f"parallel.{key}")
    if not changed:
        return ""
    verb = "have"
    if len(changed) == 1:
        verb = "has"
    return f"{', '.join(changed)} {verb} no effect {where}"


def list_cp_notes(job: Job, shape: ModelCosts, work: Workload) -> list[str]:
    """Lines of a plan about context parallelism."""
    if work.cp == 1:
        return []
    how = {
        "zigzag": "an early and a late chunk each, so that all have equal work",
        "none": "one run of tokens each",
    }
    lines = [
        f"cp: {work.cp} ranks have {job.data.seq_len // work.cp} of each sequence's"
        f" {job.data.seq_len} tokens, {how[choose_cp_load_balance(job).value]}; {work.cp_attention}"
        " attention"
    ]
    if shape.heads is not None:
        sent = format_bytes(cp_sent_bytes_per_step(shard_shape(shape, work.tp, work.rules), work))
        lines[0] += f" sends {sent} per rank and step"
    if (
        job.parallel.cp_attention == "ulysses"
        and job.parallel.cp_load_balance != choose_cp_load_balance(job).value
    ):
        lines.append(
            "cp_load_balance is left to ulysses, which has equal work with one run of tokens each"
        )
    return lines


def list_ep_notes(job: Job, evaluator: CandidateEvaluator, chosen: Candidate) -> list[str]:
    """Lines of a plan about experts."""
    experts, work = evaluator.shape.experts, evaluator.work
    if experts is None or evaluator.num_ranks == 1:
        return []
    if work.ep == 1:
        return list(filter(None, [_suggest_expert_parallel(job, evaluator, chosen)]))
    shard = shard_shape(evaluator.shape, work.tp, work.rules)
    rest = chosen.layout.gradient_reduction_layout.dp_shard // work.ep
    lies = "not split further"
    if chosen.zero_stage == 0:
        lies = "whole"
    elif rest > 1:
        lies = f"split over {rest} ranks"
    sent = format_bytes(ep_sent_bytes_per_step(shard, work))
    return [
        (
            f"ep: each of {work.ep} ranks has {experts.count // work.ep} of a block's"
            f" {experts.count} experts, {lies}; rows of tokens travel to them and back, {sent}"
            " per rank and step where experts get equally many"
        ),
        f"zero1 is left out: with ep, {EXPERT_REDUCTION_REASON}",
    ]


def _suggest_expert_parallel(job: Job, evaluator: CandidateEvaluator, chosen: Candidate) -> str:
    """A line on what parallel.ep would save, if it can be set and is worth a line; else ""."""
    # The largest that stays within a node saves most.
    degree = max(
        (ep for ep in list_ep_degrees(job, evaluator, chosen) if ep <= MAX_PROPOSED_EP), default=1
    )
    if degree == 1:
        return ""
    work = replace(evaluator.work, ep=degree)
    shards = chosen.layout.gradient_reduction_layout.dp_shard
    saved = chosen.total_bytes - sum(
        replace(evaluator, work=work).predict_memory(chosen.zero_stage, shards).values()
    )
    if saved < MIN_SAVED_MEMORY_SHARE * chosen.total_bytes:
        return ""
    shard = shard_shape(evaluator.shape, work.tp, work.rules)
    assert shard.experts is not None
    size = format_bytes(shard.experts.params_of_block * 4)
    verb = "gathers"
    if chosen.zero_stage < 2:
        verb = "holds"
    sent = format_bytes(ep_sent_bytes_per_step(shard, work))
    return (
        f"experts: each rank {verb} all {shard.experts.count} of a block, {size} in fp32;"
        f" parallel.ep={degree} would save {format_bytes(saved)} per rank and send {sent} per rank"
        " and step"
    )


def list_compression_notes(job: Job, shape: ModelCosts, ranks: int) -> list[str]:
    reasons = []
    compress = job.parallel.compress
    if compress != "none" and ranks > 1:
        line = f"gradients travel as {_describe_compression(job)}: not what one process computes"
        if has_error_feedback(compress):
            size = format_bytes(4 * shape.num_params)
            line += (
                f"; what is not sent is added to the next step's, {size} more per rank and in every"
                " checkpoint"
            )
        reasons.append(line)
    if job.precision.compute == "fp16":
        scale = job.precision.loss_scale
        if scale == "dynamic":
            how = f"begins at {job.precision.loss_scale_initial:g} and adapts"
        else:
            how = f"is {scale:g}"
        reasons.append(
            f"fp16 ends at 65504, so the loss is scaled: the scale {how}; bf16 needs none"
        )
    return reasons


def _describe_compression(job: Job) -> str:
    parallel = job.parallel
    return {
        "int8": "int8 with a scale for each 256",
        "topk": f"their largest {parallel.compress_fraction:.3g} of elements",
        "powersgd": f"products of matrices of rank {parallel.compress_rank}",
    }.get(parallel.compress, parallel.compress)


def list_headroom_notes(job: Job, cluster: Cluster, num_ranks: int) -> list[str]:
    """A line of a plan for GPUs on the memory that is not planned with."""
    if cluster.device == "cpu":
        return []
    room, count = choose_headroom(cluster.device), count_communicators(job.parallel, num_ranks)
    of_groups = ""
    if count:
        of_groups = f" and {count} x {format_bytes(room.communicator_bytes)} of communicators"
    memory = format_bytes(rank_memory_bytes(job, cluster, num_ranks))
    return [
        f"memory: {room.share:.0%} of a GPU's {memory}, less {format_bytes(room.runtime_bytes)} of"
        f" its context{of_groups}, is planned with; this has not been measured on a GPU"
    ]
