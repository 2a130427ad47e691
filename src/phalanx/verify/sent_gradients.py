"""Judges what compression sends by a plain second implementation: what is sent and what is kept may
add up, and yet the wrong part be sent."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import torch

from phalanx.parallel.hooks._protocol import Gradient, Hook
from phalanx.parallel.model import ParallelModel
from phalanx.parallel.wire import Wire
from phalanx.verify.compressed_gradients import JUDGED_BY_PLAIN
from phalanx.verify.plain.compression import (
    find_half_int8_levels,
    plain_int8_excess,
    plain_powersgd_step,
    plain_topk_excess,
)
from phalanx.verify.trace_facts import TOLERANCE_OF_DTYPE

SentFault = tuple[int, str, float, str]
"""(step, from 0; parameter; by how much what is sent is worse; in words)."""
POWERSGD_MATRIX = "q"
"""The slot of a gradient in which a step of powersgd finds the matrix of the step before."""


class SentGradientChecker:
    """Stands around the hook of a layout's compression, and judges each reduction by the
    compression's definition (`JUDGED_BY_PLAIN`)."""

    keeps_error = True

    def __init__(self, model: ParallelModel) -> None:
        self.faults: list[SentFault] = []
        self._step = 0
        self._mesh = model.mesh
        self._fraction = model.plan.parallel.compress_fraction
        self._compress = model.plan.parallel.compress
        # Its own, step after step: the layout's is what is judged.
        self._plain_q: dict[str, torch.Tensor] = {}
        if model.compression is not None and self._compress in JUDGED_BY_PLAIN:
            self._hook: Hook = model.compression.surround_hook(self)

    def begin_step(self, step: int) -> None:
        """The reductions that follow are of `step`, counted from 0."""
        self._step = step

    def shared_slots(self, name: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        return self._hook.shared_slots(name, parameter)

    def reduce(self, gradients: Sequence[Gradient], wire: Wire) -> list[torch.Tensor]:
        """Reduce them by the hook. Collective."""
        before = [gradient.tensor.clone() for gradient in gradients]
        means = self._average_over_ranks(before)
        half_levels: Sequence[torch.Tensor] = []
        if self._compress == "int8":
            num_ranks = self._mesh.world_size
            half_levels = self._average_over_ranks(
                [find_half_int8_levels(full, num_ranks) for full in before]
            )
        # What the first step begins with is drawn, and the same on all ranks.
        for gradient in gradients:
            if POWERSGD_MATRIX in gradient.slots:
                self._plain_q.setdefault(gradient.name, gradient.slots[POWERSGD_MATRIX].clone())
        residuals = self._hook.reduce(gradients, wire)
        judged = zip_longest(gradients, before, means, half_levels, residuals)
        for gradient, full, mean, half_level, rest in judged:
            # An overflow is judged in runs of the trainer.
            if not bool(mean.isfinite().all()):
                continue
            excess = self._find_excess(gradient, full, mean, half_level, rest)
            if excess > 0:
                words = JUDGED_BY_PLAIN[self._compress].fault
                self.faults.append((self._step, gradient.name, excess, words))
        return residuals

    def _average_over_ranks(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The mean over ranks of each tensor. Collective."""
        # One collective for all: with many it is these that take the time.
        flat = self._mesh.all_reduce_sum(torch.cat([tensor.flatten() for tensor in tensors]))
        flat /= self._mesh.world_size
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]

    def _find_excess(
        self,
        gradient: Gradient,
        full: torch.Tensor,
        mean: torch.Tensor,
        half_level: torch.Tensor | None,
        rest: torch.Tensor,
    ) -> float:
        """By how much the reduction of a gradient is worse than its definition; at most 0 where it
        is not."""
        if self._compress == "topk":
            return plain_topk_excess(full, rest, self._fraction)
        if half_level is not None:
            return plain_int8_excess(full, mean, half_level, rest, self._mesh.world_size)
        return self._find_powersgd_excess(gradient, mean)

    def _find_powersgd_excess(self, gradient: Gradient, mean: torch.Tensor) -> float:
        """How far what was sent is from the definition's, which begins where its own step before
        has ended; a gradient that is not compressed must be the mean."""
        size = float(mean.double().norm())
        expected, allowed = mean.double(), 0.0
        if gradient.name in self._plain_q:
            sent, next_q, allowed = plain_powersgd_step(
                mean.flatten(1), self._plain_q[gradient.name]
            )
            self._plain_q[gradient.name] = next_q
            expected = sent.view_as(mean)
        if not size:
            return float(gradient.tensor.abs().max())
        error = float((gradient.tensor.double() - expected).norm()) / size
        dtype = str(mean.dtype).removeprefix("torch.")
        if error <= max(TOLERANCE_OF_DTYPE[dtype], allowed):
            return 0.0
        return error
