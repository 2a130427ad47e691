"""What is said of one layout. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.verify.number_types import WIDE_DTYPES
from phalanx.verify.routing_differences import RoutingChange

ROWS_FILE_NAME = "rows.jsonl"
DEFAULT_DTYPES = WIDE_DTYPES
# Enough for what begins late, and for moments to have a past.
NUM_STEPS = 6
MAX_SEQ_LEN = 64
"""So many tokens of longer sequences are judged, if nobody asks for more."""
NO_STEP = -1
"""The step of a difference that is no step's."""
EVALUATED_TARGETS = "number of evaluated targets"
OVERFLOW = "overflow of compressed gradients"
# What the differences are called that belong to no step.
WITHOUT_STEP = (
    *("initial weight", "initial distribution", "evaluation loss"),
    *(EVALUATED_TARGETS, OVERFLOW),
)


@dataclass(frozen=True)
class Difference:
    """The first thing that differs.

    `rank` is where most of the error is; `ranks` are all that see one.

    `schedule`: that of a pipeline; `stages`: which of its stages hold the tensor.
    """

    what: str  # "initial weight" | "loss" | "gradient norm" | "gradient" | "weight" | ...
    name: str
    step: int
    error: float
    rank: int
    ranks: tuple[int, ...]
    held: str
    cause: str
    stages: tuple[int, ...] = ()
    schedule: str = ""
    origin: str = ""
    """Of a loss: where the forward begins to go wrong, in words; "" where nobody saw it."""

    def __str__(self) -> str:
        text = self.what
        if self.name:
            text += f" {self.name}"
        text += f" is off by {self.error:.1e}"
        if self.what not in WITHOUT_STEP and self.step != NO_STEP:
            text += f" in step {self.step + 1}"
        if self.name and self.step != NO_STEP:
            text += f", on rank {self.rank}"
            if len(self.ranks) > 1:
                text += f" and {len(self.ranks) - 1} more"
            text += f" ({self.held})"
        if self.stages:
            noun = "stages" if len(self.stages) > 1 else "stage"
            text += f", of {noun} {' and '.join(map(str, self.stages))}"
        if self.schedule:
            text += f", in schedule {self.schedule}"
        if self.origin:
            text += f"; {self.origin}"
        return text


@dataclass(frozen=True)
class Row:
    """One layout of one model in one type. `refused` says why nothing was run."""

    layout: str
    parallel: Mapping[str, Any]
    model: str
    dtype: str
    ok: bool | None
    errors: Mapping[str, float]
    tolerance: float
    first: Difference | None = None
    refused: str = ""
    crashed: str = ""
    notes: tuple[str, ...] = ()
    judged: tuple[str, ...] = ()
    """What was compared, in words; `ok` is said of that alone."""
    not_judged: tuple[str, ...] = ()
    """What the layout has and nobody compared, in words."""
    compress: str = "none"
    """How gradients were compressed: `ok` is then not equality, and a note says what it is."""
    flips: tuple[RoutingChange, ...] = ()
    """Near-ties of routers that the layout turns: `ok` is then equality with one process that
    routes as it does."""
    extent: str = ""
    """How little of the model tp cuts, in words, where it leaves most of it whole: `ok` says less
    then."""
    wall_s: float = 0.0

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Row:
        """The row that `to_json` wrote.

        The texts of differences and flips follow from their values.
        """
        first = body["first"]
        if first is not None:
            # JSON has no tuples.
            stages = {"ranks": tuple(first["ranks"]), "stages": tuple(first["stages"])}
            first = Difference(**_drop_text_key(first) | stages)
        flips = tuple(RoutingChange(**_drop_text_key(flip)) for flip in body["flips"])
        tuples = {key: tuple(body.get(key, ())) for key in ("notes", "judged", "not_judged")}
        return cls(**{**body, **tuples, "first": first, "flips": flips})

    def to_json(self) -> dict[str, Any]:
        flips = [asdict(flip) | {"text": str(flip)} for flip in self.flips]
        return asdict(self) | {
            "flips": flips,
            "first": asdict(self.first) | {"text": str(self.first)} if self.first else None,
        }


def _drop_text_key(body: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key != "text"}
