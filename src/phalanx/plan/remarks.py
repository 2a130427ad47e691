"""What a plan says besides its choice: what follows from the job and might surprise its owner.

Torch-free.
"""

from __future__ import annotations

from phalanx.core.units import format_bytes
from phalanx.job.model import what_follows
from phalanx.job.rate import peak_rate
from phalanx.job.schema import Job
from phalanx.plan.context import context_reasons
from phalanx.plan.coverage import check_rules, whole_by_default
from phalanx.plan.experts import expert_reasons
from phalanx.plan.lossy import lossy_reasons
from phalanx.plan.memory import activation_bytes, of_one_rank
from phalanx.plan.pipeline.words import pipeline_reasons
from phalanx.plan.plan import Candidate
from phalanx.plan.unread import without_effect
from phalanx.plan.weigh import Weighing


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
