"""Batches made up for what a model reads: tokens, or images with labels, with masked targets."""

from __future__ import annotations

import torch

from phalanx.core.batch import IGNORE_INDEX
from phalanx.job.costs import ModelCosts
from phalanx.plan.plan import Plan


def make_synthetic_batch(
    plan: Plan, rows: int, generator: torch.Generator, *, documents: bool
) -> dict[str, torch.Tensor]:
    """A batch of what the plan's model reads: tokens, or images with labels."""
    make = _make_image_batch if plan.model_shape.reads_images else _make_token_batch
    return make(plan, rows, generator, documents=documents)


def _make_token_batch(
    plan: Plan, rows: int, generator: torch.Generator, *, documents: bool
) -> dict[str, torch.Tensor]:
    """Each row has its own share of masked targets; one in three has none left."""
    length, vocab_size = plan.seq_len, plan.vocab_size
    tokens = torch.randint(vocab_size, (rows, length + 1), generator=generator)
    targets = _mask_targets(tokens[:, 1:].clone(), generator)
    batch = {
        "inputs": tokens[:, :-1].clone(),
        "targets": targets,
        "positions": torch.arange(length).repeat(rows, 1),
    }
    if documents:
        border = torch.randint(1, max(2, length), (rows, 1), generator=generator)
        batch["document_ids"] = (batch["positions"] >= border).long()
        # Positions begin again with each document, as in training.
        batch["positions"] = torch.where(
            batch["positions"] >= border, batch["positions"] - border, batch["positions"]
        )
    return batch


def _make_image_batch(
    plan: Plan, rows: int, generator: torch.Generator, *, documents: bool
) -> dict[str, torch.Tensor]:
    shape: ModelCosts = plan.model_shape
    images = torch.randn(
        rows, shape.num_channels, shape.image_size, shape.image_size, generator=generator
    )
    labels = torch.randint(shape.num_classes, (rows,), generator=generator)
    return {"inputs": images, "targets": _mask_targets(labels.unsqueeze(1), generator).squeeze(1)}


def _mask_targets(targets: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    keep = torch.rand(len(targets), 1, generator=generator)
    targets[torch.rand(targets.shape, generator=generator) > keep] = IGNORE_INDEX
    targets[2::3] = IGNORE_INDEX
    # Whatever was drawn, there is a target (IGNORE_INDEX is negative).
    targets[0, 0] = targets[0, 0].clamp(min=0)
    return targets
