"""Which checkpoints stay: the last few, milestones, the best, and always the newest that verifies. Torch-free."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpoint.manifest import list_checkpoints, step_of
from phalanx.checkpoint.verify import verify_checkpoint
from phalanx.core.errors import CheckpointError
from phalanx.core.files import fsync_directory

REMOVED = ".removed"  # ending of a hidden directory that is on its way out


@dataclass(frozen=True)
class Retention:
    """Keep the last `last` (None: all), those whose step is a multiple of `every`, and the steps in `kept`."""

    last: int | None = None
    every: int | None = None
    kept: frozenset[int] = frozenset()

    def superfluous(self, steps: Iterable[int]) -> list[int]:
        """The steps that need not be kept, oldest first. Never the newest."""
        ordered = sorted(steps)
        if self.last is None:
            return []
        recent = set(ordered[-max(1, self.last) :])
        return [
            step
            for step in ordered
            if step not in recent and step not in self.kept and not (self.every and step % self.every == 0)
        ]


def prune(
    run_dir: Path, retention: Retention, *, dry_run: bool = False, say: Callable[[str], None] = lambda line: None
) -> list[Path]:
    """Remove what `retention` does not keep; the paths that went, oldest first.

    Nothing is removed before a checkpoint that stays has been verified byte for byte: of those that stay the newest
    that verifies is safe, and where none does, nothing goes. Raises CheckpointError if a directory cannot be removed.
    """
    by_step = {step_of(path): path for path in list_checkpoints(run_dir)}
    going = [by_step[step] for step in retention.superfluous(by_step)]
    if not going or dry_run:
        return going
    staying = [path for step, path in sorted(by_step.items(), reverse=True) if path not in going]
    if not any(_verifies(path, say) for path in staying):
        say("no checkpoint that would stay verifies: nothing is removed")
        return []
    for path in going:
        try:
            hidden = path.with_name(f".{path.name}{REMOVED}")
            shutil.rmtree(hidden, ignore_errors=True)
            os.rename(path, hidden)  # from here on it is no checkpoint, however far the removal gets
            fsync_directory(path.parent)
            shutil.rmtree(hidden)
        except OSError as error:
            raise CheckpointError("it cannot be removed", where=str(path), why=error.strerror) from None
    return going


def _verifies(path: Path, say: Callable[[str], None]) -> bool:
    problems = verify_checkpoint(path)
    if problems:
        say(f"{path.name} does not verify: {problems[0]}")
    return not problems
