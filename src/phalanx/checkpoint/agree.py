"""What the ranks of a save or a load share: who they are, and one outcome for all."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from phalanx.core.errors import CheckpointError
from phalanx.plan.layout import Layout

FREE_SPACE = "free space there; the checkpoints before this one stand"


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
    """Run the body on every rank, then share `outcome["mine"]` as `outcome["all"]`; one rank's error is everyone's."""
    outcome: dict[str, Any] = {"mine": None}
    error = fix = None
    try:
        yield outcome
    except CheckpointError as caught:
        error = str(caught)
    except OSError as caught:
        error = f"{caught.strerror}: {caught.filename}" if caught.strerror and caught.filename else str(caught)
        fix = FREE_SPACE if caught.errno in (errno.ENOSPC, errno.EDQUOT) else None
    results = group.gather_json([error, fix, outcome["mine"]])
    failed = [(f"rank {rank}: {error}", fix) for rank, (error, fix, _) in enumerate(results) if error is not None]
    if failed:
        raise CheckpointError(f"failed while {doing}", where=where, why=failed[0][0], fix=failed[0][1])
    outcome["all"] = [mine for _, _, mine in results]
