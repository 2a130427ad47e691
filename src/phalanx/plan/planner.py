"""From a job to a plan: layout, microbatches, memory per rank, and the reasons. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from phalanx.core.batch import BYTE_VOCAB_SIZE
from phalanx.core.errors import DataError, LayoutError
from phalanx.job.learning_rate import peak_rate
from phalanx.job.model import shape_of
from phalanx.job.module_probe import foreign_shape
from phalanx.job.schema import Job
from phalanx.job.shape import ModelShape
from phalanx.plan.candidates import Weighing, candidates_of, choose, explained
from phalanx.plan.cluster import Cluster, capacity_of, detect_cluster
from phalanx.plan.degrees import (
    choose_ranks,
    context_parallel_degree,
    expert_parallel_degree,
    load_balance,
    require_whole_copies,
    split_batch,
    tensor_parallel_degree,
)
from phalanx.plan.notes import headroom_reasons, remarks
from phalanx.plan.pipeline.requested_schedule import asked_schedule
from phalanx.plan.pipeline.stages import sized_pipeline
from phalanx.plan.plan import Candidate, Plan, job_digest
from phalanx.plan.precision import require_fp8, resolve_precision
from phalanx.plan.recompute import with_recompute
from phalanx.plan.warnings import NOTHING_MORE, DataFacts, MoreRemarks, early_warnings, epoch_ends
from phalanx.plan.workload import work_of


def make_plan(
    job: Job,
    *,
    cluster: Cluster | None = None,
    vocab_size: int | None = None,
    num_ranks: int | None = None,
    shape: ModelShape | None = None,
    data: DataFacts | None = None,
    more: MoreRemarks = NOTHING_MORE,
) -> Plan:
    """Choose the simplest layout that fits and say why.

    `shape` saves describing a user's own module again, which takes another process a few seconds.
    `vocab_size` comes from the data when the job leaves it open; `num_ranks` is fixed when ranks
    run already (under another launcher); `data`, once it is known, is what some warnings are about;
    `more` is what others have to say of the job, which the plan keeps. Raises LayoutError (exit 3)
    for ranks or batches that do not divide, naming the nearest that do, and for a layout that was
    asked for and cannot fit.
    """
    cluster = cluster or detect_cluster(job.cluster.device)
    precision_is_auto = job.precision.compute == "auto"
    job, why_precision = resolve_precision(job, cluster)
    if shape is None:
        shape = foreign_shape(job) or shape_of(job, vocab_size or BYTE_VOCAB_SIZE)
    _require_vocabulary(shape, vocab_size)
    _require_positions(shape, job.data.seq_len)
    _require_masks(job, shape)
    ranks, why = choose_ranks(job, cluster, num_ranks)
    require_whole_copies(job, ranks)
    tp = tensor_parallel_degree(job, shape)
    cp = context_parallel_degree(job, shape, tp)
    ep = expert_parallel_degree(job, shape, ranks)
    asked = asked_schedule(job)
    micro, num_microbatches = split_batch(job, ranks // job.parallel.model_parallel_size, asked)
    work = work_of(
        job, shape, micro_batch_size=micro, num_microbatches=num_microbatches, tp=tp, cp=cp, ep=ep
    )
    require_fp8(work, cluster.device, is_known=shape.is_known)
    reasons = [why]
    pipeline = None
    if asked is not None:
        work, pipeline = sized_pipeline(job, shape, asked, work, ranks, reasons)
    else:
        work = with_recompute(job, shape, work, reasons)
    weighing = Weighing(
        shape, work, ranks, capacity_of(job, cluster, ranks), cluster.device, pipeline
    )
    candidates = candidates_of(job, weighing)
    chosen, of_choice = choose(job, candidates, weighing)
    reasons += of_choice
    alternatives = [explained(c, chosen, weighing.capacity_bytes, reasons[-1]) for c in candidates]
    reasons += [
        *filter(None, [why_precision]),
        *remarks(job, weighing, chosen),
        *more.reasons,
        *headroom_reasons(job, cluster, ranks),
    ]
    plan = _plan(job, weighing, alternatives, reasons, vocab_size)
    plan = replace(plan, precision_is_auto=precision_is_auto)
    ends = epoch_ends(job, plan, data)
    return replace(
        plan,
        reasons=(*reasons, ends) if ends else plan.reasons,
        warnings=(*early_warnings(job, plan, data), *more.warnings),
    )


def _require_positions(shape: ModelShape, seq_len: int) -> None:
    """Of what is measured; the shapes of our own are asked while loading."""
    if shape.measured is not None and not shape.reads_images and 0 < shape.max_positions < seq_len:
        raise LayoutError(
            f"sequences of {seq_len} tokens, and the model has {shape.max_positions} positions",
            fix=f"data.seq_len at most {shape.max_positions}",
        )


def _require_masks(job: Job, shape: ModelShape) -> None:
    """What every rank would refuse: data.document_masks for a module that cannot honour them."""
    taken = shape.measured.takes_document_ids if shape.measured is not None else "by name"
    if job.data.document_masks and taken != "by name":
        raise LayoutError(
            f"model {job.model.kind!r} cannot keep documents apart: its forward names no"
            " document_ids",
            why=(
                "it takes any keyword, which does not say that it masks attention by this one"
                if taken != "no"
                else None
            ),
            fix="add the argument and mask attention with it, or leave data.document_masks out",
        )


def _require_vocabulary(shape: ModelShape, vocab_size: int | None) -> None:
    if vocab_size and 0 < shape.vocab_size < vocab_size:
        raise DataError(
            f"the data has a vocabulary of {vocab_size} tokens and the model one of"
            f" {shape.vocab_size}",
            fix=f"set model.vocab_size={vocab_size}, or use the tokenizer of the model",
        )


def _plan(
    job: Job,
    weighing: Weighing,
    alternatives: Sequence[Candidate],
    reasons: Sequence[str],
    vocab_size: int | None,
) -> Plan:
    """All of it but the warnings, which look at the rest."""
    shape, work = weighing.shape, weighing.work
    chosen = next(candidate for candidate in alternatives if candidate.chosen)
    return Plan(
        job_digest=job_digest(job),
        layout=chosen.layout,
        device=weighing.device,
        precision=job.precision.compute,
        recompute=job.train.recompute,
        recompute_every=job.train.recompute_every or 1,
        recompute_segments=work.segments or (),
        offload_activations=job.train.offload_activations,
        compile=job.train.compile,
        zero_stage=chosen.zero_stage,
        bucket_mb=job.parallel.bucket_mb,
        data_parallel=work.options,
        sync_batchnorm=job.parallel.sync_batchnorm,
        dropout=job.parallel.dropout,
        seed=job.run.seed,
        sequence_parallel=job.parallel.sequence_parallel,
        tp_chunks=job.parallel.tp_chunks,
        cp_attention=job.parallel.cp_attention,
        cp_load_balance=load_balance(job),
        rules=job.parallel.rules,
        global_batch_size=job.train.global_batch_size,
        micro_batch_size=work.micro_batch_size,
        num_microbatches=work.num_microbatches,
        seq_len=work.seq_len,
        peak_lr=peak_rate(job).lr,
        vocab_size=shape.vocab_size if shape.is_known else vocab_size or 0,
        num_params=shape.num_params,
        flops_per_token=(
            shape.flops_per_token(job.data.seq_len)["training"] if shape.is_known else None
        ),
        capacity_bytes=weighing.capacity_bytes,
        alternatives=tuple(alternatives),
        reasons=tuple(reasons),
        shape=shape.to_json(),
        pipeline=weighing.pipeline_of(chosen),
        **lossy_choices(job),
    )


def lossy_choices(job: Job) -> dict[str, Any]:
    """Fields of a plan."""
    parallel, precision = job.parallel, job.precision
    found: dict[str, Any] = {
        "compress": parallel.compress,
        "compress_rank": parallel.compress_rank,
        "compress_fraction": parallel.compress_fraction,
    }
    if precision.compute != "fp16":
        return found
    if precision.loss_scale == "dynamic":
        growth = precision.loss_scale_growth_steps
        return found | {
            "loss_scale": precision.loss_scale_initial,
            "loss_scale_growth_steps": growth,
        }
    return found | {"loss_scale": precision.loss_scale}
