"""Notes of a plan besides its choice: what follows from the job and might surprise its owner, one
line each.

Torch-free.
"""

from __future__ import annotations

from dataclasses import replace

from phalanx.core.units import format_bytes
from phalanx.job import counts
from phalanx.job.checks.experts import WHY
from phalanx.job.learning_rate import peak_rate
from phalanx.job.model import what_follows
from phalanx.job.schema import Job, Parallel
from phalanx.job.shape import ModelShape
from phalanx.plan.candidates import Weighing, degrees_for
from phalanx.plan.cluster import Cluster, communicators_of, headroom_of, whole_of
from phalanx.plan.communication import (
    cp_bytes_per_step,
    ep_bytes_per_step,
)
from phalanx.plan.degrees import load_balance
from phalanx.plan.explain import pipeline_reasons
from phalanx.plan.memory import activation_bytes
from phalanx.plan.plan import Candidate
from phalanx.plan.rule_checks import check_rules, whole_by_default
from phalanx.plan.workload import Workload, keeps_error, of_one_rank

SHARDED_KEYS = ("accumulate", "blocks_per_unit", "keep_whole_below", "prefetch")  # ZeRO 2 and 3
DDP_KEYS = ("static_graph",)
# Of a pipeline: a stage is gathered whole for a step, and a parameter without a gradient counts as
# zero.
PIPELINE_KEYS = ("blocks_per_unit", "prefetch", "static_graph", "unused_parameters")
MOST_PROPOSED = 8  # ranks of one node: rows of every token travel in every block
WORTH_SHARE = 0.05  # of a rank's memory: what spreading experts must save to be worth a line


def remarks(job: Job, weighing: Weighing, chosen: Candidate) -> list[str]:
    """One line each."""
    shape, work = weighing.shape, weighing.work
    said = [*what_follows(job.model), *without_effect(job, chosen)]
    if work.tp > 1:
        said += _of_tensor_parallelism(job, weighing)
    said += context_reasons(job, shape, work)
    said += expert_reasons(job, weighing, chosen)
    pipeline = weighing.pipeline_of(chosen)
    if pipeline is not None:
        said += pipeline_reasons(job, shape, work, pipeline)
    if not shape.is_known:
        cut = ", as sharding rules cut them" if work.tp > 1 else ""
        said.append(
            f"memory of your own model counts weights, gradients and optimizer{cut}; activations,"
            " logits and what is gathered are not predicted"
        )
    said.append(_of_the_copy(weighing))
    said += lossy_reasons(job, shape, weighing.num_ranks)
    if work.offloads_activations and shape.is_known and weighing.device == "cuda":
        size = format_bytes(activation_bytes(of_one_rank(shape, work.tp, work.rules), work))
        said.append(f"activations wait for the backward in pinned host memory, {size} per rank")
    said.append(peak_rate(job).why or "")
    return [line for line in said if line]


def _of_tensor_parallelism(job: Job, weighing: Weighing) -> list[str]:
    shape, work, asked = weighing.shape, weighing.work, job.parallel.sequence_parallel
    lines = [whole_by_default(check_rules(job.parallel.rules, shape, work.tp), shape)]
    if work.cuts_sequence:
        how = "cut between regions (sequence parallelism)"
    elif asked is False:
        how = "whole on every rank, as the job says"
    elif shape.is_known:
        how = f"whole on every rank: a {shape.kind} cannot do with a part of it"
    else:
        how = (
            "cut between regions if the module says that it can (is_per_token_outside_regions),"
            " else whole"
        )
    lines.append(f"tp: the sequence is {how}")
    if job.parallel.rules and shape.is_known:
        lines.append(
            "memory is predicted for the model's own sharding rules, not for what parallel.rules"
            " replaces"
        )
    return lines


def _of_the_copy(weighing: Weighing) -> str:
    if not weighing.work.copies_state:
        return ""
    size = weighing.staging_bytes()
    where = "pinned host memory" if weighing.device == "cuda" else "memory"
    return (
        f"training goes on while it is saved, from a copy of the state: {format_bytes(size)} of"
        f" {where} per rank; checkpoint.asynchronous=false does without"
    )


def without_effect(job: Job, chosen: Candidate) -> list[str]:
    """A line for the keys that were set for another layout than `chosen`, one for those that
    compile rules out."""
    stage = chosen.zero_stage
    is_ddp = stage == 0 and chosen.layout.reduced.data_parallel_size > 1
    layout = (
        "one rank" if chosen.name == "one" else {"tp": "tp alone"}.get(chosen.name, chosen.name)
    )
    unread = [*(SHARDED_KEYS if stage < 2 else ()), *(() if is_ddp else DDP_KEYS)]
    if chosen.layout.pp > 1:
        layout = "pp" if chosen.name == "pp" else f"{layout} with pp"
        unread = list(dict.fromkeys((*unread, *PIPELINE_KEYS)))
    lines = [line for line in (_line(job, unread, f"under {layout}"),) if line]
    if (
        job.parallel.zero_stage
        and chosen.layout.reduced.dp_shard == 1
        and chosen.layout.world_size > 1
    ):
        said = f"parallel.zero_stage={job.parallel.zero_stage} shards nothing"
        lines.append(f"{said}: {layout} leaves no ranks to shard over")
    if chosen.layout.tp == 1:
        lines += [line for line in (_line(job, ("rules",), "without parallel.tp"),) if line]
    elif job.train.compile:
        lines += [line for line in (_line(job, ("tp_chunks",), "under train.compile"),) if line]
    return lines


def _line(job: Job, keys: tuple[str, ...] | list[str], where: str) -> str:
    fields = Parallel.model_fields
    found = [
        key
        for key in keys
        if getattr(job.parallel, key) != fields[key].get_default(call_default_factory=True)
    ]
    if not found:
        return ""
    return (
        f"{', '.join(f'parallel.{key}' for key in found)} {'has' if len(found) == 1 else 'have'} no"
        f" effect {where}"
    )


def context_reasons(job: Job, shape: ModelShape, work: Workload) -> list[str]:
    """Lines of a plan."""
    if work.cp == 1:
        return []
    how = {
        "zigzag": "an early and a late chunk each, so that all have equal work",
        "none": "one run of tokens each",
    }
    lines = [
        f"cp: {work.cp} ranks have {job.data.seq_len // work.cp} of each sequence's"
        f" {job.data.seq_len} tokens, {how[load_balance(job)]}; {work.cp_attention} attention"
    ]
    if shape.is_known:
        sent = format_bytes(cp_bytes_per_step(of_one_rank(shape, work.tp, work.rules), work))
        lines[0] += f" sends {sent} per rank and step"
    if job.parallel.cp_attention == "ulysses" and job.parallel.cp_load_balance != load_balance(job):
        lines.append(
            "cp_load_balance is left to ulysses, which has equal work with one run of tokens each"
        )
    return lines


def expert_reasons(job: Job, weighing: Weighing, chosen: Candidate) -> list[str]:
    """Lines of a plan."""
    shape, work = weighing.shape, weighing.work
    if not shape.num_expert_layers or weighing.num_ranks == 1:
        return []
    if work.ep == 1:
        return [line for line in (_if_spread(job, weighing, chosen),) if line]
    here = of_one_rank(shape, work.tp, work.rules)
    rest = chosen.layout.reduced.dp_shard // work.ep
    lies = (
        "whole"
        if chosen.zero_stage == 0
        else f"split over {rest} ranks"
        if rest > 1
        else "not split further"
    )
    sent = format_bytes(ep_bytes_per_step(here, work))
    return [
        (
            f"ep: each of {work.ep} ranks has {shape.num_experts // work.ep} of a block's"
            f" {shape.num_experts} experts, {lies}; rows of tokens travel to them and back, {sent}"
            " per rank and step where experts get equally many"
        ),
        f"zero1 is left out: with ep, {WHY}",
    ]


def _if_spread(job: Job, weighing: Weighing, chosen: Candidate) -> str:
    """What parallel.ep would save, where it can be set and is worth a line."""
    degree = max(
        (ep for ep in degrees_for(job, weighing, chosen) if ep <= MOST_PROPOSED), default=1
    )
    if degree == 1:
        return ""
    work = replace(weighing.work, ep=degree)
    shards = chosen.layout.reduced.dp_shard
    saved = chosen.total_bytes - sum(
        replace(weighing, work=work).memory(chosen.zero_stage, shards).values()
    )
    if saved < WORTH_SHARE * chosen.total_bytes:
        return ""
    whole = counts.experts_params(of_one_rank(weighing.shape, work.tp, work.rules))
    what = "holds" if chosen.zero_stage < 2 else "gathers"
    sent = format_bytes(ep_bytes_per_step(of_one_rank(weighing.shape, work.tp, work.rules), work))
    return (
        f"experts: each rank {what} all {weighing.shape.num_experts} of a block,"
        f" {format_bytes(whole * 4)} in fp32; parallel.ep={degree} would save {format_bytes(saved)}"
        f" per rank and send {sent} per rank and step"
    )


def lossy_reasons(job: Job, shape: ModelShape, ranks: int) -> list[str]:
    reasons = []
    compress = job.parallel.compress
    if compress != "none" and ranks > 1:
        line = f"gradients travel as {_in_words(job)}: not what one process computes"
        if keeps_error(compress):
            size = format_bytes(4 * shape.num_params)
            line += (
                f"; what is not sent is added to the next step's, {size} more per rank and in every"
                " checkpoint"
            )
        reasons.append(line)
    if job.precision.compute == "fp16":
        scale = job.precision.loss_scale
        how = (
            f"begins at {job.precision.loss_scale_initial:g} and adapts"
            if scale == "dynamic"
            else f"is {scale:g}"
        )
        reasons.append(
            f"fp16 ends at 65504, so the loss is scaled: the scale {how}; bf16 needs none"
        )
    return reasons


def _in_words(job: Job) -> str:
    parallel = job.parallel
    return {
        "int8": "int8 with a scale for each 256",
        "topk": f"their largest {parallel.compress_fraction:.3g} of elements",
        "powersgd": f"products of matrices of rank {parallel.compress_rank}",
    }.get(parallel.compress, parallel.compress)


def headroom_reasons(job: Job, cluster: Cluster, num_ranks: int) -> list[str]:
    """A line of a plan for GPUs."""
    if cluster.device == "cpu":
        return []
    room, count = headroom_of(cluster.device), communicators_of(job.parallel, num_ranks)
    of_groups = (
        f" and {count} x {format_bytes(room.communicator_bytes)} of communicators" if count else ""
    )
    whole = format_bytes(whole_of(job, cluster, num_ranks))
    return [
        f"memory: {room.share:.0%} of a GPU's {whole}, less {format_bytes(room.runtime_bytes)} of"
        f" its context{of_groups}, is planned with; this has not been measured on a GPU"
    ]
