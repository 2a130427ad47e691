"""The job whose module is looked at, and the rules that are proposed for it. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from phalanx.core.typed_json import JsonRecord
from phalanx.job.schema import Job
from phalanx.plan.plan import Plan

SUGGESTION_FILE_NAME = "suggested.json"
NameAndReason = tuple[str, str]
"""(rule, why)."""


@dataclass(frozen=True)
class SuggestPayload(JsonRecord):
    """The job and plan of the module that a rank looks at.

    `data_dir`: the job's own dataset, None for made-up inputs. The rank writes SUGGESTION_FILE_NAME
    into `run_dir`.
    """

    job: Job
    plan: Plan
    run_dir: Path
    data_dir: Path | None


@dataclass
class Suggestion:
    """Sharding rules for a module, with the reason of each.

    `rules`: pattern -> (rule, why). `whole`: pattern of a linear layer or embedding that is left
    whole -> why. `why_none`: why there can be no rule. `fed_with`: inputs that were made up, as the
    job has no dataset of its own.
    """

    rules: dict[str, NameAndReason] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    why_none: str = ""
    fed_with: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Suggestion:
        """The suggestion that `to_json` wrote."""
        rules = {pattern: (rule, why) for pattern, (rule, why) in body["rules"].items()}
        return cls(**{**body, "rules": rules})
