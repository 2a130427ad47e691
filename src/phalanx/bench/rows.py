"""The rows that ranks append to a file as they measure, and their reader. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from phalanx.plan.profiles import TimedOperation

ROWS_FILE = "measurements.jsonl"
# In place of a row: time was up before this item.
SKIPPED_ROW_LINE = "null"
# Of the last line, an object with these keys alone.
BUSY_SHARE_KEY, COLLECTIVES_KEY = "busy_share", "collectives"


class MeasurementReader:
    """Reads the rows of a file that grows; None stands for an item that was left out.

    `busy_share` is what other programs used of the machine meanwhile, `collectives` what ranks
    exchanged tensors through; both come after all rows.
    """

    def __init__(self, path: Path, on_row: Callable[[TimedOperation | None], None]) -> None:
        self._path, self._on_row = path, on_row
        self._num_read = 0
        self.busy_share = 0.0
        self.collectives = ""

    def read_new_rows(self) -> None:
        """Hand on the rows that have come since the last call."""
        try:
            # What follows the last line end is a row that is being written.
            lines = self._path.read_text(encoding="utf-8").split("\n")[:-1]
        except FileNotFoundError:
            return
        for line in lines[self._num_read :]:
            body = json.loads(line)
            if body is None:
                self._on_row(None)
            elif BUSY_SHARE_KEY in body:
                self.busy_share = float(body[BUSY_SHARE_KEY])
                self.collectives = str(body[COLLECTIVES_KEY])
            else:
                self._on_row(TimedOperation.from_json(body))
        self._num_read = len(lines)
