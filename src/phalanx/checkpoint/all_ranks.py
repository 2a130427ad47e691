"""Agreement of the ranks that write or load a checkpoint: an error of one rank is raised on all."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from phalanx.checkpoint.os_errors import choose_checkpoint_error_class
from phalanx.core.disk_errors import suggest_fix_for_path_error
from phalanx.core.errors import (
    CheckpointError,
    RunRemovedError,
    RunTakenError,
    StorageError,
    StoreTakenError,
)
from phalanx.plan.layout import Layout

EARLIER_CHECKPOINTS_REMAIN_HINT = "the checkpoints before this one stand"
# Errors that only writing has: their fix can add that earlier checkpoints are whole.
_WRITE_ONLY_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
_ERROR_CLASS_BY_NAME: dict[str, type[CheckpointError]] = {
    error_class.__name__: error_class
    for error_class in (StorageError, RunTakenError, RunRemovedError, StoreTakenError)
}


class CollectiveGroup(Protocol):
    """The ranks that write or load together; a Mesh is one."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def layout(self) -> Layout: ...

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order, on every rank."""

    def describe_collectives(self) -> str:
        """What the ranks exchange tensors through, in words; empty of one rank."""


@dataclass
class LocalAndGatheredResults:
    """JSON values that the ranks share: the body of `run_on_all_ranks_or_raise` sets `local`, its
    end fills `by_rank`."""

    local: Any = None
    by_rank: list[Any] = field(default_factory=list)


@contextmanager
def run_on_all_ranks_or_raise(
    group: CollectiveGroup, where: str, doing: str
) -> Iterator[LocalAndGatheredResults]:
    """Run the body on every rank, then share the results; collective.

    A CheckpointError or OSError of any rank is raised on every rank, as a CheckpointError "failed
    while `doing`" that names the first such rank.
    """
    results = LocalAndGatheredResults()
    message = fix = class_name = None
    # Errors wait for the gather, which the other ranks take part in.
    try:
        yield results
    except CheckpointError as error:
        message, fix, class_name = str(error), None, type(error).__name__
    except OSError as error:
        message = error.strerror or str(error)
        if error.filename:
            message = f"{error.strerror}: {error.filename}"
        class_name = choose_checkpoint_error_class(error).__name__
        fix = suggest_fix_for_path_error(error, error.filename or where)
        if fix and error.errno in _WRITE_ONLY_ERRNOS:
            fix = f"{fix}; {EARLIER_CHECKPOINTS_REMAIN_HINT}"
    gathered = group.gather_json([message, fix, class_name, results.local])
    failures = []
    for rank, (message, fix, class_name, _) in enumerate(gathered):
        if message:
            # By name: an error of another rank comes as JSON.
            error_class = _ERROR_CLASS_BY_NAME.get(class_name or "", CheckpointError)
            failures.append((f"rank {rank}: {message}", fix, error_class))
    if failures:
        # That the run is another job's says more than what else went wrong because of it.
        run_taken = (failure for failure in failures if issubclass(failure[2], RunTakenError))
        why, fix, error_class = next(run_taken, failures[0])
        raise error_class(f"failed while {doing}", where=where, why=why, fix=fix)
    results.by_rank = [local for *_, local in gathered]
