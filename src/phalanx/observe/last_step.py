"""The last step that a rank has on record."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from phalanx.core.files import open_regular_file
from phalanx.observe.events import Event, SamplesRead, StepFinished, StepsSummed
from phalanx.observe.tail import RANK_FILE_PATTERN, parse_valid_event_line

# The end of a file that has the last steps in it, whatever else a step records.
_MAX_BYTES = 1 << 20


def read_last_recorded_step(run_dir: Path, rank: int, *, before_attempt: int) -> int:
    """The last step that `rank` recorded in attempts before `before_attempt`; 0 without one.

    Only the newest of these attempts that recorded a step counts: an attempt before it may have
    come further than it began.
    """
    return _read_newest(run_dir, rank, before_attempt, _get_step)


def read_last_step_with_samples(run_dir: Path, rank: int, *, before_attempt: int) -> int:
    """The last step whose samples `rank` recorded (observe.samples), as
    `read_last_recorded_step`."""
    return _read_newest(run_dir, rank, before_attempt, _get_step_of_samples)


def _read_newest(
    run_dir: Path, rank: int, before_attempt: int, get_step: Callable[[Event], int]
) -> int:
    attempts: dict[int, Path] = {}
    for path in (run_dir / "events").glob(f"rank-{rank:04d}-attempt-*.jsonl"):
        match = RANK_FILE_PATTERN.fullmatch(path.name)
        if match is not None and int(match[2]) < before_attempt:
            attempts[int(match[2])] = path
    for _, path in sorted(attempts.items(), reverse=True):
        last = _read_last_step(path, get_step)
        if last:
            return last
    return 0


def _read_last_step(path: Path, get_step: Callable[[Event], int]) -> int:
    try:
        with open_regular_file(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _MAX_BYTES))
            lines = file.read(_MAX_BYTES).splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        envelope = parse_valid_event_line(line)
        if envelope is not None and (step := get_step(envelope.event)):
            return step
    return 0


def _get_step(event: Event) -> int:
    if isinstance(event, StepFinished):
        return int(event.step)
    if isinstance(event, StepsSummed):
        return int(event.last_step)
    return 0


def _get_step_of_samples(event: Event) -> int:
    return int(event.step) if isinstance(event, SamplesRead) else 0
