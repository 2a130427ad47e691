"""Schedules as CSV: one line per rank, one action per cell ("0F0,0F1,0B0,..."), no sends and
receives.

The format that `_PipelineScheduleRuntime._load_csv(path, format="compute_only")` of torch reads:
empty cells are bubbles, which mean nothing here, since an action begins when its input is there;
`(0F1;7B0)OVERLAP_F_B` is a forward and a backward that torch may overlap, read as two actions one
after the other.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path

from phalanx.core.errors import LayoutError
from phalanx.core.files import read_regular, write_bytes_atomic
from phalanx.plan.pipeline.schedule import Action, Schedule

_OVERLAP = re.compile(r"\((?P<pair>[^()]*)\)OVERLAP_F_B")
_SENDS = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")


def read_schedule(path: Path) -> Schedule:
    """What the file says; whether it can run is for `check` to say.

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
    actions = tuple(tuple(_row(path, line, cells)) for line, cells in enumerate(rows, 1))
    if not actions:
        raise LayoutError(
            "the schedule is empty", where=str(path), fix="write one line per rank: 0F0,0F1,0B0,0B1"
        )
    return _schedule(path, actions)


def write_schedule(schedule: Schedule, path: Path) -> None:
    """Raises OSError."""
    write_bytes_atomic(path, to_csv(schedule).encode())


def to_csv(schedule: Schedule) -> str:
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.actions)


def _row(path: Path, line: int, cells: list[str]) -> Iterator[Action]:
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


def _schedule(path: Path, actions: tuple[tuple[Action, ...], ...]) -> Schedule:
    owners: dict[int, int] = {}
    for rank, row in enumerate(actions):
        for action in row:
            owners.setdefault(action.stage, rank)
    microbatches = {action.microbatch for row in actions for action in row}
    for noun, found in (("stage", set(owners)), ("microbatch", microbatches)):
        if len(found) <= max(found):
            gap = next(number for number in range(len(found) + 1) if number not in found)
            raise LayoutError(
                f"no rank has {noun} {gap}", where=str(path), why=f"there is a {noun} {max(found)}"
            )
    rank_of_stage = tuple(owners[stage] for stage in range(len(owners)))
    return Schedule(path.stem, len(microbatches), rank_of_stage, actions)
