"""What the ranks of a save or a load share: who they are, and one outcome for all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from phalanx.core.errors import CheckpointError
from phalanx.plan.layout import Layout


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
    error = None
    try:
        yield outcome
    except (OSError, CheckpointError) as caught:
        error = str(caught)
    results = group.gather_json([error, outcome["mine"]])
    failed = [f"rank {rank}: {message}" for rank, (message, _) in enumerate(results) if message is not None]
    if failed:
        raise CheckpointError(f"failed while {doing}", where=where, why=failed[0])
    outcome["all"] = [value for _, value in results]
