"""Judges what compression makes of a gradient that is not finite on one rank: every rank must see
it, and nothing that is kept between steps may be lost."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from phalanx.parallel.executor import Batch, Objective
from phalanx.parallel.model import ParallelModel
from phalanx.verify.sent_gradients import SentGradientChecker

OverflowFault = tuple[str, float, str]
"""(parameter, or ""; by how much; in words)."""
KEPT_ERROR = "error"
"""The slot of what a rank has not sent; what ranks have in common is in the others."""
UNSEEN_CAUSE = (
    "a gradient that is infinite on one rank arrives as a finite one: its overflow is not seen, and"
    " the step is applied"
)
STATE_CAUSE = (
    "a gradient that is not finite changes what compression keeps between steps, and that step is"
    " never applied: what was not sent is lost, or the next step begins anew"
)


def find_overflow_faults(
    model: ParallelModel,
    checker: SentGradientChecker,
    objective: Objective,
    microbatches: Sequence[Batch],
) -> list[OverflowFault]:
    """Compute a step whose gradients are infinite on the last rank; return what is wrong with it.
    Nothing is updated. Collective.

    No rank may find the step finite. Of a gradient that overflows the last rank must keep what it
    had not sent before, bit by bit, and all ranks what they have in common. Another rank may have
    sent a part of its own gradient, and so keep something else, but nothing that is not finite.
    """
    compression = model.compression
    assert compression is not None, "gradients that travel as they are keep nothing"
    before = {key: tensor.clone() for key, tensor in compression.map_state_tensors().items()}
    _clear_gradients(model)
    checker.overflows.clear()
    is_last = model.mesh.rank == model.mesh.world_size - 1
    sums = model.forward_backward(
        microbatches, _multiply_gradients(objective, math.inf if is_last else 1.0)
    )
    facts = model.reduce_and_clip(sums, max_norm=None)
    _clear_gradients(model)
    faults: list[OverflowFault] = []
    for name, overflow in checker.overflows.items():
        if overflow.is_unseen:
            faults.append((name, math.inf, UNSEEN_CAUSE))
    if facts.finite and not faults:
        faults.append(("", math.inf, UNSEEN_CAUSE))
    return [*faults, *_find_lost_state(before, compression.map_state_tensors(), checker)]


def _find_lost_state(
    before: Mapping[str, torch.Tensor],
    after: Mapping[str, torch.Tensor],
    checker: SentGradientChecker,
) -> Iterator[OverflowFault]:
    for key, tensor in after.items():
        name, _, slot = key.rpartition("/")
        overflow = checker.overflows.get(name)
        is_wrong = not bool(tensor.isfinite().all())
        if overflow is not None and (slot != KEPT_ERROR or overflow.keeps_error):
            is_wrong = not torch.equal(before[key], tensor)
        if is_wrong:
            change = float((tensor - before[key]).double().norm())
            error = change / (float(before[key].double().norm()) or 1.0)
            yield name, error if math.isfinite(error) else math.inf, STATE_CAUSE


def _clear_gradients(model: ParallelModel) -> None:
    for _, parameter in model.named_parameters():
        parameter.grad = None


def _multiply_gradients(objective: Objective, factor: float) -> Objective:
    """The objective with its loss as it is, and `factor` times its gradients."""

    # With its marks: by them a layout chooses in which form it hands over a head's outputs.
    @functools.wraps(objective)
    def call_and_multiply(outputs: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        loss, targets = objective(outputs, batch)
        if loss.requires_grad and factor != 1.0:
            loss.register_hook(lambda gradient: gradient * factor)
        return loss, targets

    return call_and_multiply
