"""Reads where the ranks of a run are: their black boxes and the states of their processes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from phalanx.core.black_box import read_boot_id
from phalanx.core.black_box_reader import (
    BlackBoxVersionError,
    LastPosition,
    read_last_position,
)
from phalanx.core.errors import UsageError
from phalanx.launch.paths import BLACK_BOXES, black_box_path
from phalanx.observe.process_status import (
    PROCESS_STATES,
    SAMPLE_S,
    ProcessStatus,
    read_process_statuses,
)
from phalanx.observe.rank_waits import RankState, WaitVerdict, find_waits
from phalanx.observe.where_words import describe_waits


def read_rank_states(run_dir: Path, sample_s: float = SAMPLE_S) -> dict[int, RankState]:
    """The state of each rank that has a black box in `run_dir`, by rank.

    Raises UsageError for boxes of a newer phalanx.
    """
    paths = {}
    for path in sorted((run_dir / BLACK_BOXES).glob("rank-*")):
        number = path.name.removeprefix("rank-")
        if number.isdecimal():
            paths[int(number)] = path
    headers = {}
    for rank, path in paths.items():
        position = _read_position(path)
        headers[rank] = position and position.header
    statuses = read_process_statuses(headers, sample_s)
    states = {}
    for rank, path in paths.items():
        # Anew: a rank goes on while its CPU time is measured.
        states[rank] = RankState(rank, _read_position(path), statuses[rank])
    return states


def read_furthest_position(run_dir: Path) -> LastPosition | None:
    """The place of the rank that has come furthest; None if none has a black box."""
    furthest = None
    for box in (run_dir / BLACK_BOXES).glob("rank-*"):
        last_seen = read_last_position(box)
        if last_seen is not None and (furthest is None or last_seen[:2] > furthest[:2]):
            furthest = last_seen
    return furthest


def has_begun_training(run_dir: Path, num_ranks: int) -> bool:
    """True if one of `num_ranks` ranks has begun a step."""
    for rank in range(num_ranks):
        last_seen = read_last_position(black_box_path(run_dir, rank))
        if last_seen is not None and last_seen.step >= 1:
            return True
    return False


def describe_rank_position(last_seen: LastPosition | None, stepless: str = "") -> str:
    """Step, phase and collective, as the end of a sentence; for ranks without steps their work."""
    collective = ""
    if last_seen is not None and last_seen.collective:
        collective = f" ({last_seen.collective})"
    if stepless:
        return f"while {stepless}{collective}"
    if last_seen is None or last_seen.step < 1:
        return "before the first step"
    return f"at step {last_seen.step} in {last_seen.phase}{collective}"


def _read_position(path: Path) -> LastPosition | None:
    try:
        return read_last_position(path)
    except BlackBoxVersionError as error:
        raise UsageError(
            "a newer phalanx wrote this run", where=str(path), why=str(error), fix="update phalanx"
        ) from None


def read_clock_of_ranks(states: Mapping[int, RankState]) -> float | None:
    """Monotonic seconds now, if the ranks' clock is this machine's and one of them is alive."""
    boot_id = read_boot_id()
    for state in states.values():
        header = state.position and state.position.header
        if header and header.boot_id == boot_id and state.process.state != "gone":
            return time.monotonic()
    return None


def describe_waits_at_end(
    positions: Mapping[int, LastPosition], process_letters: Mapping[int, str], culprit: int
) -> list[str]:
    """A sentence on what the others waited in when rank `culprit` failed; none where the black
    boxes do not say.

    `process_letters` are the states of /proc at that moment; a rank without one is gone if it is
    `culprit`.
    """
    states = {}
    for rank, position in positions.items():
        state = "unknown"
        if rank in process_letters:
            state = PROCESS_STATES.get(process_letters[rank], state)
        elif rank == culprit:
            state = "gone"
        states[rank] = RankState(rank, position, ProcessStatus(state))
    # Only its own part in the waits: the verdict on who failed is the caller's.
    waits = find_waits(states)
    if any(culprit in wait.absent for wait in waits):
        return describe_waits(WaitVerdict("absent", (culprit,), waits), states)
    if any(culprit in wait.differing for wait in waits):
        return describe_waits(WaitVerdict("differs", (culprit,), waits), states)
    return []
