"""The wish to go back to an earlier checkpoint, on which all ranks agree in one step."""

from __future__ import annotations

from dataclasses import dataclass

NONFINITE_WEIGHTS = "nonfinite_weights"
"""The kind of a roll back from weights that no step would be applied to any more."""


@dataclass(frozen=True)
class UnequalSteps:
    """Steps `first_step` to `last_step`, in which replicas that had been equal came to differ.

    By rank: `losses` are the losses of its own samples in each of these steps, `digests` those of
    its weights after the last.
    """

    first_step: int
    last_step: int
    losses: tuple[tuple[float, ...], ...]
    digests: tuple[str, ...]


@dataclass(frozen=True)
class RollBack:
    """Why and how far a run goes back.

    `kind`: "loss_spike" | "corruption" | NONFINITE_WEIGHTS. `step` is the one in which it was
    decided; `not_after_step` is the newest whose checkpoint may be used. `skip_to_sample`: the next
    sample to read after it (-1: as the checkpoint says). `rank` holds the corrupted state, -1 where
    that is not known. `unequal`: where replicas differ and no majority names one of them, what
    ranks computed, to be compared with the same steps done again.
    """

    kind: str
    step: int
    not_after_step: int
    why: str
    skip_to_sample: int = -1
    rank: int = -1
    unequal: UnequalSteps | None = None


class RollBackRequest(Exception):
    """Raised on all ranks in the same step: the attempt ends, and the next one goes back."""

    def __init__(self, roll_back: RollBack) -> None:
        super().__init__(roll_back.why)
        self.roll_back = roll_back
