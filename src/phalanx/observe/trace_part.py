"""The part of a trace that one rank writes: RUN/traces/rank-NNNN-attempt-NN-steps-A-B.jsonl.

One line of JSON has rows of one kind, with the texts that they refer to. Lines are added at the end
of each traced step, so that a rank that dies in a later one leaves the steps before. A part has an
end line when its rank has written all of it. `phalanx.report.trace` makes the parts of all ranks
one file for Perfetto.

All times are nanoseconds of the monotonic clock that the header names, the one that events carry
as `monotonic_s`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from phalanx.core.files import (
    APPEND_FLAGS,
    open_regular_file,
    open_regular_file_descriptor,
    read_bounded_lines,
)
from phalanx.core.step_ranges import StepRange
from phalanx.core.typed_json import JsonRecord, TypedJsonError
from phalanx.observe.trace_rows import ROW_CLASS_OF_KIND, TraceRow

TRACES = "traces"
PART_SCHEMA = "phalanx.trace-part/1"
# About 40 MB of one rank; what comes beyond is counted.
MAX_ROWS_PER_PART = 500_000
# A line stays far below what readers of lines accept.
_MAX_ROWS_PER_LINE = 5_000
_MAX_TEXT_CHARACTERS = 500
_PART_NAME_PATTERN = re.compile(
    r"rank-(\d{1,9})-attempt-(\d{1,9})-steps-(\d{1,12})-(\d{1,12})\.jsonl"
)
_MAX_INTEGER = 2**63
_MAX_WORLD_SIZE = 2**20
_KIND_OF_ROW_CLASS = {row_class: kind for kind, row_class in ROW_CLASS_OF_KIND.items()}


@dataclass(frozen=True)
class TracePartHeader(JsonRecord):
    """The rank that wrote a part, and the steps that it was to trace.

    `clock` names its monotonic clock, `reference_clock` that of rank 0; where they are one, times
    of both can be compared. `coordinates`: its place along the axes, in words.
    """

    schema: str
    rank: int
    world_size: int
    attempt: int
    first_step: int
    last_step: int
    has_operators: bool
    device: str
    host: str
    pid: int
    clock: str
    reference_clock: str
    coordinates: str = ""


@dataclass
class TracePart:
    """A part as it was read. `is_complete`: its rank has written the end of it.

    `num_dropped` rows went beyond MAX_ROWS_PER_PART; `num_unreadable` lines were none.
    """

    header: TracePartHeader
    rows: dict[str, list[Any]] = field(default_factory=dict)
    is_complete: bool = False
    num_dropped: int = 0
    num_unreadable: int = 0

    def of_kind(self, kind: str) -> list[Any]:
        return self.rows.get(kind, [])


class TracePartError(Exception):
    """A file is no part of a trace that this version can read."""


class TracePartPath(NamedTuple):
    """A part by its name."""

    rank: int
    attempt: int
    steps: StepRange
    path: Path


def trace_part_path(run_dir: Path, rank: int, attempt: int, steps: StepRange) -> Path:
    name = f"rank-{rank:04d}-attempt-{attempt:02d}-steps-{steps.first}-{steps.last}.jsonl"
    return run_dir / TRACES / name


def list_trace_parts(run_dir: Path) -> list[TracePartPath]:
    """The parts of a run by rank, told by their names alone."""
    parts = []
    try:
        names = sorted(os.listdir(run_dir / TRACES))
    except OSError:
        return []
    for name in names:
        match = _PART_NAME_PATTERN.fullmatch(name)
        if match is not None:
            rank, attempt, first, last = map(int, match.groups())
            path = run_dir / TRACES / name
            parts.append(TracePartPath(rank, attempt, StepRange(first, last), path))
    return sorted(parts)


class TracePartWriter:
    """Writes a part. A disk that refuses it ends the part, not the training: see `refusal`."""

    def __init__(self, path: Path, header: TracePartHeader, *, may_write: bool = True) -> None:
        """`may_write`: False where the run is another job's by now, and nothing is written."""
        self.refusal: OSError | None = None
        self._num_rows = self._num_dropped = 0
        self._fd = -1
        if not may_write:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Of an attempt whose number came again after its events were removed.
            path.unlink(missing_ok=True)
            self._fd = open_regular_file_descriptor(path, APPEND_FLAGS)
        except OSError as error:
            self.refusal = error
        self._write_line(dict(header.to_json()))

    def write_rows(self, rows: Sequence[TraceRow]) -> None:
        """Append rows, which are all of one kind."""
        num_left = max(0, MAX_ROWS_PER_PART - self._num_rows)
        self._num_dropped += max(0, len(rows) - num_left)
        rows = rows[:num_left]
        self._num_rows += len(rows)
        for start in range(0, len(rows), _MAX_ROWS_PER_LINE):
            self._write_rows_in_one_line(rows[start : start + _MAX_ROWS_PER_LINE])

    def _write_rows_in_one_line(self, rows: Sequence[TraceRow]) -> None:
        numbers: dict[str, int] = {}
        coded = []
        for row in rows:
            values: list[int] = []
            for value in row:
                if isinstance(value, str):
                    value = numbers.setdefault(value[:_MAX_TEXT_CHARACTERS], len(numbers))
                values.append(int(value))
            coded.append(values)
        kind = _KIND_OF_ROW_CLASS[type(rows[0])]
        self._write_line({"kind": kind, "texts": list(numbers), "rows": coded})

    def count_dropped(self, num_dropped: int) -> None:
        """Count rows that were left out before they came here."""
        self._num_dropped += num_dropped

    def close(self, *, is_complete: bool) -> None:
        """Write the end of the part, if it has all of its steps, and close it."""
        if is_complete:
            self._write_line({"kind": "end", "num_dropped": self._num_dropped})
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
        self._fd = -1

    def _write_line(self, document: dict[str, Any]) -> None:
        if self.refusal is not None or self._fd < 0:
            return
        data = json.dumps(document, separators=(",", ":")).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            # What was written of the line is one that readers leave out.
            self.refusal = error


def is_trace_part_complete(path: Path) -> bool:
    """True if the part at `path` has its end: whoever waits for it reads its last bytes alone."""
    try:
        with open_regular_file(path) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            file.seek(max(0, num_bytes - 100))
            last = file.read().rstrip(b"\n").rpartition(b"\n")[2]
        return bool(json.loads(last)["kind"] == "end")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def read_trace_part_header(path: Path) -> TracePartHeader:
    """The header of a part. Raises TracePartError."""
    try:
        with open_regular_file(path) as file:
            return _parse_header(next(read_bounded_lines(file), b""))
    except OSError as error:
        raise TracePartError(error.strerror or str(error)) from None


def read_trace_part(path: Path) -> TracePart:
    """Read a part; lines that are torn or no rows are counted and left out.

    Raises TracePartError for a file without a header of this schema, or one that cannot be read.
    """
    try:
        with open_regular_file(path) as file:
            lines = read_bounded_lines(file)
            part = TracePart(_parse_header(next(lines, b"")))
            for line in lines:
                if not _add_line(part, line):
                    part.num_unreadable += 1
    except OSError as error:
        raise TracePartError(error.strerror or str(error)) from None
    return part


def _parse_header(line: bytes) -> TracePartHeader:
    try:
        document = json.loads(line)
        schema = document["schema"]
        if schema != PART_SCHEMA:
            raise TracePartError(f"its schema is {str(schema)[:40]!r}, and {PART_SCHEMA} is read")
        header = TracePartHeader.from_json(document)
        if not 0 <= header.rank < header.world_size <= _MAX_WORLD_SIZE:
            raise TracePartError(f"it is of rank {header.rank} of {header.world_size}")
        return header
    except (ValueError, KeyError, TypeError, TypedJsonError, RecursionError):
        raise TracePartError("it has no header of a part of a trace") from None


def _add_line(part: TracePart, line: bytes) -> bool:
    """Add the rows of a line to `part`; False if it has none."""
    try:
        document = json.loads(line)
        kind = document["kind"]
        if kind == "end":
            part.num_dropped = int(document["num_dropped"])
            part.is_complete = True
            return True
        rows = _decode_rows(ROW_CLASS_OF_KIND[kind], document["texts"], document["rows"])
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return False
    part.rows.setdefault(kind, []).extend(rows)
    return True


def _decode_rows(
    row_class: type[Any], texts: Sequence[Any], coded: Iterable[Sequence[Any]]
) -> list[Any]:
    """Rows of a line. Raises ValueError, TypeError or IndexError for what is none."""
    if not all(type(text) is str for text in texts):
        raise TypeError("texts")
    is_text = [kind is str for kind in get_type_hints(row_class).values()]
    rows = []
    for values in coded:
        if len(values) != len(is_text):
            raise ValueError("another number of values")
        decoded: list[int | str] = []
        for value, refers_to_text in zip(values, is_text, strict=True):
            # By exact type: true is an int in Python.
            if type(value) is not int or not -_MAX_INTEGER <= value < _MAX_INTEGER:
                raise ValueError("no whole number")
            if refers_to_text:
                if value < 0:
                    raise IndexError(value)
                decoded.append(texts[value])
            else:
                decoded.append(value)
        rows.append(row_class(*decoded))
    return rows
