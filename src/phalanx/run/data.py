"""The data of a run as one rank uses it: training batches, what is evaluated, the text it is
asked to continue."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from phalanx.core.errors import DataError, DataSourceError
from phalanx.data.corpus import Corpus
from phalanx.data.loader import RankBatchShare, TrainBatches, build_held_out_batches
from phalanx.data.samples import SampleSpec
from phalanx.data.tokenizer import Tokenizer
from phalanx.data.tokens import SPLITS, Split
from phalanx.data.user_dataset import (
    NUM_COMPARED_SAMPLES,
    UserDatasetFacts,
    hash_sample_subset,
    open_user_dataset,
)
from phalanx.job.learning_rate import resolve_peak_learning_rate
from phalanx.job.schema import Job
from phalanx.job.user_dataset import count_loader_processes
from phalanx.launch.paths import rank_log_path
from phalanx.mesh.mesh import Mesh
from phalanx.observe.bus import Bus
from phalanx.observe.events import Note
from phalanx.parallel.call.bind_batch import build_forward_arguments
from phalanx.parallel.model import ParallelModel
from phalanx.plan.plan import Plan
from phalanx.run.rank_run import RollBacks
from phalanx.train.evaluation import HeldOutBatches
from phalanx.train.state import TrainState

STDLIB_PROMPT = "def "
PROMPT_TOKENS = 16


@contextlib.contextmanager
def open_train_batches(
    job: Job,
    plan: Plan,
    mesh: Mesh,
    corpus: Corpus,
    state: TrainState,
    bus: Bus,
    run_dir: Path,
) -> Iterator[TrainBatches]:
    """The training batches of this rank, from the step of `state` on."""
    spec = SampleSpec(str(corpus.directory), plan.seq_len, job.run.seed, job.data.document_masks)
    data = TrainBatches(
        spec,
        _build_batch_share(plan, mesh, done_steps=state.step, done_samples=state.samples_seen),
        workers=count_loader_processes(job.data),
        worker_timeout_s=job.data.worker_timeout_s,
        keep_record=job.observe.samples,
        emit=bus.emit,
        worker_logs=rank_log_path(run_dir, mesh.rank, bus.attempt).with_suffix(""),
        rank=mesh.rank,
        pin_for=mesh.device,
    )
    if mesh.rank == 0:
        _emit_notes_on_held_out_fractions(corpus, bus)
    try:
        yield data
    finally:
        data.close()


def open_held_out_batches(
    job: Job, plan: Plan, mesh: Mesh, corpus: Corpus, *, split: Split = "held_out"
) -> HeldOutBatches | None:
    """The batches to evaluate, by source; None if eval.tokens is 0 or nothing is held out."""
    if not job.eval.tokens:
        return None
    batches = build_held_out_batches(
        corpus,
        _build_batch_share(plan, mesh),
        seq_len=plan.seq_len,
        max_tokens=job.eval.tokens,
        seed=job.run.seed,
        document_masks=job.data.document_masks,
        split=split,
    )
    return batches or None


def _emit_notes_on_held_out_fractions(corpus: Corpus, bus: Bus) -> None:
    """Emit a note for each source that is not held out by the fraction of documents.

    The terminal knows it before the ranks begin.
    """
    for name, component in zip(corpus.names, corpus.components, strict=True):
        if component.explain_held_out_choice:
            held_out = component.splits["held_out"]
            facts = {"source": name, "because": component.explain_held_out_choice, **vars(held_out)}
            bus.emit(Note(f"held_out_by_{component.split_by}", facts))


def _build_batch_share(
    plan: Plan, mesh: Mesh, *, done_steps: int = 0, done_samples: int = 0
) -> RankBatchShare:
    return RankBatchShare(
        global_batch_size=plan.global_batch_size,
        micro_batch_size=plan.micro_batch_size,
        data_parallel_size=plan.layout.data_parallel_size,
        data_parallel_rank=mesh.data_parallel_rank,
        done_steps=done_steps,
        done_samples=done_samples,
        has_contiguous_held_out=plan.is_layout_free,
    )


def require_document_mask_support(job: Job, model: ParallelModel) -> None:
    """Refuse data.document_masks (exit 3) for a module that could not honour them."""
    if job.data.document_masks:
        build_forward_arguments(
            model.module, dict.fromkeys(("inputs", "positions", "document_ids"), torch.zeros(0))
        )


def require_same_samples_on_all_ranks(corpus: Corpus, mesh: Mesh) -> None:
    """Raise DataError unless a user's dataset gives every rank the samples that were looked at
    before; DataSourceError for what it raises.

    Else ranks would repeat some samples and leave others out.
    """
    if corpus.user is None:
        return
    views = mesh.gather_json(_read_length_and_digest_of_dataset(corpus.user))
    for rank, view in enumerate(views):
        if "error" in view:
            error, where = str(view["error"]), f"rank {rank}"
            if not view["is_of_source"]:
                raise DataError(error, where=where)
            raise DataSourceError(error, where=where, outage=str(view["outage"]), rank=rank)
    was = {"length": corpus.user.num_train, "samples": corpus.user.some_samples}
    different = [rank for rank, view in enumerate(views) if view != was]
    if not different:
        return
    other = f"other samples ({NUM_COMPARED_SAMPLES} are compared)"
    if views[different[0]]["length"] != was["length"]:
        other = "another length"
    # All ranks agree, and yet not with the process that looked before they started.
    if views.count(views[0]) == len(views):
        why = (
            f"it has {other}: it changed since the run began, or each process shuffles or draws for"
            " itself"
        )
    else:
        why = (
            f"rank {', '.join(map(str, different))} has {other}: each process shuffles or draws for"
            " itself"
        )
    raise DataError(
        "your dataset is not the one that was opened before the ranks started",
        where=f"data.source {corpus.user.source}",
        why=why,
        fix=(
            "do not shuffle in it (phalanx does), and draw only from the global generators of"
            " random, numpy and torch, which are set for each sample"
        ),
    )


def _read_length_and_digest_of_dataset(user: UserDatasetFacts) -> dict[str, int | str]:
    """Length and digest of a user's dataset as this process opens it, or the error."""
    try:
        dataset = open_user_dataset(user.source, user.args, "train")
        digest = hash_sample_subset(dataset, user.source)
    except DataError as error:
        outage = error.outage if isinstance(error, DataSourceError) else ""
        is_of_source = isinstance(error, DataSourceError)
        return {"error": str(error), "is_of_source": is_of_source, "outage": outage}
    return {"length": len(dataset), "samples": digest}


def emit_note_on_batch_size_change(
    job: Job, plan: Plan, state: TrainState, bus: Bus, roll_backs: RollBacks
) -> None:
    """Emit a note if a resumed run reads another number of samples in a step than before.

    The cursor goes on where it was.
    """
    batch = plan.global_batch_size
    # As many as with this batch size from the start, or since the run read on: nothing has changed.
    if roll_backs.explain_cursor(state.step, state.samples_seen, batch):
        return
    rate = (
        resolve_peak_learning_rate(job).why
        or f"optim.lr stays {resolve_peak_learning_rate(job).lr:.3g}, as the job says"
    )
    bus.emit(
        Note(
            "batch_size_changed",
            {
                "step": state.step,
                "samples_seen": state.samples_seen,
                "global_batch_size": batch,
                "why": (
                    f"steps from {state.step + 1} on read {batch} samples each,"
                    f" the first of them sample {state.samples_seen}; train.steps counts steps as"
                    f" before; {rate}"
                ),
            },
        )
    )


def build_sample_prompt_tokens(corpus: Corpus, tokenizer: Tokenizer, context: int) -> list[int]:
    """The prompt of the sample: the first tokens that are held out, or `def ` for the standard
    library."""
    if corpus.source == "stdlib":
        return tokenizer.encode(STDLIB_PROMPT)[:context]
    for split in reversed(SPLITS):
        for sequence in corpus.sequences(split):
            if len(sequence):
                return [int(token) for token in sequence.read(0, min(PROMPT_TOKENS, context))]
    # Nothing can be read, and some token must come first.
    return [0]
