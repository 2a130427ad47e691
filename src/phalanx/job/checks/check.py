"""A question about a job that one key alone cannot answer, and the keys that it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from phalanx.job.findings import Finding
from phalanx.job.positions import Path
from phalanx.job.schema import Job

CheckFunction = Callable[[Job], list[Finding]]


@dataclass(frozen=True)
class JobCheck:
    """A check of several keys together.

    `asked_by`: the keys one of which the user must have given; the defaults of the others may then
    disagree.
    """

    run: CheckFunction
    reads: tuple[str, ...]
    asked_by: tuple[str, ...]


def declare_check(
    *reads: str, asked_by: tuple[str, ...] = ()
) -> Callable[[CheckFunction], JobCheck]:
    """Decorator that makes a `Check` of a function from the keys that it reads."""
    # Without `asked_by` any key that it reads makes the user responsible for it.
    return lambda run: JobCheck(run, reads, asked_by or reads)


def make_finding(key: str, problem: str, fix: str = "") -> Finding:
    """A finding about a dotted key."""
    return Finding(split_dotted_key(key), problem, fix)


def split_dotted_key(key: str) -> Path:
    """The path of a dotted key: "observe.sinks.1" -> ("observe", "sinks", 1)."""
    return tuple(int(part) if part.isdecimal() else part for part in key.split("."))
