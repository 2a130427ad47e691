"""Where a step is: phase, part of the model, microbatch. Torch-free."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
BUILD = "build"
LOSS = "loss"
"""The part of a model that the objective is."""


@dataclass(frozen=True)
class StepMoment:
    """A stretch of a step in which one part of the model computes.

    `part` is a module's full name, LOSS, or empty between modules; `microbatch` is -1 outside of
    them.
    """

    phase: str
    part: str = ""
    microbatch: int = -1
    stage: int = -1
    step: int = 0

    def describe(self) -> str:
        """Words for people: "backward of blocks.3, microbatch 0"."""
        words = self.phase
        if self.part:
            words += f" of {self.part}"
        if self.stage >= 0:
            words += f", stage {self.stage}"
        if self.microbatch >= 0:
            words += f", microbatch {self.microbatch}"
        return words

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class MomentLog:
    """The moments of a dry run in their order; the last one is under way."""

    moments: list[StepMoment] = field(default_factory=lambda: [StepMoment(BUILD)])

    @property
    def current(self) -> StepMoment:
        return self.moments[-1]

    @property
    def index(self) -> int:
        return len(self.moments) - 1

    def enter(self, moment: StepMoment) -> None:
        if moment != self.moments[-1]:
            self.moments.append(moment)
