"""Whether the event files of a run can be read: their reader passes over those that cannot, and a
run without them looks like one in which nothing happened."""

from __future__ import annotations

import math
import os
from pathlib import Path

from phalanx.core.files import open_regular_file
from phalanx.launch.paths import EVENTS
from phalanx.observe.tail import RANK_FILE_PATTERN, SUPERVISOR_FILE_NAME

# So often all files are opened: a large run has thousands.
CHECK_INTERVAL_S = 30.0


class EventFilesCheck:
    """What cannot be read in `RUN/events`, by name: why. A file that is gone is not among it."""

    def __init__(self, run_dir: Path) -> None:
        self._directory = run_dir / EVENTS
        self._checked: set[str] = set()
        self._checked_all_s = -math.inf
        self._was_there = False
        self.unreadable: dict[str, str] = {}

    def check(self, now_s: float) -> None:
        """Look at files that are new or could not be read, and now and then at all of them.
        `now_s`: of the monotonic clock."""
        if now_s - self._checked_all_s >= CHECK_INTERVAL_S:
            self._checked_all_s = now_s
            self._checked.clear()
        try:
            names = set(filter(_is_event_file, os.listdir(self._directory)))
        except OSError as error:
            # A run that begins has none yet.
            if self._was_there or not isinstance(error, FileNotFoundError):
                self.unreadable = {EVENTS: _explain(error)}
            return
        self._was_there = True
        due = names - self._checked
        self.unreadable = {}
        for name in due:
            why = self._find_why_unreadable(name)
            if why:
                self.unreadable[f"{EVENTS}/{name}"] = why
            else:
                self._checked.add(name)

    def _find_why_unreadable(self, name: str) -> str:
        try:
            with open_regular_file(self._directory / name) as file:
                file.read(1)
        except FileNotFoundError:
            return ""
        except OSError as error:
            return _explain(error)
        return ""


def _is_event_file(name: str) -> bool:
    return name == SUPERVISOR_FILE_NAME or RANK_FILE_PATTERN.fullmatch(name) is not None


def _explain(error: OSError) -> str:
    return error.strerror or str(error)
