"""The textbook's losses of causal models and of classifiers.

Imports torch alone: what it is compared with has a loss of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

Batch = Mapping[str, torch.Tensor]


def compute_textbook_cross_entropy(outputs: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of causal models as the textbook has it: logits whole, from logits or from
    (hidden, head's weight)."""
    logits = outputs
    # Hidden states, and the head's weight.
    if not isinstance(outputs, torch.Tensor):
        logits = outputs[0] @ outputs[1].T
    targets, balance = batch["targets"], getattr(outputs, "balance", None)
    total = F.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=-100, reduction="sum"
    )
    if balance is not None:
        total = balance.with_loss(total)
    return total, (targets != -100).sum()


def compute_textbook_classification_loss(
    logits_BC: torch.Tensor, labels_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The negative log-probability of each label, summed over those that are not -100; and how
    many these are."""
    counts_B = labels_B != -100
    wide = torch.promote_types(logits_BC.dtype, torch.float32)
    log_probs = logits_BC[counts_B].to(wide).log_softmax(-1)
    return -log_probs.gather(-1, labels_B[counts_B][:, None]).sum(), counts_B.sum()
