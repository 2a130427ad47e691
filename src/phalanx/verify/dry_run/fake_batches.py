"""Batches of the form that a job's data has, without numbers."""

from __future__ import annotations

import torch

from phalanx.job.module_probe import SampleForm
from phalanx.job.schema import Job
from phalanx.plan.plan import Plan

Batch = dict[str, torch.Tensor]


def make_fake_microbatches(
    job: Job, plan: Plan, num_microbatches: int, sample_form: SampleForm | None = None
) -> list[Batch]:
    """Microbatches of one rank, of zeros: ids of a token that every vocabulary has. `sample_form`:
    of a user's own dataset for a module of theirs."""
    return [_make_fake_batch(job, plan, sample_form) for _ in range(num_microbatches)]


def _make_fake_batch(job: Job, plan: Plan, sample_form: SampleForm | None) -> Batch:
    rows = plan.micro_batch_size
    if sample_form is not None:
        return {
            key: torch.zeros(rows, *shape, dtype=getattr(torch, dtype))
            for key, (shape, dtype) in sample_form.items()
        }
    shape = plan.model_shape
    if shape.reads_images:
        images = torch.zeros(rows, shape.num_channels, shape.image_size, shape.image_size)
        return {"inputs": images, "targets": torch.zeros(rows, dtype=torch.int64)}
    keys = ["inputs", "targets", "positions"]
    if job.data.document_masks:
        keys.append("document_ids")
    return {key: torch.zeros(rows, plan.seq_len, dtype=torch.int64) for key in keys}
