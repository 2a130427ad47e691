"""The reference of the parity tests: one process, an untouched module, a plain loop.

Imports nothing of phalanx.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Tensors = dict[str, torch.Tensor]


@dataclass
class Trace:
    """What one process computed: per step loss, gradient norm and gradients (after clipping);
    weights at the end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    before: Tensors = field(default_factory=dict)
    after: Tensors = field(default_factory=dict)


def logits_of(outputs: Any) -> torch.Tensor:
    """Logits, or hidden states and the head's weight."""
    return outputs if isinstance(outputs, torch.Tensor) else outputs[0] @ outputs[1].T


def train_in_one_process(
    module: nn.Module,
    batches: Sequence[Mapping[str, torch.Tensor]],
    optimizer: Any,
    max_norm: float | None,
) -> Trace:
    """Full-batch steps.

    `optimizer(module)` builds the optimizer; gradients are clipped to the global `max_norm`.
    """
    trace = Trace(before={name: p.detach().clone() for name, p in module.named_parameters()})
    update = optimizer(module)
    for batch in batches:
        inputs = {key: batch[key] for key in batch if key not in ("inputs", "targets")}
        logits, targets = logits_of(module(batch["inputs"], **inputs)), batch["targets"]
        total = F.cross_entropy(
            logits.flatten(0, -2), targets.flatten(), ignore_index=-100, reduction="sum"
        )
        loss = total / (targets != -100).sum()
        update.zero_grad()
        loss.backward()
        norm = sum(p.grad.double().square().sum() for p in module.parameters()) ** 0.5
        if max_norm is not None and norm > max_norm:
            for parameter in module.parameters():
                parameter.grad *= max_norm / norm
        trace.losses.append(loss.item())
        trace.norms.append(norm.item())
        trace.gradients.append({name: p.grad.clone() for name, p in module.named_parameters()})
        update.step()
    trace.after = {name: p.detach().clone() for name, p in module.named_parameters()}
    return trace


def error(off: torch.Tensor, reference: torch.Tensor, gradients: Tensors) -> float:
    """|a-b| / max(|b|, 1e-3 |g|_global / sqrt(num_tensors)), of `off` = a-b: a zero gradient has
    no other scale."""
    scale = torch.stack([g.double().norm() for g in gradients.values()]).norm().item()
    floor = 1e-3 * scale / len(gradients) ** 0.5
    return off.double().norm().item() / max(reference.double().norm().item(), floor)


def train_in_microbatches(
    module: nn.Module,
    batches: Sequence[Mapping[str, torch.Tensor]],
    *,
    micro: int,
    lr: float,
    max_norm: float | None,
    weight_decay: float = 0.0,
    around: Any = None,
) -> Trace:
    """Steps of SGD over microbatches of `micro` rows: what a statistic over a microbatch sees.

    Parameters may be frozen or unused. `around(step, first_row)` is a context that each forward
    runs in.
    """
    trace = Trace(before={name: p.detach().clone() for name, p in module.named_parameters()})
    for step, batch in enumerate(batches):
        loss_sum, num_targets = 0.0, int((batch["targets"] != -100).sum())
        module.zero_grad()
        for row in range(0, len(batch["targets"]), micro):
            part = {key: tensor[row : row + micro] for key, tensor in batch.items()}
            named = {key: part[key] for key in part if key not in ("inputs", "targets")}
            with around(step, row) if around is not None else nullcontext():
                logits, targets = logits_of(module(part["inputs"], **named)), part["targets"]
            total = F.cross_entropy(
                logits.flatten(0, -2), targets.flatten(), ignore_index=-100, reduction="sum"
            )
            (total / num_targets).backward()
            loss_sum += total.item()
        having = {name: p for name, p in module.named_parameters() if p.grad is not None}
        norm = sum(p.grad.double().square().sum() for p in having.values()) ** 0.5
        factor = max_norm / norm if max_norm is not None and norm > max_norm else 1.0
        trace.losses.append(loss_sum / num_targets)
        trace.norms.append(float(norm))
        with torch.no_grad():
            for parameter in having.values():
                parameter -= lr * (factor * parameter.grad + weight_decay * parameter)
    trace.after = {name: p.detach().clone() for name, p in module.named_parameters()}
    return trace
