"""The failure of an attempt, as it is told, counted and answered."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.roll_back import RollBack

OUT_OF_MEMORY = "out of memory"
# Ranks lost each other, and none of them, nor anything else, is known to have failed.
LOST_CONNECTION = "lost_connection"


@dataclass(frozen=True)
class RankFailure:
    """The root cause of a failed attempt.

    `summary` is one line with the place; `detail` the error or signal alone; `report` the whole
    text for a person; `signature` is equal for equal failures. `step` is 0 before the first step,
    `rank` -1 for the server itself, and where nobody knows which rank it was.
    """

    rank: int
    cause: str
    """One of "exception", "signal", "exit", "hang", OUT_OF_MEMORY, LOST_CONNECTION, or a RollBack's
    kind."""
    step: int
    phase: str
    summary: str
    detail: str
    report: str
    signature: str
    exit_code: int
    restartable: bool
    detected_s: float
    hang_kind: str = ""
    """Of a hang: one of `phalanx.launch.hang_kinds.HANG_KINDS`; of a rank that left before its work
    was done "left_early"; otherwise empty."""
    roll_back: RollBack | None = None
    is_outage: bool = False
    """A file server or a network was away, which may be over soon: `signature` is that of the
    outage, on whichever rank it is met."""
    is_oom_kill: bool = False
    """The kernel killed the rank for memory, by its own count."""
    is_of_all_ranks: bool = False
    """All ranks raised the same error: `rank` is the first to do so, and not to blame for it."""
