"""Batches made up for what a model reads: tokens, or images with labels, with masked targets."""

from __future__ import annotations

import torch

from phalanx.core.batch import IGNORE_INDEX
from phalanx.job.costs import ModelCosts
from phalanx.plan.plan import Plan

MAX_DOCUMENTS = 5  # in a row


def make_synthetic_batch(
    plan: Plan,
    rows: int,
    generator: torch.Generator,
    *,
    documents: bool,
    has_masked_targets: bool = True,
) -> dict[str, torch.Tensor]:
    """A batch of what the plan's model reads: tokens, or images with labels. The same but for its
    targets without `has_masked_targets`."""
    make = _make_image_batch if plan.model_shape.reads_images else _make_token_batch
    batch, targets = make(plan, rows, generator, documents=documents)
    if not has_masked_targets:
        batch["targets"] = targets
    return batch


def _make_token_batch(
    plan: Plan, rows: int, generator: torch.Generator, *, documents: bool
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(the batch; its targets before any was masked). Each row has its own share of masked targets;
    one in three has none left."""
    length, vocab_size = plan.seq_len, plan.vocab_size
    tokens = torch.randint(vocab_size, (rows, length + 1), generator=generator)
    unmasked = tokens[:, 1:].clone()
    targets = _mask_targets(unmasked.clone(), generator)
    batch = {
        "inputs": tokens[:, :-1].clone(),
        "targets": targets,
        "positions": torch.arange(length).repeat(rows, 1),
    }
    if documents:
        begins = _choose_document_begins(rows, length, generator)
        batch["document_ids"] = begins.long().cumsum(1)
        # Positions begin again with each document, as in training.
        at = batch["positions"]
        batch["positions"] = at - torch.where(begins, at, 0).cummax(1).values
    return batch, unmasked


def _choose_document_begins(rows: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Where a row's second document and those after it begin, [rows, length]: one row after the
    other has another number of documents, from one to MAX_DOCUMENTS.

    The third begins where a rank of context parallelism ends, the fourth has one token before it.
    """
    first = torch.randint(1, max(2, length), (rows, 1), generator=generator)
    half = torch.full_like(first, length // 2)
    borders = torch.cat((first, half, first + 1, half // 2), dim=1)
    num_borders = (torch.arange(rows)[:, None] + first[:1]) % MAX_DOCUMENTS
    is_border = (torch.arange(MAX_DOCUMENTS - 1) < num_borders) & (borders > 0) & (borders < length)
    begins = torch.zeros(rows, length + 1, dtype=torch.bool)
    # What is no border is marked behind the row's end.
    begins.scatter_(1, torch.where(is_border, borders, length), True)
    return begins[:, :length]


def _make_image_batch(
    plan: Plan, rows: int, generator: torch.Generator, *, documents: bool
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    shape: ModelCosts = plan.model_shape
    images = torch.randn(
        rows, shape.num_channels, shape.image_size, shape.image_size, generator=generator
    )
    labels = torch.randint(shape.num_classes, (rows,), generator=generator)
    masked = _mask_targets(labels.clone().unsqueeze(1), generator).squeeze(1)
    return {"inputs": images, "targets": masked}, labels


def _mask_targets(targets: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    keep = torch.rand(len(targets), 1, generator=generator)
    targets[torch.rand(targets.shape, generator=generator) > keep] = IGNORE_INDEX
    targets[2::3] = IGNORE_INDEX
    # Whatever was drawn, there is a target (IGNORE_INDEX is negative).
    targets[0, 0] = targets[0, 0].clamp(min=0)
    return targets
