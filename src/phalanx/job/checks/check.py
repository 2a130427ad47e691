"""A question about a job that one key alone cannot answer, and the keys that it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from phalanx.job.findings import Finding
from phalanx.job.positions import Path
from phalanx.job.schema import Job

Question = Callable[[Job], list[Finding]]


@dataclass(frozen=True)
class Check:
    """`asked_by`: the keys one of which the user must have given; the defaults of the others may
    then disagree."""

    run: Question
    reads: tuple[str, ...]
    asked_by: tuple[str, ...]


def check(*reads: str, asked_by: tuple[str, ...] = ()) -> Callable[[Question], Check]:
    """Makes a check of the function below it."""
    return lambda run: Check(run, reads, asked_by or reads)


def finding(key: str, what: str, fix: str = "") -> Finding:
    """About a dotted key."""
    return Finding(path_of(key), what, fix)


def path_of(key: str) -> Path:
    return tuple(int(part) if part.isdecimal() else part for part in key.split("."))
