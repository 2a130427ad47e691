"""The loss of a job as one process computes it, in its two halves: what the module makes of a
batch, and what the objective makes of that."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from phalanx.core.batch import list_outermost_names, unflatten_entry
from phalanx.job.hugging_face import is_hugging_face
from phalanx.job.schema import Job
from phalanx.nn.build import build_objective
from phalanx.nn.objective import (
    CausalOutput,
    classification_cross_entropy,
    token_cross_entropy,
)
from phalanx.parallel.loss_forward import ACCEPTS_VOCABULARY_SHARDS_ATTRIBUTE, gather_logits
from phalanx.run.one_process.plain_loss import (
    Batch,
    compute_textbook_classification_loss,
    compute_textbook_cross_entropy,
)


class JobLoss:
    """`loss(module, batch)` is the sum of the losses of the batch's targets, and how many they are.

    The textbook's loss where the job has one of phalanx's own, which a mistake would change in one
    process, too; or the user's own.
    """

    def __init__(self, job: Job) -> None:
        self._objective = build_objective(job)
        is_default = job.model.objective is None
        self._is_textbook = is_default or self._objective is token_cross_entropy
        # Of [batch, classes], whose labels may have a name of their own.
        self._classifies = self._objective is classification_cross_entropy or (
            is_default and is_hugging_face(job.model.kind)
        )

    def compute_outputs(self, module: nn.Module, batch: Batch) -> Any:
        """The module's outputs for a batch."""
        extras = select_forward_arguments(inspect.signature(module.forward).parameters, batch)
        if "inputs" not in list_outermost_names(batch):
            return module(**extras)
        return module(unflatten_entry(batch, "inputs"), **extras)

    def sum_losses_of_outputs(
        self, outputs: Any, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._classifies and isinstance(outputs, torch.Tensor) and outputs.ndim == 2:
            labels = batch["labels"] if "labels" in batch else batch["targets"]
            return compute_textbook_classification_loss(outputs, labels)
        # Of other outputs the objective says what it wants.
        can_read = isinstance(outputs, torch.Tensor | CausalOutput)
        if self._is_textbook and can_read and "targets" in batch:
            return compute_textbook_cross_entropy(outputs, batch)
        nested = {key: unflatten_entry(batch, key) for key in list_outermost_names(batch)} | dict(
            batch
        )
        if not getattr(self._objective, ACCEPTS_VOCABULARY_SHARDS_ATTRIBUTE, False):
            outputs = gather_logits(outputs)
        return self._objective(outputs, nested)

    def __call__(self, module: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return self.sum_losses_of_outputs(self.compute_outputs(module, batch), batch)


def select_forward_arguments(names: Mapping[str, Any], batch: Batch) -> dict[str, Any]:
    """The entries of a batch, besides inputs and targets, that a forward has arguments for."""
    return {
        key: unflatten_entry(batch, key)
        for key in list_outermost_names(batch)
        if key not in ("inputs", "targets") and key in names
    }
