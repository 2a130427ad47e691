"""What a dry run's processes say to the one that started them: a line of JSON each. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import phalanx.core.errors as errors
from phalanx.core.errors import PhalanxError
from phalanx.job.schema import Job
from phalanx.plan.plan import Plan
from phalanx.verify.dry_run.rank_kinds import RankKind

AT, RESULT, REFUSAL = "at", "result", "refusal"


def encode_dry_run_request(
    job: Job, plan: Plan, kind: RankKind, boundary: Mapping[str, Any] | None
) -> str:
    """The request that a process reads from its standard input."""
    return json.dumps(
        {
            "job": job.to_json(),
            "plan": plan.to_json(),
            "kind": [kind.name, kind.rank, list(kind.stages)],
            "boundary": boundary,
        }
    )


def decode_dry_run_request(text: str) -> tuple[Job, Plan, RankKind, Mapping[str, Any] | None]:
    body = json.loads(text)
    name, rank, stages = body["kind"]
    return (
        Job.from_json(body["job"]),
        Plan.from_json(body["plan"]),
        RankKind(name, rank, tuple(stages)),
        body["boundary"],
    )


def rebuild_worker_error(body: Mapping[str, Any]) -> PhalanxError:
    """The error that a process has told, as an object."""
    kind: type[PhalanxError] = getattr(errors, str(body["error"]), PhalanxError)
    return kind(body["what"], where=body["where"], why=body["why"], fix=body["fix"])
