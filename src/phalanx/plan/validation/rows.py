"""Reads a file of rows: one JSON object a line, and what cannot be used counted by reason."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.core.errors import PhalanxError, UsageError
from phalanx.core.files import read_whole_regular_file
from phalanx.plan.validation.row_values import UnusableRow
from phalanx.plan.validation.run import MeasuredRun, build_measured_run

MAX_FILE_BYTES = 2**30


@dataclass(frozen=True)
class UsableRows:
    """The usable rows of a file, and how many others there were, by reason."""

    runs: tuple[MeasuredRun, ...]
    unusable: Mapping[str, int]

    @property
    def num_rows(self) -> int:
        return len(self.runs) + sum(self.unusable.values())


def load_row_file(path: Path) -> UsableRows:
    """The runs of a JSONL file; a bad line is counted and never an error. Raises UsageError for a
    file that cannot be read."""
    try:
        content = read_whole_regular_file(path, MAX_FILE_BYTES)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read", why=error.strerror or str(error), fix="name a JSONL file"
        ) from error
    return parse_row_lines(content)


def parse_row_lines(content: bytes) -> UsableRows:
    """The runs of the lines of `content`."""
    runs: list[MeasuredRun] = []
    unusable: Counter[str] = Counter()
    distinct_lines: set[bytes] = set()
    for line in content.removeprefix(BOM_UTF8).splitlines():
        line = line.strip()
        if not line:
            continue
        if line in distinct_lines:
            unusable["the same line again"] += 1
            continue
        distinct_lines.add(line)
        try:
            runs.append(build_measured_run(_parse_json_object(line)))
        except UnusableRow as reason:
            unusable[str(reason)] += 1
        except (PhalanxError, ArithmeticError, AssertionError, TypeError, ValueError, KeyError):
            # Whatever somebody wrote into a row, the other rows are scored.
            unusable["values that fit no model"] += 1
    return UsableRows(tuple(runs), dict(unusable.most_common()))


def _parse_json_object(line: bytes) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise UnusableRow("not JSON") from None
    if not isinstance(row, dict):
        raise UnusableRow("not a JSON object")
    return row
