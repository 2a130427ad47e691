"""`Cause`: what takes a part of each step, its evidence, and what mending it gives."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

CAUSE_KINDS = (
    "straggler",
    "data",
    "communication",
    "bubble",
    "checkpoint",
    "evaluation",
    "host overhead",
    "no processor time",
    "uneven steps",
    "memory bandwidth",
    "optimizer",
    "compute",
)

# Shares of a step (0 to 1), as the tools and guides that this follows have them.
MIN_SHARE = 0.10
"""Below this a cause is not worth a person's time."""
CLEAR_SHARE = 0.20
"""From this on a cause is named without further words."""
MIN_EXPLAINED_SHARE = 0.80
"""So much of the ranks' waiting one rank must explain, or no rank is named."""
COMPUTE_SHARE = 0.80
"""From this on a step is mostly computation."""


@dataclass(frozen=True)
class ExpectedGain:
    """A setting of the job, and the tokens a second with it over those without, by simulating the
    measured steps again: `limit` says whether these are "at most" or "at least" so many."""

    setting: str
    speedup: float
    limit: Literal["at most", "at least"]


@dataclass(frozen=True)
class Cause:
    """A cause of lost time.

    `share` of the steps' time, 0 to 1 (of what lies between steps: of both together). `speedup`:
    how many times faster the measured steps would be without it, by simulating them again; with
    `is_upper_bound` at most so many, as it cannot go away wholly. `rank` is None where it is no
    single rank. `axis`: of communication, "" where nobody knows. `gains`: what is known of single
    settings that mend it.
    """

    kind: str
    share: float
    speedup: float
    subject: str
    evidence: tuple[str, ...]
    action: str
    rank: int | None = None
    phase: str = ""
    axis: str = ""
    is_upper_bound: bool = False
    gains: tuple[ExpectedGain, ...] = ()

    @property
    def lies_between_steps(self) -> bool:
        """True where no step would be faster without it, but training would be."""
        return self.kind == "evaluation"

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "rank": self.rank,
            "phase": self.phase or None,
            "axis": self.axis or None,
            "share": round(self.share, 4),
            "speedup": round(self.speedup, 4),
            "is_upper_bound": self.is_upper_bound,
            "evidence": list(self.evidence),
            "action": self.action,
            "gains": [{**asdict(gain), "speedup": round(gain.speedup, 4)} for gain in self.gains],
        }


@dataclass(frozen=True)
class BottleneckVerdict:
    """The causes that bound a run's steps `first_step` to `last_step`, the largest cause first.

    `causes` is empty where the evidence does not suffice; `why_not` says why. `not_judged`: what
    the events of this run cannot show. `model_flops_utilization`: MFU, 0 to 1, beside products as
    rank 0 measured them, or as the device's data sheet has them where
    `is_utilization_of_data_sheet`; 0 where it is not known. `hardware_flops_utilization`: HFU, the
    same with what is recomputed. `attempt`: the one whose steps they are; not the last one of the
    run where that has too few (`is_of_last_attempt`).
    """

    first_step: int
    last_step: int
    num_steps: int
    num_ranks: int
    mean_step_s: float
    causes: tuple[Cause, ...]
    shares: dict[str, float] = field(default_factory=dict)
    why_not: str = ""
    not_judged: tuple[str, ...] = ()
    model_flops_utilization: float = 0.0
    hardware_flops_utilization: float = 0.0
    is_utilization_of_data_sheet: bool = False
    attempt: int = 0
    is_of_last_attempt: bool = True

    @property
    def main(self) -> Cause | None:
        if self.causes:
            return self.causes[0]
        return None

    def _name_reference_of_utilization(self) -> str | None:
        if not self.model_flops_utilization > 0:
            return None
        if self.is_utilization_of_data_sheet:
            return "data sheet"
        return "measured products"

    def to_json(self) -> dict[str, Any]:
        return {
            "attempt": self.attempt,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "num_steps": self.num_steps,
            "num_ranks": self.num_ranks,
            "mean_step_s": self.mean_step_s,
            "causes": [cause.to_json() for cause in self.causes],
            "shares": {name: round(share, 4) for name, share in self.shares.items()},
            "why_not": self.why_not or None,
            "model_flops_utilization": round(self.model_flops_utilization, 4) or None,
            "hardware_flops_utilization": round(self.hardware_flops_utilization, 4) or None,
            "utilization_of": self._name_reference_of_utilization(),
            "not_judged": list(self.not_judged),
        }
