"""Guards decide about a step at one point, from facts that are the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.errors import NumericsError
from phalanx.parallel.model import StepFacts


@dataclass
class NonFiniteGuard:
    """Gives up (exit 8) after more than `limit` steps in a row whose loss or gradients were not finite."""

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
        return None
