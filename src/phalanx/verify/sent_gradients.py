"""Judges what compression sends by a plain second implementation: what is sent and what is kept may
add up, and yet the wrong part be sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.parallel.hooks._protocol import Gradient, Hook
from phalanx.parallel.model import ParallelModel
from phalanx.parallel.wire import Wire
from phalanx.verify.plain.compression import plain_topk_excess

SentFault = tuple[int, str, float, str]
"""(step, from 0; parameter; by how much what is sent is worse; in words)."""


class SentGradientChecker:
    """Stands around the hook of a layout's compression, and compares each gradient that it
    reduces: of topk."""

    keeps_error = True

    def __init__(self, model: ParallelModel) -> None:
        self.faults: list[SentFault] = []
        self._step = 0
        self._fraction = model.plan.parallel.compress_fraction
        if model.compression is not None and model.plan.parallel.compress == "topk":
            self._hook: Hook = model.compression.surround_hook(self)

    def begin_step(self, step: int) -> None:
        """The reductions that follow are of `step`, counted from 0."""
        self._step = step

    def shared_slots(self, name: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        return self._hook.shared_slots(name, parameter)

    def reduce(self, gradients: Sequence[Gradient], wire: Wire) -> list[torch.Tensor]:
        """Reduce them by the hook. Collective."""
        before = [gradient.tensor.clone() for gradient in gradients]
        residuals = self._hook.reduce(gradients, wire)
        for gradient, full, rest in zip(gradients, before, residuals, strict=True):
            excess = plain_topk_excess(full, rest, self._fraction)
            if excess > 0:
                words = "topk does not send the largest elements, or another number of them"
                self.faults.append((self._step, gradient.name, excess, words))
        return residuals
