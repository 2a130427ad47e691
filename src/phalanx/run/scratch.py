"""A temporary directory for verbs that start ranks once, and the errors that ranks' refusals
become."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.disk_errors import SCRATCH_DIRECTORY_PREFIX
from phalanx.core.errors import (
    CheckpointError,
    DataError,
    EnvironmentProblem,
    LayoutError,
    NumericsError,
    PhalanxError,
    ResourceError,
)
from phalanx.core.places import create_temporary_directory
from phalanx.launch.outcome import RunOutcome
from phalanx.launch.paths import LOGS

USER_ERROR_CLASSES = (
    LayoutError,
    DataError,
    CheckpointError,
    EnvironmentProblem,
    ResourceError,
    NumericsError,
)


@dataclass
class ScratchDirectory:
    """A directory that is gone when the verb has ended, but for its logs if a message names one."""

    directory: Path
    keeps_logs: bool = False

    def build_rank_failure_message(self, outcome: RunOutcome) -> str:
        """The message about ranks that failed. The logs stay if it sends the reader there."""
        self.keeps_logs |= str(self.directory / LOGS) in outcome.message
        return outcome.message

    def find_error_that_rank_raised(self, outcome: RunOutcome) -> PhalanxError | None:
        """The PhalanxError that a rank raised; None if ranks failed by anything else."""
        # What a person can mend is one line; a message of several is a traceback.
        kind = next(
            (kind for kind in USER_ERROR_CLASSES if kind.exit_code == outcome.exit_code), None
        )
        if outcome.status != "failed" or kind is None or "\n" in outcome.message:
            return None
        return kind(self.build_rank_failure_message(outcome))

    def remove(self) -> None:
        if not self.keeps_logs:
            shutil.rmtree(self.directory, ignore_errors=True)
            return
        for path in self.directory.iterdir():
            # Of a link only the link goes.
            if path.is_dir() and not path.is_symlink():
                if path.name != LOGS:
                    shutil.rmtree(path, ignore_errors=True)
            else:
                with suppress(OSError):
                    path.unlink()


@contextmanager
def open_scratch_directory(verb: str) -> Iterator[ScratchDirectory]:
    """A directory for what the ranks of `verb` leave.

    Raises ResourceError where none can be made.
    """
    scratch = ScratchDirectory(create_temporary_directory(f"{SCRATCH_DIRECTORY_PREFIX}{verb}-"))
    try:
        yield scratch
    finally:
        scratch.remove()
