"""Guards decide about a step at one point, from facts that are the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.errors import NumericsError
from phalanx.parallel.model import StepFacts


@dataclass
class NonFiniteGuard:
    """Skip a step whose loss or gradients are not finite; give up after `limit` in a row (exit 8)."""

    limit: int
    in_a_row: int = 0

    def reason_to_skip(self, step: int, facts: StepFacts) -> str | None:
        if facts.finite:
            self.in_a_row = 0
            return None
        self.in_a_row += 1
        if self.in_a_row > self.limit:
            raise NumericsError(
                f"{self.in_a_row} steps in a row had non-finite gradients, up to step {step}",
                fix="lower optim.lr, lengthen optim.warmup_steps, or continue from an older checkpoint",
            )
        return "nonfinite_gradients"


@dataclass
class NoTargetsGuard:
    """Skip a step in which every target of every rank is masked: it has no loss."""

    def reason_to_skip(self, step: int, facts: StepFacts) -> str | None:
        return "no_targets" if facts.num_targets == 0 else None
