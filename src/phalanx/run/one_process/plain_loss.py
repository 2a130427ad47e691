"""The textbook's loss of causal models.

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
