"""The own work of a rank in a step, as its events tell it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from phalanx.observe.events import StepFinished

# The own work of a rank in a step, in which ranks of one stage do the same. Rank 0 records more
# than the others, and saves and evaluations are no steps.
OWN_PHASES = ("data", "host_to_device", "prepare", "forward", "backward", "optimizer")
_WAITING_PHASES = ("collective", "pipeline")
_PHASES_OF_NO_STEP = ("evaluate", "ckpt_prepare", "ckpt_stage", "ckpt_write", "before_commit")
# The kernel also counts what a rank wants a processor for when a wait is over; where waits are many
# and work is short, this share of the work is left.
_MIN_ACTIVE_SHARE = 0.1


@dataclass(frozen=True)
class OwnStep:
    """One step of one rank: seconds of its own work by phase, those in which it waited, those of
    the whole step, processor seconds, and those in which it wanted a processor and had none (0:
    nobody counted)."""

    own_s: Mapping[str, float]
    waiting_s: float
    step_s: float
    cpu_s: float
    queued_s: float = 0.0

    @property
    def self_s(self) -> float:
        return sum(self.own_s.values())

    @property
    def active_s(self) -> float:
        """Seconds of its own work without those in which it had no processor."""
        return max(self.self_s - self.queued_s, _MIN_ACTIVE_SHARE * self.self_s)


def read_own_step(event: StepFinished) -> OwnStep | None:
    """The own work of a rank in a step; None where something that is no step was in it."""
    if any(event.phases_s.get(phase, 0.0) > 0 for phase in _PHASES_OF_NO_STEP):
        return None
    own_s = {phase: event.phases_s.get(phase, 0.0) for phase in OWN_PHASES}
    waiting_s = sum(event.phases_s.get(phase, 0.0) for phase in _WAITING_PHASES)
    if not 0 < sum(own_s.values()) < math.inf:
        return None
    return OwnStep(own_s, waiting_s, event.step_s, event.cpu_s, event.queued_s)


def average_steps(steps: Sequence[OwnStep]) -> OwnStep:
    """What the rank took for one of these steps, in the mean."""
    return OwnStep(
        {phase: fmean(step.own_s.get(phase, 0.0) for step in steps) for phase in OWN_PHASES},
        fmean(step.waiting_s for step in steps),
        fmean(step.step_s for step in steps),
        fmean(step.cpu_s for step in steps),
        fmean(step.queued_s for step in steps),
    )
