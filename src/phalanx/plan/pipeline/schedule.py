"""`Action` and `Schedule`: what each rank of a pipeline does, in which order, as frozen data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from phalanx.core.errors import LayoutError

Kind = Literal["F", "B", "I", "W"]
KIND_NAMES: dict[Kind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "backward, inputs",
    "W": "backward, weights",
}

_ACTION = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work: `kind` of `microbatch` in `stage`.

    Text is stage, kind, microbatch: 3F0.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def from_text(cls, text: str) -> Action:
        """Raises LayoutError for anything but stage, one of F B I W, microbatch."""
        found = _ACTION.fullmatch(text.strip())
        if found is None:
            raise LayoutError(
                f"{text.strip()[:40]!r} is no action",
                fix="an action is stage, F, B, I or W, microbatch: 3F0",
            )
        stage, kind, microbatch = found.groups()
        return cls(kind, int(stage), int(microbatch))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Schedule:
    """The actions of each rank in order; `rank_of_stage[s]` holds stage s."""

    name: str
    num_microbatches: int
    rank_of_stage: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        return len(self.rank_of_stage)

    @property
    def placement(self) -> str:
        """How stages lie on ranks: "loop", "v", or "own" for any other way."""
        if self.num_stages % self.num_ranks == 0:
            for name, place in (("loop", loop_placement), ("v", v_placement)):
                if self.rank_of_stage == place(self.num_ranks, self.num_stages // self.num_ranks):
                    return name
        return "own"

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """In ascending order."""
        return tuple(stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "num_microbatches": self.num_microbatches,
            "rank_of_stage": list(self.rank_of_stage),
            "actions": [",".join(map(str, row)) for row in self.actions],
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Schedule:
        rows = (row.split(",") if row else () for row in body["actions"])
        actions = tuple(tuple(map(Action.from_text, row)) for row in rows)
        return cls(body["name"], body["num_microbatches"], tuple(body["rank_of_stage"]), actions)


def loop_placement(num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Rank r holds stages r, r + p, r + 2p: the last rank sends to the first."""
    return tuple(range(num_ranks)) * stages_per_rank


def v_placement(num_ranks: int, stages_per_rank: int = 2) -> tuple[int, ...]:
    """Rank r holds stages r and 2p - 1 - r: there and back, so that first and last stage share a
    rank."""
    there = tuple(range(num_ranks))
    turns: Iterable[tuple[int, ...]] = (
        there[::-1] if turn % 2 else there for turn in range(stages_per_rank)
    )
    return tuple(rank for turn in turns for rank in turn)
