"""The ground truth of a drill: which fault struck where and when, in a file of the run for each
fault.

Nothing that detects or recovers reads it.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.files import open_regular_file, open_regular_file_for_append, read_bounded_lines
from phalanx.core.typed_json import JsonRecord, TypedJsonError

STRIKES_FOLDER = "faults"


@dataclass(frozen=True)
class Strike(JsonRecord):
    """A fault that struck: `phase` had just begun at `step` on `rank`. `monotonic_s` is on this
    machine's monotonic clock."""

    fault: str
    rank: int
    step: int
    phase: str
    monotonic_s: float

    @classmethod
    def now(cls, fault: str, rank: int, step: int, phase: str) -> Strike:
        """A strike of this moment."""
        return cls(fault, rank, step, phase, time.monotonic())


def record_strike(run_dir: Path, name: str, strike: Strike, *, may_repeat: bool = False) -> bool:
    """Add a strike to the file `name` of the run. False, and nothing is added, if it struck before
    and not `may_repeat`."""
    path = run_dir / STRIKES_FOLDER / name
    path.parent.mkdir(exist_ok=True)
    # A file of an earlier release is empty.
    if path.exists() and not may_repeat:
        return False
    with open_regular_file_for_append(path) as file:
        file.write(json.dumps(strike.to_json()).encode() + b"\n")
    return True


def read_strikes(run_dir: Path) -> list[Strike]:
    """All strikes of a run, oldest first; none where nothing was injected."""
    strikes = []
    for path in sorted((run_dir / STRIKES_FOLDER).glob("*.injected")):
        with open_regular_file(path) as file:
            for line in read_bounded_lines(file):
                try:
                    strikes.append(Strike.from_json(json.loads(line)))
                except (ValueError, TypedJsonError):
                    # Torn by a full disk, or of an earlier release, which left the file empty.
                    continue
    return sorted(strikes, key=lambda strike: strike.monotonic_s)
