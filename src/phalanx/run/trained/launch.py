"""Start the ranks of a verb that opens a checkpoint, hand on what they write, and raise what they refused."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.core.errors import ExitCode, PhalanxError
from phalanx.core.secrets import Redactor
from phalanx.job.hugging_face import preloaded
from phalanx.launch.supervisor import LaunchSpec, supervise
from phalanx.observe.bus import Bus
from phalanx.plan.plan import Plan
from phalanx.run.scratch import Scratch
from phalanx.run.trained.model import Subject

DOING = {"evaluate": "evaluating", "continue_texts": "generating"}


def run_ranks(
    entry: str, subject: Subject, plan: Plan, scratch: Scratch, more: dict[str, Any], on_tick: Callable[[], None]
) -> int:
    """Run `entry` of phalanx.run.trained.rank on the plan's ranks; the exit code is that of a person's stop, or 0.

    Raises the PhalanxError that a rank raised; any other error's traceback is printed, and its exit code returned.
    """
    manifest, directory = subject.manifest, scratch.directory
    payload = {
        "job": subject.job.to_json(),
        "plan": plan.to_json(),
        "run_dir": str(directory),
        "checkpoint": subject.folder.url if subject.folder is not None else "",
        "step": subject.step,
        "cast": manifest is not None and bool(manifest.facts.get("imported_from")),
        **more,
    }
    spec = LaunchSpec(
        entry=f"phalanx.run.trained.rank:{entry}",
        payload=payload,
        num_ranks=plan.world_size,
        run_dir=directory,
        preload=("torch", "torch._dynamo", "phalanx.run.trained.rank", *preloaded(subject.job.model.kind)),
        stepless=DOING[entry],
        grace_s=1.0,
    )
    bus = Bus(rank=-1, attempt=0, run_dir=directory)
    try:
        outcome = supervise(spec, bus=bus, on_tick=on_tick, say=lambda line: None)
    finally:
        bus.close()
    if (refusal := scratch.refusal_of(outcome)) is not None:
        raise refusal
    if outcome.status == "failed":
        print(Redactor(os.environ).text(scratch.message_of(outcome)), file=sys.stderr)
        return outcome.exit_code or ExitCode.INTERNAL
    return outcome.exit_code


def require_result(path: Path) -> None:
    """Raise PhalanxError where ranks ended well and left nothing: a module of the user's that exits, say."""
    if not path.is_file():
        raise PhalanxError("the ranks ended and left no result", fix="look for an exit() in your own code")
