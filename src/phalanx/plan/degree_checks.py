"""Checks that a model can have the degrees that its job asks for. Torch-free.

Each raises LayoutError with the nearest degree that can be, or with the key that is in the way.
"""

from __future__ import annotations

from collections.abc import Callable

from phalanx.core.errors import LayoutError
from phalanx.job.checks.experts import (
    check_experts_have_no_conflicts,
    explain_undivided_ranks,
    find_expert_parallel_problem,
    find_ranks_for_experts,
)
from phalanx.job.costs import ModelCosts
from phalanx.job.hugging_face import is_hugging_face
from phalanx.job.nearest import format_nearest_multiples, format_nearest_values, list_divisors
from phalanx.job.schema import Job
from phalanx.plan.degrees import choose_cp_load_balance
from phalanx.plan.rule_checks import combine_and_check_rules, require_consistent_rules
from phalanx.plan.rules import describe_heads, list_legal_tp_degrees
from phalanx.plan.workload import cuts_sequence

DegreeCheck = Callable[[Job, ModelCosts], None]


def check_model_parallel_degrees(job: Job, shape: ModelCosts, num_ranks: int) -> None:
    """Raises LayoutError for degrees of tp, cp and ep that the model, or other keys, forbid."""
    # Compression first: what it names as in the way may be the degree that is looked at next.
    check_gradient_compression(job, num_ranks)
    check_tensor_parallel(job, shape)
    check_context_parallel(job, shape)
    check_expert_parallel(job, shape, num_ranks)


def check_tensor_parallel(job: Job, shape: ModelCosts) -> None:
    """Raises LayoutError for a tp that the model's heads forbid, naming the nearest they allow."""
    tp = job.parallel.degrees.tp
    heads = shape.heads
    if tp == 1 or heads is None:
        # Rules are read even where they have no effect, so that a mistake is not kept for later.
        combine_and_check_rules(job.parallel.rules, shape, tp)
        return
    legal = list_legal_tp_degrees(heads.queries, heads.keys)
    if tp not in legal:
        raise LayoutError(
            f"parallel.tp {tp} does not divide {describe_heads(heads.queries, heads.keys)}",
            fix=f"nearest: {format_nearest_values(tp, legal)}",
        )
    if job.parallel.sequence_parallel and shape.is_per_token_outside_regions is False:
        raise LayoutError(
            f"a {shape.kind} cannot do with a part of its sequence: it pools all of it",
            fix="leave parallel.sequence_parallel out",
        )
    rules = combine_and_check_rules(job.parallel.rules, shape, tp)
    if job.parallel.rules:
        require_consistent_rules(rules, shape, tp, cuts_sequence=cuts_sequence(job, shape))


def check_context_parallel(job: Job, shape: ModelCosts) -> None:
    """Raises LayoutError for a cp that the model, the objective or other keys forbid."""
    if job.parallel.degrees.cp > 1:
        for check in CONTEXT_PARALLEL_CHECKS:
            check(job, shape)


def _check_sequence_can_be_split(job: Job, shape: ModelCosts) -> None:
    if shape.why_samples_stay_whole:
        raise LayoutError(
            f"parallel.cp {job.parallel.cp} cuts sequences of tokens, and"
            f" {shape.why_samples_stay_whole}",
            fix="leave parallel.cp out",
        )


def _check_attention_is_replaceable(job: Job, shape: ModelCosts) -> None:
    if is_hugging_face(job.model.kind):
        raise LayoutError(
            f"parallel.cp {job.parallel.cp} needs an attention that asks other ranks for their keys"
            " and values, and those of Hugging Face have no such seam",
            fix="leave parallel.cp out, or see docs/context-parallel.md for the seam",
        )
    if not shape.has_attention_seam:
        raise attention_not_replaceable_error(shape.kind)


def attention_not_replaceable_error(model: str) -> LayoutError:
    """The error for context parallelism of a model that does not show its attention."""
    return LayoutError(
        f"parallel.cp needs a model whose attention can be swapped, and {model} has no such seam",
        fix="leave parallel.cp out, or see docs/context-parallel.md for the seam",
    )


def _check_objective_is_builtin(job: Job, shape: ModelCosts) -> None:
    if job.model.objective is not None:
        raise LayoutError(
            f"parallel.cp {job.parallel.cp} gives an objective a part of each sequence, and nobody"
            " knows if yours can do with it",
            fix="leave model.objective or parallel.cp out",
        )


def _check_blocks_are_not_compiled(job: Job, shape: ModelCosts) -> None:
    if job.train.compile:
        raise LayoutError(
            "parallel.cp sends keys and values from inside of attention, which train.compile cannot"
            " compile",
            fix="set train.compile=false",
        )


def _check_no_compression_with_cp(job: Job, shape: ModelCosts) -> None:
    # Ranks of cp reduce gradients as more of dp_shard, where no hook of DDP runs.
    if job.parallel.compress != "none":
        raise LayoutError(
            f"parallel.compress={job.parallel.compress} is for ddp alone, and the job has context"
            " parallelism",
            fix="set parallel.cp=1, or parallel.compress=none",
        )


def _check_cp_chunks_divide_sequence(job: Job, shape: ModelCosts) -> None:
    chunks = job.parallel.degrees.cp
    if choose_cp_load_balance(job).value == "zigzag":
        chunks *= 2  # each rank has an early and a late one
    if job.data.seq_len % chunks:
        raise LayoutError(
            f"parallel.cp {job.parallel.cp} cuts a sequence into {chunks} chunks, which do not"
            f" divide data.seq_len {job.data.seq_len}",
            fix=f"nearest seq_len: {format_nearest_multiples(job.data.seq_len, chunks)}",
        )


def _check_ulysses_divides_heads(job: Job, shape: ModelCosts) -> None:
    if job.parallel.cp_attention != "ulysses" or shape.heads is None:
        return
    cp, tp = job.parallel.degrees.cp, job.parallel.degrees.tp
    # With more ranks of tp than key heads, several ranks hold the same one.
    heads, kv_heads = shape.heads.queries // tp, max(1, shape.heads.keys // tp)
    if heads % cp == 0 and kv_heads % cp == 0:
        return
    described = describe_heads(heads, kv_heads)
    if tp > 1:
        described += f" on each of the {tp} ranks of tp"
    fix = "set parallel.cp_attention=ring"
    if legal := [degree for degree in list_divisors(kv_heads) if degree > 1]:
        fix = f"nearest: {format_nearest_values(cp, legal)}, or parallel.cp_attention=ring"
    raise LayoutError(
        f"parallel.cp {cp} does not divide {described}, as ulysses needs",
        fix=fix,
    )


# In this order: what no edit of the job could mend comes first, and what one number would, last.
CONTEXT_PARALLEL_CHECKS: tuple[DegreeCheck, ...] = (
    _check_sequence_can_be_split,
    _check_attention_is_replaceable,
    _check_objective_is_builtin,
    _check_blocks_are_not_compiled,
    _check_no_compression_with_cp,
    _check_cp_chunks_divide_sequence,
    _check_ulysses_divides_heads,
)


def check_expert_parallel(job: Job, shape: ModelCosts, num_ranks: int) -> None:
    """Raises LayoutError for an ep that experts, ranks or other keys forbid.

    The job's own checks say the same where the job alone decides; here ranks and shape are known.
    """
    ep = job.parallel.degrees.ep
    if ep == 1:
        return
    size, description = find_ranks_for_experts(job, num_ranks) or (
        num_ranks,
        f"the {num_ranks} ranks",
    )
    wrong = find_expert_parallel_problem(ep, shape, size)
    if wrong is not None:
        raise LayoutError(f"parallel.{wrong[0]}", fix=wrong[1])
    # A plan has one error; the job's checks, which say all, ran while it was loaded.
    for finding in check_experts_have_no_conflicts.run(job):
        raise LayoutError(f"{'.'.join(map(str, finding.path))}: {finding.what}", fix=finding.fix)
    if size % ep:
        problem, fix = explain_undivided_ranks(job, shape, size, description)
        raise LayoutError(f"parallel.{problem}", fix=fix)


def check_gradient_compression(job: Job, num_ranks: int) -> None:
    """Raises LayoutError where gradients are to be compressed that DDP does not reduce."""
    parallel = job.parallel
    if parallel.compress == "none":
        return
    if parallel.degrees.tp > 1:
        raise LayoutError(
            f"parallel.compress={parallel.compress} is for ddp, and the job has tensor parallelism",
            why="ranks that hold a weight alike would have to keep the same error of it",
            fix="set parallel.tp=1, or parallel.compress=none",
        )
    # Left open, dp_replicate is all ranks: that is ddp.
    copies = parallel.dp_replicate or num_ranks
    if parallel.degrees.dp_shard > 1 or parallel.zero_stage or copies < num_ranks:
        raise LayoutError(
            f"parallel.compress={parallel.compress} is for ddp, and the job shards the model",
            why=(
                "FSDP scatters gradients in fp32; its reduction has no place for a hook that keeps"
                " an error"
            ),
            fix=f"set parallel.dp_replicate={num_ranks} alone, or parallel.compress=none",
        )
