"""What is trained on while a layout is judged: uneven targets, masked ones, sequences without any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from phalanx.core.batch import IGNORE_INDEX
from phalanx.core.digest import stable_hash64
from phalanx.data.corpus import load_corpus
from phalanx.data.loader import Share, TrainBatches
from phalanx.data.samples import SampleSpec
from phalanx.job.schema import Job
from phalanx.job.shape import ModelShape
from phalanx.plan.plan import Plan
from phalanx.verify.cases import NUM_MICROBATCHES

Batch = Mapping[str, torch.Tensor]


def global_steps(job: Job, plan: Plan, data_dir: Path | None, *, num_steps: int) -> list[list[Batch]]:
    """For each step its microbatches as all ranks together see them; the same on every rank.

    Of the data in `data_dir` where there is some (a user's own), else made up for what the model reads.
    """
    rows = plan.global_batch_size // NUM_MICROBATCHES
    if data_dir is not None:
        spec = SampleSpec(str(load_corpus(data_dir).directory), plan.seq_len, job.run.seed, job.data.document_masks)
        data = TrainBatches(spec, Share(plan.global_batch_size, rows), workers=0)
        try:
            return [list(data.step_microbatches(step)) for step in range(1, num_steps + 1)]
        finally:
            data.close()
    generator = torch.Generator().manual_seed(stable_hash64("verify", job.run.seed) % 2**63)
    return [
        [made_up(plan, rows, generator, documents=job.data.document_masks) for _ in range(NUM_MICROBATCHES)]
        for _ in range(num_steps)
    ]


def made_up(plan: Plan, rows: int, generator: torch.Generator, *, documents: bool) -> Batch:
    """A batch of what the plan's model reads: tokens, or images with labels."""
    make = _images if plan.model_shape.reads_images else _tokens
    return make(plan, rows, generator, documents=documents)


def _tokens(plan: Plan, rows: int, generator: torch.Generator, *, documents: bool) -> Batch:
    """Each row has its own share of masked targets; one in three has none left."""
    length, vocab_size = plan.seq_len, plan.vocab_size
    tokens = torch.randint(vocab_size, (rows, length + 1), generator=generator)
    targets = _masked(tokens[:, 1:].clone(), generator)
    batch = {"inputs": tokens[:, :-1].clone(), "targets": targets, "positions": torch.arange(length).repeat(rows, 1)}
    if documents:
        border = torch.randint(1, max(2, length), (rows, 1), generator=generator)
        batch["document_ids"] = (batch["positions"] >= border).long()
        batch["positions"] = torch.where(batch["positions"] >= border, batch["positions"] - border, batch["positions"])
    return batch


def _images(plan: Plan, rows: int, generator: torch.Generator, *, documents: bool) -> Batch:
    shape: ModelShape = plan.model_shape
    images = torch.randn(rows, shape.num_channels, shape.image_size, shape.image_size, generator=generator)
    labels = torch.randint(shape.num_classes, (rows,), generator=generator)
    return {"inputs": images, "targets": _masked(labels.unsqueeze(1), generator).squeeze(1)}


def _masked(targets: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    keep = torch.rand(len(targets), 1, generator=generator)
    targets[torch.rand(targets.shape, generator=generator) > keep] = IGNORE_INDEX
    targets[2::3] = IGNORE_INDEX
    targets[0, 0] = targets[0, 0].clamp(min=0)  # whatever was drawn, there is a target
    return targets


def split_again(steps: Sequence[Sequence[Batch]], num_microbatches: int) -> list[list[Batch]]:
    """The same rows of each step in the same order, in that many equal microbatches."""

    def split(step: Sequence[Batch]) -> list[Batch]:
        whole = {key: torch.cat([batch[key] for batch in step]) for key in step[0]}
        parts = {key: tensor.chunk(num_microbatches) for key, tensor in whole.items()}
        return [{key: tensors[index] for key, tensors in parts.items()} for index in range(num_microbatches)]

    return [split(step) for step in steps]


def share_of(steps: Sequence[Sequence[Batch]], rank: int, data_parallel_size: int) -> list[list[Batch]]:
    """The part of one data-parallel rank: of each microbatch an equal run of rows."""

    def part(batch: Batch) -> Batch:
        rows = len(next(iter(batch.values()))) // data_parallel_size
        return {key: tensor[rank * rows : (rank + 1) * rows] for key, tensor in batch.items()}

    return [[part(batch) for batch in step] for step in steps]


def as_dtype(steps: Sequence[Sequence[Batch]], dtype: torch.dtype) -> list[list[Batch]]:
    """Numbers in `dtype`; tokens and labels as they are."""
    return [
        [{key: t.to(dtype) if t.is_floating_point() else t for key, t in batch.items()} for batch in step]
        for step in steps
    ]
