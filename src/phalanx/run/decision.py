"""What rank 0 of another launcher's ranks decided, for all of them: where and how they train, or
why they do not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from phalanx.core.typed_json import JsonRecord
from phalanx.plan.plan import Plan


@dataclass(frozen=True)
class RankZeroDecision(JsonRecord):
    """`exit_code` is None where ranks are to train; else they end with it, because of `error` if
    there is one."""

    run_dir: Path
    plan: Plan | None = None
    attempt: int = 0
    epoch: int = 0
    exit_code: int | None = None
    error: str = ""
