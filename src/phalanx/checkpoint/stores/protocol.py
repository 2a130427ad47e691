"""What a place for checkpoints must be able to do.

Each module beside this one is such a place. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from phalanx.checkpoint.chunks import StoredFile
from phalanx.checkpoint.folder import Folder
from phalanx.core.disk import DiskFile


class Draft(Protocol):
    """A checkpoint that is being written. Until it is committed no reader takes it for one.

    Every method raises OSError or CheckpointError.
    """

    @property
    def token(self) -> str:
        """What other ranks need to write into the same draft."""

    @property
    def url(self) -> str: ...

    @property
    def step(self) -> int: ...

    def write(self, name: str, produce: Callable[[DiskFile], StoredFile]) -> StoredFile:
        """Create the file `name` and make durable what `produce` writes into it.

        `produce` may be called again from the beginning, if a connection breaks.
        """

    def reuse(self, name: str, folder: Folder, earlier_name: str) -> bool:
        """Let the file `name` hold what a committed checkpoint's file holds, without sending the
        bytes again.

        False if that is not possible here; nothing is changed then.
        """


class OwnerObject(Protocol):
    """What says whose a store is. Every method raises OSError or CheckpointError."""

    @property
    def url(self) -> str: ...

    def read(self) -> bytes | None:
        """What was written last; None if nothing was."""

    def write(self, text: bytes) -> None:
        """Write it, unless somebody else did meanwhile and the store can tell.

        Who reads it back knows.
        """

    def remove(self) -> None: ...


class Store(Protocol):
    """The committed checkpoints of one run.

    One process at a time (that holds the run's lock) changes it.

    Every method raises OSError or CheckpointError.
    """

    @property
    def url(self) -> str: ...

    @property
    def owner(self) -> OwnerObject | None:
        """Where it is written whose the store is; None for a directory, which is locked instead."""

    def folders(self) -> list[Folder]:
        """What is committed, by step, oldest first."""

    def folder(self, name: str) -> Folder:
        """The one of that name, whether it is there or not."""

    def probe(self) -> None:
        """Prove that it can be written, where that is not known. Raises CheckpointError."""

    def begin(self, step: int) -> Draft:
        """Make room for a new checkpoint.

        What an earlier, unfinished save of this run left goes.
        """

    def join(self, step: int, token: str) -> Draft:
        """The draft that another rank began."""

    def folder_of(self, draft: Draft) -> Folder:
        """What `draft` is called once it is committed."""

    def commit(self, draft: Draft, manifest: bytes) -> Folder:
        """From here on the draft is the checkpoint of its step, instead of an older one of that
        step.

        Atomic.
        """

    def discard(self, draft: Draft) -> None:
        """Remove what there is of a draft, as far as that is possible. Never raises."""

    def remove(self, folder: Folder) -> None:
        """Remove a committed checkpoint.

        A crash on the way leaves it whole, or gone for every reader.
        """

    def clean_up(self) -> None:
        """Remove what killed saves and removals left.

        For the one process that holds the run's lock.
        """
