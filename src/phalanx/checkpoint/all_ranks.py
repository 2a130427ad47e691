"""What the ranks of a save or a load share: who they are, and one outcome for all."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from phalanx.checkpoint.os_errors import kind_of
from phalanx.core.errors import CheckpointError, RunTakenError, StorageError, StoreTakenError
from phalanx.core.files import fix_of
from phalanx.plan.layout import Layout

EARLIER_STAND = "the checkpoints before this one stand"
_ONLY_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
_KINDS: dict[str, type[CheckpointError]] = {
    kind.__name__: kind for kind in (StorageError, RunTakenError, StoreTakenError)
}


class Group(Protocol):
    """The ranks that save or load together; a Mesh is one."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def layout(self) -> Layout: ...

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order, on every rank."""


@contextmanager
def agreed(group: Group, where: str, doing: str) -> Iterator[dict[str, Any]]:
    """Run the body on every rank, then share `outcome["mine"]` as `outcome["all"]`; one rank's
    error is everyone's."""
    outcome: dict[str, Any] = {"mine": None}
    error = fix = kind = None
    try:
        yield outcome
    except CheckpointError as caught:
        error, fix, kind = str(caught), None, type(caught).__name__
    except OSError as caught:
        error = (
            f"{caught.strerror}: {caught.filename}"
            if caught.filename
            else caught.strerror or str(caught)
        )
        kind = kind_of(caught).__name__
        fix = fix_of(caught, caught.filename or where)
        fix = f"{fix}; {EARLIER_STAND}" if fix and caught.errno in _ONLY_WRITING else fix
    results = group.gather_json([error, fix, kind, outcome["mine"]])
    failed = [
        (f"rank {rank}: {error}", fix, kind)
        for rank, (error, fix, kind, _) in enumerate(results)
        if error
    ]
    if failed:
        # That the run is another job's says more than what else went wrong because of it.
        kinds = [_KINDS.get(kind or "", CheckpointError) for *_, kind in failed]
        first = next((i for i, kind in enumerate(kinds) if issubclass(kind, RunTakenError)), 0)
        why, fix, _ = failed[first]
        raise kinds[first](f"failed while {doing}", where=where, why=why, fix=fix)
    outcome["all"] = [mine for *_, mine in results]
