"""The interface of a store of checkpoints, which each module beside this one implements.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from phalanx.checkpoint.chunks import FileSizeAndChecksums
from phalanx.checkpoint.folder import CheckpointFolder
from phalanx.core.disk import DiskFile


class Draft(Protocol):
    """A checkpoint that is being written. Until it is committed no reader takes it for one.

    Every method raises OSError or CheckpointError.
    """

    @property
    def token(self) -> str:
        """The name by which other ranks write into the same draft."""

    @property
    def url(self) -> str: ...

    @property
    def step(self) -> int: ...

    def write(
        self, name: str, produce: Callable[[DiskFile], FileSizeAndChecksums]
    ) -> FileSizeAndChecksums:
        """Create the file `name` and make durable what `produce` writes into it.

        `produce` may be called again from the beginning, if a connection breaks.
        """

    def reuse_file_of_checkpoint(
        self, name: str, folder: CheckpointFolder, earlier_name: str
    ) -> bool:
        """Give the file `name` the content of a committed checkpoint's file, without sending the
        bytes again.

        Returns False, with nothing changed, if the store cannot do that.
        """


class StoreOwnerRecord(Protocol):
    """The object that names the owner of a store.

    Every method raises OSError or CheckpointError.
    """

    @property
    def url(self) -> str: ...

    def read(self) -> bytes | None:
        """The text that was written last; None if there is none."""

    def write(self, text: bytes) -> None:
        """Write `text`, unless another run wrote meanwhile and the store can detect that.

        Only reading it back tells who has the store.
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
    def owner(self) -> StoreOwnerRecord | None:
        """The object that names its owner; None for a directory, which is locked instead."""

    def folders(self) -> list[CheckpointFolder]:
        """The committed checkpoints by step, oldest first."""

    def folder(self, name: str) -> CheckpointFolder:
        """The folder of that name, whether it is there or not."""

    def require_writable(self) -> None:
        """Raise CheckpointError if the store cannot be written."""

    def begin_draft(self, step: int) -> Draft:
        """Begin a new checkpoint; removes what an earlier, unfinished save of this run left."""

    def join_draft(self, step: int, token: str) -> Draft:
        """The draft that another rank began."""

    def get_folder_once_committed(self, draft: Draft) -> CheckpointFolder:
        """The folder that `draft` is once it is committed."""

    def commit(self, draft: Draft, manifest: bytes) -> CheckpointFolder:
        """Make the draft the checkpoint of its step, instead of an older one of that step.

        Atomic.
        """

    def discard(self, draft: Draft) -> None:
        """Remove a draft as far as that is possible. Never raises."""

    def remove(self, folder: CheckpointFolder) -> None:
        """Remove a committed checkpoint.

        A crash on the way leaves it intact, or gone for every reader.
        """

    def remove_leftovers(self) -> None:
        """Remove the remains of killed saves and removals.

        For the one process that holds the run's lock.
        """
