"""A token that a layout routes otherwise than one process: a near-tie that flipped, or a mistake.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EVALUATION_KIND = "evaluation"


def train_phase_of_step(step: int) -> str:
    """The phase of a step, counted from 0."""
    return f"step-{step}"


@dataclass(frozen=True)
class RoutingChange:
    """One token.

    `row` and `token` say which of the step's batch; one process chooses `expert`, the layout
    `instead`.

    `margin`: how much better the score of `expert` is, bias and all, as a part of the token's
    largest score.
    """

    router: str
    phase: str
    row: int
    token: int
    expert: int
    instead: int
    margin: float

    def when(self) -> str:
        kind, _, step = self.phase.rpartition("-")
        if not kind:
            return "in the evaluation"
        return f"in step {int(step) + 1}"

    def __str__(self) -> str:
        return (
            f"{self.router} {self.when()} sends token {self.token} of row {self.row} to expert"
            f" {self.instead}, one process to {self.expert}: their scores are {self.margin:.1e}"
            " apart"
        )


@dataclass(frozen=True)
class MisroutedToken:
    """A token that goes elsewhere without a near-tie.

    `ranks` route it; `cause` is known, or to be found.
    """

    reroute: RoutingChange
    ranks: tuple[int, ...]
    cause: str = ""

    @property
    def where(self) -> str:
        """The token, and the expert it goes to."""
        reroute = self.reroute
        token = f"token {reroute.token} of row {reroute.row}"
        if reroute.expert >= 0:
            return f"{token} goes to expert {reroute.instead}, not {reroute.expert}"
        return token


def find_misrouted_tokens(
    reroutes: Sequence[RoutingChange], tolerance: float
) -> list[RoutingChange]:
    """The reroutes that are no near-ties: rounding within `tolerance` cannot have turned them."""
    # Not `>`: a margin of NaN is no near-tie.
    return [reroute for reroute in reroutes if not reroute.margin <= tolerance]
