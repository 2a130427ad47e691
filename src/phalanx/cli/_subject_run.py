"""Start the ranks of a verb that opens a checkpoint, hand on what they write, and raise what they refused."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from phalanx.cli._launched import refuse_launched_ranks
from phalanx.cli._subject import Subject
from phalanx.core.errors import (
    CheckpointError,
    DataError,
    EnvironmentProblem,
    ExitCode,
    LayoutError,
    NumericsError,
    PhalanxError,
    ResourceError,
)
from phalanx.core.secrets import Redactor
from phalanx.job.hugging_face import preloaded
from phalanx.launch.supervisor import LaunchSpec, supervise
from phalanx.observe.bus import Bus
from phalanx.plan.plan import Plan

KINDS = (LayoutError, DataError, CheckpointError, EnvironmentProblem, ResourceError, NumericsError)


@contextmanager
def scratch_directory(verb: str) -> Iterator[Path]:
    """A directory for what ranks leave, gone afterwards. Ends a rank of another launcher."""
    refuse_launched_ranks(verb)
    with tempfile.TemporaryDirectory(prefix=f"phalanx-{verb}-") as directory:
        yield Path(directory)


def run_ranks(
    entry: str, subject: Subject, plan: Plan, directory: Path, more: dict[str, Any], on_tick: Callable[[], None]
) -> int:
    """Run `entry` of phalanx.cli._subject_rank on the plan's ranks; the exit code is that of a person's stop, or 0.

    Raises the PhalanxError that a rank raised; any other error's traceback is printed, and its exit code returned.
    """
    manifest = subject.manifest
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
        entry=f"phalanx.cli._subject_rank:{entry}",
        payload=payload,
        num_ranks=plan.world_size,
        run_dir=directory,
        preload=("torch", "torch._dynamo", "phalanx.cli._subject_rank", *preloaded(subject.job.model.kind)),
        max_restarts=0,
        grace_s=1.0,
    )
    bus = Bus(rank=-1, attempt=0, run_dir=directory)
    try:
        outcome = supervise(spec, bus=bus, on_tick=on_tick, say=lambda line: None)
    finally:
        bus.close()
    if outcome.status == "failed":
        kind = next((kind for kind in KINDS if kind.exit_code == outcome.exit_code), None)
        if kind is not None and "\n" not in outcome.message:
            raise kind(outcome.message)
        print(Redactor(os.environ).text(outcome.message), file=sys.stderr)
        return outcome.exit_code or ExitCode.INTERNAL
    return outcome.exit_code


def require_result(path: Path) -> None:
    """Raise PhalanxError where ranks ended well and left nothing: a module of the user's that exits, say."""
    if not path.is_file():
        raise PhalanxError("the ranks ended and left no result", fix="look for an exit() in your own code")
