"""`Action` and `Schedule`: what each rank of a pipeline does, in which order, as frozen data and as
CSV.

A CSV file has one line per rank and one action per cell ("0F0,0F1,0B0,..."), no sends and receives:
the format that `_PipelineScheduleRuntime._load_csv(path, format="compute_only")` of torch reads.
Empty cells are bubbles, which mean nothing here, since an action begins when its input is there;
`(0F1;7B0)OVERLAP_F_B` is a forward and a backward that torch may overlap, read as two actions one
after the other.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from phalanx.core.errors import LayoutError
from phalanx.core.files import read_regular, write_bytes_atomic

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
        """The action that `text` names. Raises LayoutError for anything but stage, one of F B I
        W, microbatch."""
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise LayoutError(
                f"{text.strip()[:40]!r} is no action",
                fix="an action is stage, F, B, I or W, microbatch: 3F0",
            )
        stage, kind, microbatch = match.groups()
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
        """The way in which stages lie on ranks: "loop", "v", or "own" for any other."""
        if self.num_stages % self.num_ranks == 0:
            for name, placement in (("loop", loop_placement), ("v", v_placement)):
                if self.rank_of_stage == placement(
                    self.num_ranks, self.num_stages // self.num_ranks
                ):
                    return name
        return "own"

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of `rank`, in ascending order."""
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
    forth = tuple(range(num_ranks))
    turns: Iterable[tuple[int, ...]] = (
        forth[::-1] if turn % 2 else forth for turn in range(stages_per_rank)
    )
    return tuple(rank for turn in turns for rank in turn)


_OVERLAP = re.compile(r"\((?P<pair>[^()]*)\)OVERLAP_F_B")
_SENDS = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")


def read_schedule(path: Path) -> Schedule:
    """The schedule that a CSV file holds; whether it can run is for `find_problems` to say.

    A stage belongs to the rank that names it first. Raises LayoutError with line and cell for what
    is no action.
    """
    try:
        rows = list(csv.reader(io.StringIO(read_regular(path).decode("utf-8"), newline="")))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise LayoutError("the schedule cannot be read", where=str(path), why=reason) from None
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    actions = tuple(tuple(_parse_row(path, line, cells)) for line, cells in enumerate(rows, 1))
    if not actions:
        raise LayoutError(
            "the schedule is empty", where=str(path), fix="write one line per rank: 0F0,0F1,0B0,0B1"
        )
    return _build_schedule(path, actions)


def write_schedule(schedule: Schedule, path: Path) -> None:
    """Writes a schedule as CSV. Raises OSError."""
    write_bytes_atomic(path, schedule_to_csv(schedule).encode())


def schedule_to_csv(schedule: Schedule) -> str:
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.actions)


def _parse_row(path: Path, line: int, cells: list[str]) -> Iterator[Action]:
    for number, cell in enumerate(cells, 1):
        text = cell.strip()
        pair = _OVERLAP.fullmatch(text)
        for part in pair["pair"].split(";") if pair else [text] if text else []:
            try:
                yield Action.from_text(part)
            except LayoutError as error:
                where = f"{path}:{line}: cell {number}"
                if _SENDS.fullmatch(part):
                    why = (
                        "sends, receives and gathers follow from the actions and are not written"
                        " down"
                    )
                    raise LayoutError(f"{part} is no computation", where=where, why=why) from None
                raise LayoutError(error.what, where=where, fix=error.fix) from None


def _build_schedule(path: Path, actions: tuple[tuple[Action, ...], ...]) -> Schedule:
    owners: dict[int, int] = {}
    for rank, row in enumerate(actions):
        for action in row:
            owners.setdefault(action.stage, rank)
    microbatches = {action.microbatch for row in actions for action in row}
    for noun, numbers in (("stage", set(owners)), ("microbatch", microbatches)):
        if len(numbers) <= max(numbers):
            gap = next(number for number in range(len(numbers) + 1) if number not in numbers)
            raise LayoutError(
                f"no rank has {noun} {gap}",
                where=str(path),
                why=f"there is a {noun} {max(numbers)}",
            )
    rank_of_stage = tuple(owners[stage] for stage in range(len(owners)))
    return Schedule(path.stem, len(microbatches), rank_of_stage, actions)
