"""Judges what compression sends by a plain second implementation: what is sent and what is kept may
add up, and yet the wrong part be sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from phalanx.parallel.hooks._protocol import Gradient, Hook
from phalanx.parallel.model import ParallelModel
from phalanx.parallel.wire import Wire
from phalanx.verify.compressed_gradients import JUDGED_BY_PLAIN, TOLERANCE_OF_CAST
from phalanx.verify.plain.compression import (
    count_topk_elements,
    find_half_int8_levels,
    plain_cast_excess,
    plain_int8_excess,
    plain_powersgd_matrix_error,
    plain_powersgd_step,
    plain_powersgd_width,
    plain_topk_excess,
    round_to_16_bits,
)
from phalanx.verify.trace_facts import TOLERANCE_OF_DTYPE

SentFault = tuple[int, str, float, str]
"""(step, from 0; parameter; by how much what is sent is worse; in words)."""
POWERSGD_MATRIX = "q"
"""The slot of a gradient in which a step of powersgd finds the matrix of the step before."""


def _describe_width(width: int) -> str:
    return f"{width} columns of it" if width else "it whole"


@dataclass(frozen=True)
class Overflow:
    """A gradient that is not finite on some rank. `is_unseen`: what arrives is finite.
    `keeps_error`: this rank cannot have sent all of it that is not finite, and so keeps the error
    that it had."""

    is_unseen: bool
    keeps_error: bool


class SentGradientChecker:
    """Stands around the hook of a layout's compression, and judges each reduction by the
    compression's definition (`JUDGED_BY_PLAIN`).

    `overflows`: by parameter, the gradients that were not finite on some rank.
    """

    def __init__(self, model: ParallelModel) -> None:
        self.faults: list[SentFault] = []
        self.overflows: dict[str, Overflow] = {}
        self.keeps_error = False
        self._step = 0
        self._mesh = model.mesh
        self._fraction = model.plan.parallel.compress_fraction
        self._rank = model.plan.parallel.compress_rank
        self._compress = model.plan.parallel.compress
        # By parameter: the matrix as the step before has left it.
        self._left_q: dict[str, torch.Tensor] = {}
        self.is_judging = model.compression is not None and self._compress in JUDGED_BY_PLAIN
        if model.compression is not None and self.is_judging:
            self._hook: Hook = model.compression.surround_hook(self)
            self.keeps_error = self._hook.keeps_error

    def begin_step(self, step: int) -> None:
        """The reductions that follow are of `step`, counted from 0."""
        self._step = step

    def shared_slots(self, name: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        return self._hook.shared_slots(name, parameter)

    def reduce(self, gradients: Sequence[Gradient], wire: Wire) -> list[torch.Tensor]:
        """Reduce them by the hook. Collective."""
        before = [gradient.tensor.clone() for gradient in gradients]
        means = self._average_over_ranks(before)
        if self._compress in TOLERANCE_OF_CAST:
            return self._reduce_in_16_bits(gradients, before, means, wire)
        half_levels: Sequence[torch.Tensor | None] = [None] * len(before)
        if self._compress == "int8":
            num_ranks = self._mesh.world_size
            half_levels = self._average_over_ranks(
                [find_half_int8_levels(full, num_ranks) for full in before]
            )
        norms = self._average_over_ranks([full.norm() for full in before])
        found_q = {}
        for gradient in gradients:
            if POWERSGD_MATRIX in gradient.slots:
                found_q[gradient.name] = gradient.slots[POWERSGD_MATRIX].clone()
        residuals = self._hook.reduce(gradients, wire)
        judged = zip(gradients, before, means, norms, half_levels, residuals, strict=True)
        for gradient, full, mean, norm, half_level, rest in judged:
            if not bool(mean.isfinite().all()):
                self._note_overflow(gradient, full)
                excess = 0.0
            elif self._compress == "topk":
                excess = plain_topk_excess(full, rest, self._fraction)
            elif half_level is not None:
                excess = plain_int8_excess(full, mean, half_level, rest, self._mesh.world_size)
            else:
                q = found_q.get(gradient.name)
                excess = self._find_powersgd_excess(gradient, mean, q, float(norm))
                self._check_powersgd_width(gradient, q)
            self._judge_excess(gradient, excess)
        for gradient in gradients:
            if POWERSGD_MATRIX in gradient.slots:
                self._left_q[gradient.name] = gradient.slots[POWERSGD_MATRIX].clone()
        return residuals

    def _reduce_in_16_bits(
        self,
        gradients: Sequence[Gradient],
        before: Sequence[torch.Tensor],
        means: Sequence[torch.Tensor],
        wire: Wire,
    ) -> list[torch.Tensor]:
        largest = torch.stack([full.abs().max().double() for full in before])
        largest = torch.stack(self._mesh.all_gather(largest)).amax(0)
        num_ranks = self._mesh.world_size
        rounded = [
            round_to_16_bits(full, self._compress, float(limit), num_ranks)
            for full, limit in zip(before, largest, strict=True)
        ]
        sent = self._average_over_ranks(rounded)
        sizes = self._average_over_ranks([tensor.abs() for tensor in rounded])
        residuals = self._hook.reduce(gradients, wire)
        judged = zip(gradients, before, means, sent, sizes, largest, strict=True)
        for gradient, full, mean, expected, size, limit in judged:
            if not bool(mean.isfinite().all()):
                self._note_overflow(gradient, full)
                continue
            excess = plain_cast_excess(
                gradient.tensor, expected, size, self._compress, float(limit), num_ranks
            )
            self._judge_excess(gradient, excess)
        return residuals

    def _judge_excess(self, gradient: Gradient, excess: float) -> None:
        # NaN is above any.
        if not excess <= 0:
            words = JUDGED_BY_PLAIN[self._compress].fault
            self.faults.append((self._step, gradient.name, excess, words))

    def _note_overflow(self, gradient: Gradient, full: torch.Tensor) -> None:
        """Note a gradient that is not finite on some rank, after its reduction; `full`: this
        rank's, before."""
        num_not_finite, num_sent = int((~full.isfinite()).sum()), 0
        if self._compress == "topk":
            num_sent = count_topk_elements(full.numel(), self._fraction)
        self.overflows[gradient.name] = Overflow(
            is_unseen=bool(gradient.tensor.isfinite().all()),
            keeps_error=num_not_finite > num_sent,
        )

    def _average_over_ranks(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The mean over ranks of each tensor. Collective."""
        # One collective for all: with many it is these that take the time.
        flat = self._mesh.all_reduce_sum(torch.cat([tensor.flatten() for tensor in tensors]))
        flat /= self._mesh.world_size
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]

    def _check_powersgd_width(self, gradient: Gradient, q: torch.Tensor | None) -> None:
        """Record a gradient that travels in more or fewer columns than `compress_rank` says."""
        width = 0 if q is None else q.shape[1]
        expected = plain_powersgd_width(gradient.tensor.shape, self._rank)
        if width != expected:
            words = f"powersgd sends {_describe_width(width)}, and not {_describe_width(expected)}"
            error = abs(width - expected) / max(width, expected)
            self.faults.append((self._step, gradient.name, error, words))

    def _find_powersgd_excess(
        self, gradient: Gradient, mean: torch.Tensor, q: torch.Tensor | None, rank_norm: float
    ) -> float:
        """The distance of what was sent from the definition's, which begins with `q` that the
        hook has found; 0 within rounding. A gradient that is not compressed must be the mean.

        From step to step the matrix is judged by itself: roundings of a step before are then none
        of this one.
        """
        size = float(mean.double().norm())
        if not size:
            return float(gradient.tensor.abs().max())
        expected, allowed = mean.double(), 0.0
        if q is not None:
            previous_q = self._left_q.get(gradient.name)
            if previous_q is not None and not torch.equal(previous_q, q):
                return float((previous_q - q).double().norm() / previous_q.double().norm())
            sent, allowed = plain_powersgd_step(mean.flatten(1), q, rank_norm)
            expected = sent.view_as(mean)
        dtype = str(mean.dtype).removeprefix("torch.")
        allowed = max(TOLERANCE_OF_DTYPE[dtype], allowed)
        errors = [float((gradient.tensor.double() - expected).norm()) / size]
        if q is not None:
            errors.append(
                plain_powersgd_matrix_error(
                    gradient.tensor.flatten(1), gradient.slots[POWERSGD_MATRIX]
                )
            )
        # NaN is above any.
        if all(error <= allowed for error in errors):
            return 0.0
        return max(errors)
