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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from phalanx.core.errors import LayoutError
from phalanx.core.files import read_whole_regular_file, write_bytes_atomically

ActionKind = Literal["F", "B", "I", "W"]
NAME_OF_ACTION_KIND: dict[ActionKind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "backward, inputs",
    "W": "backward, weights",
}
# [0-9] and not \d, which takes the digits of every script.
_ACTION_PATTERN = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")


class Action(NamedTuple):
    """One piece of work: `kind` of `microbatch` in `stage`.

    Text is stage, kind, microbatch: 3F0. A schedule has a hundred thousand of them, which is why
    they are tuples.
    """

    kind: ActionKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def from_text(cls, text: str) -> Action:
        """The action that `text` names. Raises LayoutError for anything but stage, one of F B I
        W, microbatch."""
        match = _ACTION_PATTERN.fullmatch(text.strip())
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
        stages_per_rank, remainder = divmod(self.num_stages, self.num_ranks)
        if remainder:
            return "own"
        if self.rank_of_stage == place_stages_in_loop(self.num_ranks, stages_per_rank):
            return "loop"
        if self.rank_of_stage == place_stages_in_v(self.num_ranks, stages_per_rank):
            return "v"
        return "own"

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
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
        rows = []
        for text in body["actions"]:
            cells = []
            if text:  # "" is a rank without actions
                cells = text.split(",")
            rows.append(tuple(map(Action.from_text, cells)))
        rank_of_stage = tuple(body["rank_of_stage"])
        return cls(body["name"], body["num_microbatches"], rank_of_stage, tuple(rows))


def place_stages_in_loop(num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Rank r holds stages r, r + p, r + 2p: the last rank sends to the first."""
    return tuple(range(num_ranks)) * stages_per_rank


def place_stages_in_v(num_ranks: int, stages_per_rank: int = 2) -> tuple[int, ...]:
    """Rank r holds stages r and 2p - 1 - r: there and back, so that first and last stage share a
    rank."""
    outward = tuple(range(num_ranks))
    placement: list[int] = []
    for turn in range(stages_per_rank):
        if turn % 2 == 0:
            placement += outward
        else:
            placement += outward[::-1]
    return tuple(placement)


# What torch writes into such a file besides actions: pairs that it may overlap, and communication.
_OVERLAP_PATTERN = re.compile(r"\((?P<pair>[^()]*)\)OVERLAP_F_B")
_COMMUNICATION_PATTERN = re.compile(
    r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*"
)


def load_schedule_csv(path: Path) -> Schedule:
    """The schedule that a CSV file holds; whether it can run is for `find_schedule_problems` to
    say.

    A stage belongs to the rank that names it first. Raises LayoutError with line and cell for what
    is no action.
    """
    try:
        # newline="" leaves the ends of lines to csv, which knows those inside of quotes.
        rows = list(
            csv.reader(io.StringIO(read_whole_regular_file(path).decode("utf-8"), newline=""))
        )
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason: str | None = str(error)
        if isinstance(error, OSError):
            reason = error.strerror
        raise LayoutError("the schedule cannot be read", where=str(path), why=reason) from None
    # Empty lines at the end are the editor's: no ranks without actions.
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    actions = tuple(
        tuple(_parse_schedule_row(path, line, cells)) for line, cells in enumerate(rows, 1)
    )
    if not actions:
        raise LayoutError(
            "the schedule is empty", where=str(path), fix="write one line per rank: 0F0,0F1,0B0,0B1"
        )
    return _build_schedule_from_rows(path, actions)


def save_schedule_csv(schedule: Schedule, path: Path) -> None:
    """Writes a schedule as CSV. Raises OSError."""
    write_bytes_atomically(path, format_schedule_csv(schedule).encode())


def format_schedule_csv(schedule: Schedule) -> str:
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.actions)


def _parse_schedule_row(path: Path, line: int, cells: list[str]) -> Iterator[Action]:
    for number, cell in enumerate(cells, 1):
        for part in _split_csv_cell(cell):
            try:
                yield Action.from_text(part)
            except LayoutError as error:
                where = f"{path}:{line}: cell {number}"
                if _COMMUNICATION_PATTERN.fullmatch(part):
                    why = (
                        "sends, receives and gathers follow from the actions and are not written"
                        " down"
                    )
                    raise LayoutError(f"{part} is no computation", where=where, why=why) from None
                raise LayoutError(error.what, where=where, fix=error.fix) from None


def _split_csv_cell(cell: str) -> list[str]:
    """The texts of the actions in a cell: none for a bubble, two where torch may overlap them."""
    text = cell.strip()
    if not text:
        return []
    overlap = _OVERLAP_PATTERN.fullmatch(text)
    if overlap:
        return overlap["pair"].split(";")
    return [text]


def _build_schedule_from_rows(path: Path, actions: tuple[tuple[Action, ...], ...]) -> Schedule:
    owners: dict[int, int] = {}
    for rank, row in enumerate(actions):
        for action in row:
            # The first to name it: another rank that does is a problem for `find_schedule_problems`
            # to tell.
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
