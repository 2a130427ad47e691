"""What rank 0 of another launcher's ranks decided, for all of them: where and how they train, or why they do not."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Decision:
    """`exit_code` is None where ranks are to train; else they end with it, because of `error` if there is one."""

    run_dir: str
    plan: dict[str, Any] | None = None
    attempt: int = 0
    epoch: int = 0
    exit_code: int | None = None
    error: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Decision:
        return Decision(**json.loads(text))
