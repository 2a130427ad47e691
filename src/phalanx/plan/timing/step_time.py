"""`StepTime`: the predicted seconds of one step, by what takes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STEP_TERMS = (
    "ideal",
    "matmul loss",
    "attention",
    "elementwise",
    "tp",
    "cp",
    "ep",
    "bubble",
    "dp exposed",
    "optimizer",
    "offload",
    "launch",
    "jitter",
)
"""What a step's time is made of, in the order of a waterfall.

ideal: the model's matrix products at the data sheet's peak, on all ranks. matmul loss: what they
take beyond that, products that are recomputed among it. launch: waiting for the CPU. dp exposed:
gradients and parameters that travel beside no computation.
"""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step by term, in the order of STEP_TERMS; `low_s` to `high_s` is the interval
    that should hold 80 % of the measured steps."""

    terms: Mapping[str, float]
    low_s: float
    high_s: float

    @property
    def total_s(self) -> float:
        return sum(self.terms.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "terms": dict(self.terms),
            "total_s": self.total_s,
            "low_s": self.low_s,
            "high_s": self.high_s,
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> StepTime:
        return cls(dict(body["terms"]), body["low_s"], body["high_s"])
