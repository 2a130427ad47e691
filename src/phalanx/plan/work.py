"""From a job to what one rank does in a step: the workload that memory is counted for.

Torch-free.
"""

from __future__ import annotations

from phalanx.job.own_dataset import is_own_dataset
from phalanx.job.schema import Job
from phalanx.job.shape import ModelShape
from phalanx.plan.coverage import check_rules
from phalanx.plan.data_parallel import DataParallel
from phalanx.plan.memory import Workload


def work_of(
    job: Job,
    shape: ModelShape,
    *,
    micro_batch_size: int,
    num_microbatches: int,
    tp: int,
    cp: int = 1,
    ep: int = 1,
) -> Workload:
    """Without the blocks that are recomputed (see `plan.recompute`)."""
    return Workload(
        micro_batch_size,
        _seq_len(job, shape),
        job.precision.compute,
        job.train.recompute,
        job.train.loss_chunk_tokens,
        num_microbatches,
        document_masks=job.data.document_masks,
        optimizer_bytes=_optimizer_bytes(job),
        copies_state=_copies_state(job),
        tp=tp,
        rules=() if shape.is_known else check_rules(job.parallel.rules, shape, tp),
        cuts_sequence=cuts_sequence(job, shape),
        compress=job.parallel.compress,
        offloads_activations=job.train.offload_activations,
        options=DataParallel.of(job.parallel),
        cp=cp,
        cp_attention=job.parallel.cp_attention,
        ep=ep,
        is_compiled=job.train.compile,
    )


def _seq_len(job: Job, shape: ModelShape) -> int:
    """What an own module makes of an own sample, nobody knows: a sample is one thing then."""
    has_own_samples = is_own_dataset(job.data.source) and not job.data.mixture
    return shape.tokens_of(job.data.seq_len) if shape.is_known or not has_own_samples else 1


def _optimizer_bytes(job: Job) -> int:
    """Per parameter: two fp32 moments of AdamW, one of SGD with momentum; of an own optimizer as
    many as AdamW."""
    if job.optim.kind == "sgd":
        return 4 if job.optim.momentum else 0
    return 8


def _copies_state(job: Job) -> bool:
    """True if anything is saved on the way: the saves at the end and at a stop are waited for,
    and need no copy."""
    return job.checkpoint.asynchronous and (job.checkpoint.has_interval or job.eval.keep_best)


def cuts_sequence(job: Job, shape: ModelShape) -> bool:
    """Of a user's own module, which is not asked here, only what the job says."""
    asked = job.parallel.sequence_parallel
    return shape.is_known and not shape.reads_images if asked is None else asked
