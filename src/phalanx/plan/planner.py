"""From a job to a plan: layout, microbatches, memory per rank, and the reasons. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from phalanx.core.errors import DataError, LayoutError, UsageError
from phalanx.core.units import plural
from phalanx.job.costs import ModelCosts
from phalanx.job.learning_rate import resolve_peak_learning_rate
from phalanx.job.load import require_job
from phalanx.job.model import measure_or_build_model_shape
from phalanx.job.schema import Job
from phalanx.plan.candidates import (
    CandidateEvaluator,
    choose_candidate,
    evaluate_candidates,
    explain_candidate,
)
from phalanx.plan.choice import Choice
from phalanx.plan.cluster import Cluster, rank_capacity_bytes
from phalanx.plan.degree_checks import check_model_parallel_degrees
from phalanx.plan.degrees import (
    choose_collectives,
    choose_cp_load_balance,
    choose_dp_replicate,
    choose_dp_shard,
    choose_micro_batch_size_and_count,
    choose_num_ranks,
)
from phalanx.plan.described_cluster import choose_cluster_of_job
from phalanx.plan.host_memory import predict_offloaded_bytes, require_host_memory
from phalanx.plan.leaf_tree import LAYOUT_FREE, require_layout_free_is_possible
from phalanx.plan.notes import list_headroom_notes, list_plan_notes
from phalanx.plan.pipeline.requested_schedule import find_requested_schedule
from phalanx.plan.pipeline.stages import list_pipeline_choices, plan_pipeline_and_microbatches
from phalanx.plan.plan import ActivationPolicy, Candidate, LossScaling, Plan, compute_job_digest
from phalanx.plan.precision import (
    require_fp8_is_possible,
    require_gpus_multiply,
    resolve_precision,
)
from phalanx.plan.recompute import plan_recompute
from phalanx.plan.resolved_parallel import ResolvedParallel, resolve_parallel
from phalanx.plan.segments import Segment
from phalanx.plan.start import describe_start_of_whole_module
from phalanx.plan.warnings import (
    NO_EXTRA_REASONS_OR_WARNINGS,
    DataFacts,
    ExtraReasonsAndWarnings,
    describe_partial_epoch_batch,
    list_early_warnings,
)
from phalanx.plan.workload import build_workload, require_trained_parameters


def make_plan(
    job: Job,
    *,
    cluster: Cluster | None = None,
    vocab_size: int | None = None,
    num_ranks: int | None = None,
    shape: ModelCosts | None = None,
    data: DataFacts | None = None,
    more: ExtraReasonsAndWarnings = NO_EXTRA_REASONS_OR_WARNINGS,
    is_explained: bool = True,
    weighs_alternatives: bool = True,
) -> Plan:
    """Choose the simplest layout that fits and say why.

    `shape` saves describing a user's own module again, which takes another process a few seconds.
    `vocab_size` comes from the data when the job leaves it open; `num_ranks` is fixed when ranks
    run already (under another launcher); `data`, once it is known, is what some warnings are about;
    `more` is what others have to say of the job, which the plan keeps. Without `is_explained` the
    plan has no notes and no warnings, of which some simulate other schedules: a search makes a
    dozen plans that nobody reads. Without `weighs_alternatives` it has the layout that the job
    fixes and no other, and an error names no way out. Raises LayoutError (exit 3) for ranks or
    batches that do not divide, naming the nearest that do, and for a layout that was asked for and
    cannot fit.
    """
    require_job(job)
    if num_ranks is not None and (not isinstance(num_ranks, int) or num_ranks < 1):
        raise UsageError(f"num_ranks={num_ranks!r}: a number of at least 1 is needed")
    cluster = cluster or choose_cluster_of_job(job)
    precision_is_auto = job.precision.compute == "auto"  # afterwards the job names a type
    job, why_precision = resolve_precision(job, cluster)
    require_gpus_multiply(job, cluster)
    if shape is None:
        shape = measure_or_build_model_shape(job, vocab_size)
    # Before a layout is looked for: what the model cannot train or read no layout mends.
    require_trained_parameters(shape)
    _require_large_enough_vocabulary(shape, vocab_size)
    _require_enough_positions(shape, job.data.seq_len)
    _require_document_masks(job, shape)
    ranks = choose_num_ranks(job, cluster, num_ranks)
    _require_min_ranks(job, ranks.value)
    reasons = [ranks.why]
    evaluator = _build_evaluator(job, shape, cluster, ranks.value, reasons)
    candidates = evaluate_candidates(job, evaluator, weighs_alternatives=weighs_alternatives)
    chosen, why_chosen = choose_candidate(job, candidates, evaluator, advises=weighs_alternatives)
    host_bytes = predict_offloaded_bytes(evaluator, chosen)
    require_host_memory(cluster, ranks.value, host_bytes)
    reasons += why_chosen
    alternatives = [
        explain_candidate(candidate, chosen, evaluator.capacity_bytes, reasons[-1])
        for candidate in candidates
    ]
    index = next(index for index, candidate in enumerate(alternatives) if candidate.chosen)
    chosen = alternatives[index] = replace(alternatives[index], host_bytes=host_bytes)
    parallel = _resolve_parallel(job, evaluator, ranks, chosen)
    why_start = describe_start_of_whole_module(shape, cluster, chosen)
    if is_explained:
        reasons += [
            *filter(None, [why_precision]),
            *list_plan_notes(job, evaluator, chosen, parallel.reasons),
            *filter(None, [why_start]),
            *more.reasons,
            *list_headroom_notes(job, cluster, ranks.value),
        ]
    # In three steps, as each looks at the plan so far: reasons of values, then warnings.
    plan = _build_plan_without_warnings(job, evaluator, alternatives, reasons, vocab_size)
    plan = replace(
        plan,
        parallel=parallel,
        precision_is_auto=precision_is_auto,
        peak_flops_per_s=_find_peak_flops_per_s(cluster, plan.precision),
    )
    plan = replace(plan, value_reasons=_list_value_reasons(job, plan, why_precision))
    if not is_explained:
        return plan
    ends = describe_partial_epoch_batch(job, plan, data)
    return replace(
        plan,
        reasons=(*reasons, *filter(None, [ends])),
        warnings=(*list_early_warnings(job, plan, data), *more.warnings),
    )


def _build_evaluator(
    job: Job, shape: ModelCosts, cluster: Cluster, ranks: int, reasons: list[str]
) -> CandidateEvaluator:
    """The evaluator for a job on `ranks` ranks of which each has its work and its stages; adds
    what must be said of these to `reasons`."""
    # Before the batch is split: of a degree that cannot be, no nearest batch is worth a word.
    check_model_parallel_degrees(job, shape, ranks)
    degrees = job.parallel.degrees
    requested = find_requested_schedule(job)
    micro, num_microbatches = choose_micro_batch_size_and_count(
        job, ranks // degrees.model_parallel_size, requested
    )
    if job.train.deterministic == LAYOUT_FREE:
        require_layout_free_is_possible(job, shape, cluster.device, ranks)
    work = build_workload(
        job,
        shape,
        micro_batch_size=micro,
        num_microbatches=num_microbatches,
        tp=degrees.tp,
        cp=degrees.cp,
        ep=degrees.ep,
    )
    require_fp8_is_possible(work, cluster.device, tokens_are_known=shape.activations is not None)
    pipeline = None
    if requested is not None:
        work, pipeline = plan_pipeline_and_microbatches(job, shape, requested, work, ranks, reasons)
    else:
        work = plan_recompute(job, shape, work, reasons)
    capacity_bytes = rank_capacity_bytes(job, cluster, ranks)
    return CandidateEvaluator(shape, work, ranks, capacity_bytes, cluster.device, pipeline)


def _require_enough_positions(shape: ModelCosts, seq_len: int) -> None:
    """Raises LayoutError for sequences longer than the positions of a measured module; the shapes
    of built-in models are checked while loading."""
    if 0 < shape.longest_sequence < seq_len:
        raise LayoutError(
            f"sequences of {seq_len} tokens, and the model has {shape.longest_sequence} positions",
            fix=f"data.seq_len at most {shape.longest_sequence}",
        )


def _require_document_masks(job: Job, shape: ModelCosts) -> None:
    """Raises LayoutError for data.document_masks with a module that cannot honour them, which every
    rank would refuse."""
    acceptance = shape.takes_document_ids
    if job.data.document_masks and acceptance != "by name":
        raise LayoutError(
            f"model {job.model.kind!r} cannot keep documents apart: its forward names no"
            " document_ids",
            why=(
                "it takes any keyword, which does not say that it masks attention by this one"
                if acceptance != "no"
                else None
            ),
            fix="add the argument and mask attention with it, or leave data.document_masks out",
        )


def _require_min_ranks(job: Job, num_ranks: int) -> None:
    """Raises LayoutError for a run of fewer ranks than resilience.min_ranks: it could never go on
    with fewer of them."""
    least = job.resilience.min_ranks
    if least is not None and num_ranks < least:
        raise LayoutError(
            f"resilience.min_ranks is {least}, and there are {plural(num_ranks, 'rank')}",
            fix=f"set it to {num_ranks} or less, or parallel.ranks to {least} or more",
        )


def _require_large_enough_vocabulary(shape: ModelCosts, vocab_size: int | None) -> None:
    if vocab_size and 0 < shape.vocab_size < vocab_size:
        raise DataError(
            f"the data has a vocabulary of {vocab_size} tokens and the model one of"
            f" {shape.vocab_size}",
            fix=f"set model.vocab_size={vocab_size}, or use the tokenizer of the model",
        )


def _build_plan_without_warnings(
    job: Job,
    evaluator: CandidateEvaluator,
    alternatives: Sequence[Candidate],
    reasons: Sequence[str],
    vocab_size: int | None,
) -> Plan:
    """The plan without its warnings, which look at the rest."""
    shape, work = evaluator.shape, evaluator.work
    chosen = next(candidate for candidate in alternatives if candidate.chosen)
    return Plan(
        job_digest=compute_job_digest(job),
        layout=chosen.layout,
        device=evaluator.device,
        precision=job.precision.compute,
        activations=ActivationPolicy(
            job.train.recompute,
            job.train.recompute_every or 1,
            work.segments or (),
            job.train.offload_activations,
        ),
        compile=job.train.compile,
        seed=job.run.seed,
        global_batch_size=job.train.global_batch_size,
        micro_batch_size=work.micro_batch_size,
        num_microbatches=work.num_microbatches,
        seq_len=work.seq_len,
        peak_lr=resolve_peak_learning_rate(job).lr,
        vocab_size=shape.choose_vocab_size(vocab_size),
        num_params=shape.num_params,
        flops_per_token=_get_training_flops_per_token(shape, job.data.seq_len),
        hardware_flops_per_token=_count_hardware_flops_per_token(shape, job, work.segments or ()),
        capacity_bytes=evaluator.capacity_bytes,
        alternatives=tuple(alternatives),
        reasons=tuple(reasons),
        shape=shape.to_json(),
        pipeline=evaluator.build_pipeline_with_memory(chosen),
        loss_scaling=choose_loss_scaling(job),
        is_layout_free=job.train.deterministic == LAYOUT_FREE,
    )


def _find_peak_flops_per_s(cluster: Cluster, precision: str) -> float | None:
    """FLOP/s of products by the data sheet of the cluster's devices; None where none is known."""
    if cluster.accelerator is None:
        return None
    # Scales by block cost no products.
    return cluster.accelerator.peak_flops(precision.removeprefix("mx")) or None


def _get_training_flops_per_token(shape: ModelCosts, seq_len: int) -> int | None:
    flops = shape.flops_per_token(seq_len)
    if flops is None:
        return None
    return flops["training"]


def _count_hardware_flops_per_token(
    shape: ModelCosts, job: Job, segments: Sequence[Segment]
) -> float | None:
    """FLOPs of a token's training as it is computed: blocks that are recomputed in full do their
    forward again. What is recomputed selectively has no products."""
    seq_len = job.data.seq_len
    training, flops = _get_training_flops_per_token(shape, seq_len), shape.flops(seq_len)
    if training is None or flops is None:
        return None
    recomputed_flops = 0
    for segment in segments:
        if segment.mode == "full":
            recomputed_flops += sum(
                block.forward for block in flops.blocks[segment.start : segment.stop]
            )
    return training + round(recomputed_flops / shape.count_sample_tokens(seq_len))


def _resolve_parallel(
    job: Job, evaluator: CandidateEvaluator, ranks: Choice[int], chosen: Candidate
) -> ResolvedParallel:
    """The keys of [parallel] with the values that the plan's choices give them."""
    why_stage = chosen.why
    if chosen.zero_stage == 0:  # and `chosen.why` says why whole copies are enough
        why_stage = "nothing is sharded"
    choices: dict[str, Choice[Any]] = {
        "ranks": ranks,
        "dp_replicate": choose_dp_replicate(chosen.layout),
        "dp_shard": choose_dp_shard(chosen.layout, chosen.zero_stage),
        "zero_stage": Choice(chosen.zero_stage, why_stage),
        "cp_load_balance": choose_cp_load_balance(job),
        "collectives": choose_collectives(job, evaluator.device, ranks.value),
    }
    pipeline = evaluator.build_pipeline_with_memory(chosen)
    return resolve_parallel(
        job.parallel, choices | list_pipeline_choices(job, evaluator.shape, pipeline)
    )


def _list_value_reasons(job: Job, plan: Plan, why_precision: str) -> dict[str, str]:
    """Why the keys outside [parallel] have the values that the plan chose for them; of a key that
    the job sets, nothing."""
    reasons = {}
    if job.train.micro_batch_size is None:
        reasons["train.micro_batch_size"] = _explain_micro_batch_size(plan)
    if plan.precision_is_auto:
        # The note begins with the type itself, which stands beside this reason anyway.
        note = why_precision.partition(": ")[2]
        reasons["precision.compute"] = note or "CPUs compute in it unless told otherwise"
    is_cuda = plan.device == "cuda"
    if job.cluster.device == "auto":
        reasons["cluster.device"] = "there are GPUs" if is_cuda else "there is no GPU"
    if job.cluster.memory_gib is None:
        whose = f"this machine's / {plural(plan.world_size, 'rank')}"
        if is_cuda:
            whose = "a GPU's, of the one that has least"
        reasons["cluster.memory_gib"] = whose
    return reasons


def _explain_micro_batch_size(plan: Plan) -> str:
    if plan.pipeline is not None:
        microbatches = plural(plan.num_microbatches, "microbatch", "microbatches")
        return f"makes {microbatches} for {plan.pipeline.num_ranks} ranks in a pipeline"
    readers = plural(plan.layout.data_parallel_size, "rank")
    return f"the whole share of a rank: {plan.global_batch_size} / {readers}"


def choose_loss_scaling(job: Job) -> LossScaling | None:
    """The way in which a job's loss is scaled: with fp16 alone, which holds no small gradients."""
    precision = job.precision
    if precision.compute != "fp16":
        return None
    if precision.loss_scale == "dynamic":
        return LossScaling(precision.loss_scale_initial, precision.loss_scale_growth_steps)
    return LossScaling(precision.loss_scale)
