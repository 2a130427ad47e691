"""The file of a comparison's rows, written as they come, and what all of them have in common.

Torch-free.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

from phalanx.bench.training.drive import TrainBenchRequest
from phalanx.bench.training.layouts import ComparedJob
from phalanx.bench.training.summary import Standing, TurnRow
from phalanx.core.cores import count_allowed_cores
from phalanx.core.disk_errors import build_path_resource_error
from phalanx.core.errors import UsageError
from phalanx.core.files import (
    open_lines_for_append,
    open_regular_file_for_append,
    parse_json,
    read_bounded_lines,
)
from phalanx.plan.profiles import read_cpu_name

ROWS_SCHEMA = "phalanx.bench-train-row/1"


@dataclass(frozen=True)
class RowsFile:
    """Rows as lines of JSON: one of the comparison, one of each turn, one of each contender."""

    file: BinaryIO

    def write_comparison(self, request: TrainBenchRequest) -> None:
        """Write what the rows after it have in common."""
        compared = request.compared
        facts = {
            "began": time.strftime("%Y-%m-%dT%H:%M:%S"),
            **describe_setting(compared),
            "job": compared.job.to_json(),
            "contenders": [
                {**contender.to_json(), "version": contender.find_version() or None}
                for contender in request.contenders
            ],
        }
        self._write("comparison", facts)

    def write_turn(self, row: TurnRow) -> None:
        """Write a turn, at once."""
        self._write("turn", row.to_json())

    def write_standing(self, standing: Standing) -> None:
        """Write how a contender came out."""
        self._write("standing", standing.to_json())

    def _write(self, kind: str, facts: dict[str, Any]) -> None:
        row = {"schema": ROWS_SCHEMA, "row": kind, **facts}
        self.file.write(json.dumps(row).encode() + b"\n")
        self.file.flush()


@contextmanager
def open_rows(path: Path) -> Iterator[RowsFile]:
    """The file at `path`, to which rows are appended.

    Raises UsageError for a file that holds anything else than such rows, ResourceError for one that
    cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_regular_file_for_append(path) as file:
            file.seek(0)
            first = next(read_bounded_lines(file), b"")
        _require_row(first, path)
        file = open_lines_for_append(path)
    except OSError as error:
        raise build_path_resource_error(error, "opening the file of rows", path) from None
    with file:
        yield RowsFile(file)


def _require_row(first: bytes, path: Path) -> None:
    """Raise UsageError for the first line of a file that is no row; an empty one has none."""
    if not first:
        return
    try:
        row = parse_json(first)
    except ValueError:
        row = None
    if not isinstance(row, dict) or row.get("schema") != ROWS_SCHEMA:
        raise UsageError(
            "is there already, and holds no rows of phalanx bench train; nothing is added to it",
            where=str(path),
            fix="give another file to --out",
        )


def describe_setting(compared: ComparedJob) -> dict[str, Any]:
    """The machine, the versions and the size of the training."""
    plan = compared.plan
    return {
        "num_ranks": compared.num_ranks,
        "cores": count_allowed_cores(),
        "cpu": read_cpu_name(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "num_params": plan.num_params,
        "precision": plan.precision,
        "global_batch_size": plan.global_batch_size,
        "seq_len": plan.seq_len,
        "changed": list(compared.notes),
    }
