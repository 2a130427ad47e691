"""The one rank that looks at a module: it builds it, proposes rules and writes them to a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from phalanx.core.errors import ExitCode, LayoutError, PhalanxError
from phalanx.job.schema import Job
from phalanx.nn.probe import one_line
from phalanx.plan.plan import Plan
from phalanx.suggest.search import suggest_rules
from phalanx.suggest.suggestion import SUGGESTION_FILE
from phalanx.verify.batches import global_steps


def main(payload: dict[str, Any]) -> int:
    """Write the suggestion for `payload` (job, plan, data_dir) to run_dir/SUGGESTION_FILE."""
    job = Job.model_validate_json(json.dumps(payload["job"]))
    plan = Plan.from_json(payload["plan"])
    data_dir = Path(payload["data_dir"]) if payload["data_dir"] else None
    batch = global_steps(job, plan, data_dir, num_steps=1)[0][0]
    try:
        suggestion = suggest_rules(job, plan, batch, is_made_up=data_dir is None)
    except PhalanxError:
        raise
    except Exception as error:  # of the user's forward, in a part of it or with other features
        raise LayoutError(f"the forward of {job.model.kind} cannot be followed", why=one_line(error)) from None
    (Path(payload["run_dir"]) / SUGGESTION_FILE).write_text(json.dumps(suggestion.to_json()))
    return ExitCode.OK
