"""The predicted time of a plan's step on this machine, from what `phalanx bench` measured of it.

Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from phalanx.core.errors import EnvironmentProblem, LayoutError
from phalanx.core.units import format_count, format_seconds
from phalanx.plan.calibrated.step import estimate_step_from_profile
from phalanx.plan.cluster import Cluster, detect_cluster
from phalanx.plan.plan import Plan
from phalanx.plan.profiles import describe_calibration, find_profile_of_cluster
from phalanx.plan.timing.step_time import StepTime


@dataclass(frozen=True)
class PredictedStepTime:
    """The time of a step, None where it cannot be said; and what it is built on, or why not."""

    step: StepTime | None
    basis: str
    tokens_per_step: int

    def describe(self) -> str:
        """One line for a person."""
        if self.step is None:
            return f"time    not predicted ({self.basis})"
        total_s = self.step.total_s
        return (
            f"time    {format_seconds(total_s)}/step ({format_seconds(self.step.low_s)} to"
            f" {format_seconds(self.step.high_s)}),"
            f" {format_count(self.tokens_per_step / total_s)} tokens/s; {self.basis}"
        )

    def to_json(self) -> dict[str, Any]:
        step = None
        if self.step is not None:
            step = self.step.to_json()
        return {"step": step, "basis": self.basis}


def predict_step_time_of_plan(plan: Plan, cluster: Cluster | None = None) -> PredictedStepTime:
    """The time of a step of `plan` on this machine (`cluster`; None: as it is detected)."""
    tokens = plan.global_batch_size * plan.seq_len
    try:
        cluster = cluster or detect_cluster(plan.device)
    except EnvironmentProblem:
        return PredictedStepTime(None, "this machine has no such device", tokens)
    profile = find_profile_of_cluster(cluster)
    basis = describe_calibration(profile)
    if profile is None:
        return PredictedStepTime(None, basis, tokens)
    try:
        return PredictedStepTime(estimate_step_from_profile(plan, profile), basis, tokens)
    except LayoutError as error:
        # The profile lacks an operation: a section was not measured.
        return PredictedStepTime(None, str(error), tokens)
