"""Explains gradients that are all off by a factor, by what the factor is.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.verify.compare import TraceComparison
from phalanx.verify.factors import FactorExplainer, format_factor, is_nearly_equal


class ScaleDiagnosis:
    """Explains gradients that are all off by a factor, one for all ranks or one for each."""

    def __init__(self, compared: TraceComparison, factors: FactorExplainer) -> None:
        self._compared, self._factors = compared, factors
        self._trace, self._observations = compared.trace, compared.observations

    def explain(self, kind: str, off: Sequence[str], step: int) -> str:
        """The cause of gradients that are all off by a factor, one for all ranks or one for each;
        "" if they are not."""
        # A factor of everything is off everywhere.
        if len(off) != len(self._trace.order):
            return ""
        factors: list[float] = []
        for rank in range(len(self._observations)):
            factor = self._compared.find_multiple_of_reference(kind, off, rank)
            if factor is None:
                return ""
            factors.append(factor)
        if max(factors) - min(factors) <= 1e-4 * max(map(abs, factors)):
            return self._explain_one_factor(factors[0], step)
        if cause := self._explain_unclipped_ranks(factors, step):
            return cause
        off_ranks = [
            (rank, factor) for rank, factor in enumerate(factors) if not is_nearly_equal(factor, 1)
        ]
        listed = ", ".join(
            f"{format_factor(factor)} on rank {rank}" for rank, factor in off_ranks[:4]
        )
        cause = (
            "clipped by local norms"
            if self._trace.steps[step].max_norm is not None
            else "what a rank multiplies them with, or divides them by, is a number of its own"
        )
        return f"each rank scaled its gradients by a factor of its own ({listed}): {cause}"

    def _explain_one_factor(self, factor: float, step: int) -> str:
        """The cause of gradients that are all off by `factor`, on all ranks."""
        if factor == 0:
            return (
                "every gradient is zero: gradients were not reduced into the parameters, or were"
                " cleared before the update"
            )
        if cause := self._explain_factor_of_clipping(step, factor):
            return cause
        sentence = self._factors.describe("every gradient", factor, step)
        if self._factors.explain(factor, step):
            return sentence
        return (
            f"{sentence}, and the loss agrees: what their sum is multiplied with, or divided by"
            " (data-parallel ranks, targets, a loss scale), is another number"
        )

    def _explain_factor_of_clipping(self, step: int, factor: float) -> str:
        """The cause of a factor that is the one of clipping; "" for another factor."""
        reference = self._trace.steps[step]
        if reference.max_norm is None:
            return ""
        clipped = reference.max_norm / reference.grad_norm
        for expected, words in ((clipped, "clipped twice"), (1 / clipped, "not clipped")):
            if abs(factor / expected - 1) < 1e-3:
                return f"every gradient is {format_factor(factor)} the reference: {words}"
        norm_factor = self._observations[0]["norms"][step] / reference.grad_norm
        was_off_before = abs(norm_factor / factor - 1) < 0.1 * abs(factor - 1)
        # The steps before agree, and they were not clipped.
        if step == 1 and not was_off_before:
            return (
                f"every gradient is {format_factor(factor)} the reference, in the first step that"
                " is clipped: it is clipped to another norm than the bound"
            )
        return ""

    def _explain_unclipped_ranks(self, factors: Sequence[float], step: int) -> str:
        """The cause of gradients that are clipped on some ranks alone; "" if they are not."""
        reference = self._trace.steps[step]
        if reference.max_norm is None:
            return ""
        inverse = reference.grad_norm / reference.max_norm
        unclipped = [
            rank for rank, factor in enumerate(factors) if is_nearly_equal(factor, inverse)
        ]
        if not unclipped or not all(
            is_nearly_equal(f, inverse) or is_nearly_equal(f, 1.0) for f in factors
        ):
            return ""
        return (
            f"gradients are not clipped on rank {', '.join(map(str, unclipped))}, and on the others"
            " they are"
        )
