"""How a supervised run ended."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RunOutcome:
    """The end of a supervised run.

    `status` is "finished" | "preempted" | "interrupted" | "failed"; `message` is for a person.
    """

    exit_code: int
    status: str
    message: str
    attempts: int
    restarts: int = 0
    """How often the ranks were started again because one of them had failed."""
