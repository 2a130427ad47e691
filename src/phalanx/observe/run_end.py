"""Whether a run has recorded its end, from the last lines of its supervisor."""

from __future__ import annotations

import os
from pathlib import Path

from phalanx.core.files import open_regular_file
from phalanx.observe.events import BaselineMeasured, RunFinished
from phalanx.observe.tail import SUPERVISOR_FILE_NAME, parse_valid_event_line

_TAIL_BYTES = 64 * 2**10


def read_recorded_end(run_dir: Path) -> RunFinished | None:
    """The end that a run recorded last; None while it goes on, or where it was cut off."""
    try:
        with open_regular_file(run_dir / "events" / SUPERVISOR_FILE_NAME) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(size - _TAIL_BYTES, 0))
            lines = file.read(_TAIL_BYTES).split(b"\n")
    except OSError:
        return None
    for line in reversed(lines):
        envelope = parse_valid_event_line(line)
        if envelope is None or isinstance(envelope.event, BaselineMeasured):
            continue
        if isinstance(envelope.event, RunFinished):
            return envelope.event
        return None
    return None
