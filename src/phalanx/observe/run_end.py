"""Whether a run has recorded its end, from the last lines of its supervisor."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from phalanx.core.files import open_regular_file
from phalanx.observe.events import BaselineMeasured, RunFinished
from phalanx.observe.last_step import read_last_recorded_step
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
            return _name_last_recorded_step(run_dir, envelope.event)
        return None
    return None


def _name_last_recorded_step(run_dir: Path, end: RunFinished) -> RunFinished:
    """The newest end of a run with the last step that is on record: that of an earlier release
    names the newest that was saved."""
    recorded = read_last_recorded_step(run_dir, 0, before_attempt=sys.maxsize)
    return replace(end, step=max(int(end.step), recorded))
