"""Checkpoints in a directory: written hidden, synced, and renamed into place. Torch-free.

`step-N` is a checkpoint, and damaged without a manifest. `.step-N.TOKEN.partial` is being written,
`.step-N.replaced` was the checkpoint of a step that is being saved again, `.step-N.removed` is on
its way out.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpoint.chunks import FileSizeAndChecksums
from phalanx.checkpoint.folder import CheckpointFolder, LocalCheckpointFolder
from phalanx.checkpoint.manifest import MANIFEST_FILE_NAME, list_checkpoint_paths_in
from phalanx.checkpoint.stores.protocol import Draft
from phalanx.core.disk import Disk, DiskFile, make_directories, remove_tree
from phalanx.core.disk_errors import suggest_fix_for_path_error
from phalanx.core.errors import StorageError

PARTIAL, REPLACED, REMOVED = ".partial", ".replaced", ".removed"
# File systems, and files of another one or owner, that take no hard link: a copy is written then.
_HARD_LINK_UNSUPPORTED_ERRNOS = (
    errno.EXDEV,
    errno.EPERM,
    errno.EMLINK,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EACCES,
    errno.ENOENT,
)


@dataclass(frozen=True)
class LocalDraft:
    """A hidden directory."""

    path: Path
    step: int
    token: str
    disk: Disk

    @property
    def url(self) -> str:
        """The path of the checkpoint that it becomes: its own path is hidden, and gone by the time
        that a person looks for it."""
        return str(self.path.with_name(f"step-{self.step}"))

    def write(
        self, name: str, produce: Callable[[DiskFile], FileSizeAndChecksums]
    ) -> FileSizeAndChecksums:
        with self.naming_step_in_os_errors():
            file = self.disk.create(self.path / name)
            try:
                stored = produce(file)
                file.sync()
            finally:
                file.close()
        return stored

    def reuse_file_of_checkpoint(
        self, name: str, folder: CheckpointFolder, earlier_name: str
    ) -> bool:
        """A hard link: removing the older checkpoint does not touch the newer one."""
        if not isinstance(folder, LocalCheckpointFolder):
            return False
        try:
            self.disk.link(folder.path / earlier_name, self.path / name)
        except OSError as error:
            if error.errno in _HARD_LINK_UNSUPPORTED_ERRNOS:
                return False
            error.filename, error.filename2 = self.url, None
            raise
        return True

    @contextlib.contextmanager
    def naming_step_in_os_errors(self) -> Iterator[None]:
        """Have an OSError of the body name the step: its hidden directory is gone before a person
        can look."""
        try:
            yield
        except OSError as error:
            if str(error.filename).startswith(str(self.path)):
                error.filename, error.filename2 = self.url, None
            raise


class LocalStore:
    """`root` is RUN/checkpoints, or what a file:// URL names. It need not exist yet."""

    def __init__(self, root: Path, disk: Disk | None = None) -> None:
        self.root, self._disk = root, disk or Disk()

    @property
    def url(self) -> str:
        return str(self.root)

    @property
    def owner(self) -> None:
        """No owner: a job that writes into a directory holds its lock."""

    def folders(self) -> list[CheckpointFolder]:
        return [LocalCheckpointFolder(path) for path in list_checkpoint_paths_in(self.root)]

    def folder(self, name: str) -> CheckpointFolder:
        return LocalCheckpointFolder(self.root / name)

    def require_writable(self) -> None:
        probe = self.root / f".writable.{secrets.token_hex(4)}"
        try:
            make_directories(self._disk, self.root)
            self._disk.create(probe).close()
            self._disk.remove(probe)
        except OSError as error:
            fix = (
                suggest_fix_for_path_error(error, self.url, place="checkpoint.url")
                or "choose another checkpoint.url"
            )
            why = error.strerror or str(error)
            raise StorageError("it cannot be written", where=self.url, why=why, fix=fix) from None

    def begin_draft(self, step: int) -> LocalDraft:
        make_directories(self._disk, self.root)
        self.remove_leftovers()
        # A name of its own: nothing is written into the remains of another save.
        draft = self.join_draft(step, secrets.token_hex(4))
        with draft.naming_step_in_os_errors():
            self._disk.make_directory(draft.path)
        return draft

    def join_draft(self, step: int, token: str) -> LocalDraft:
        return LocalDraft(self.root / f".step-{step}.{token}{PARTIAL}", step, token, self._disk)

    def get_folder_once_committed(self, draft: Draft) -> CheckpointFolder:
        return LocalCheckpointFolder(self.root / f"step-{draft.step}")

    def commit(self, draft: Draft, manifest: bytes) -> CheckpointFolder:
        assert isinstance(draft, LocalDraft)
        disk, final = self._disk, self.root / f"step-{draft.step}"
        with draft.naming_step_in_os_errors():
            _write_manifest_of_draft(draft, manifest)
            # The files' names must be durable before the rename makes them a checkpoint.
            disk.sync_directory(draft.path)
        replaced = final.with_name(f".{final.name}{REPLACED}")
        # What an earlier save left under this name: a rename onto a full directory fails.
        remove_tree(disk, replaced)
        # This step was saved before: the run continued from an older checkpoint. A crash between
        # the two renames leaves it hidden, and `remove_leftovers` puts it back.
        if os.path.lexists(final):
            disk.rename(final, replaced)
        try:
            with draft.naming_step_in_os_errors():
                disk.rename(draft.path, final)
        except OSError:
            # The old checkpoint of this step comes back.
            if os.path.lexists(replaced):
                disk.rename(replaced, final)
            raise
        # Only from here on the checkpoint outlives a power loss.
        disk.sync_directory(self.root)
        # The checkpoint is there: the next save removes what is left of the old one.
        with contextlib.suppress(OSError):
            remove_tree(disk, replaced)
        return LocalCheckpointFolder(final)

    def discard(self, draft: Draft) -> None:
        assert isinstance(draft, LocalDraft)
        with contextlib.suppress(OSError):
            remove_tree(self._disk, draft.path)

    def remove(self, folder: CheckpointFolder) -> None:
        path = self.root / folder.name
        hidden = path.with_name(f".{path.name}{REMOVED}")
        remove_tree(self._disk, hidden)
        # From here on it is no checkpoint, however far the removal gets.
        self._disk.rename(path, hidden)
        self._disk.sync_directory(self.root)
        remove_tree(self._disk, hidden)

    def remove_leftovers(self) -> None:
        """Remove half-written directories; put a checkpoint back that was caught while it was
        replaced."""
        for name in self._list_hidden_directories():
            path = self.root / name
            if name.endswith((PARTIAL, REMOVED)):
                # It does no harm: the next save tries again.
                with contextlib.suppress(OSError):
                    remove_tree(self._disk, path)
            elif name.endswith(REPLACED):
                checkpoint = self.root / name.removeprefix(".").removesuffix(REPLACED)
                # Both renames were done: the old one is not needed any more.
                if (checkpoint / MANIFEST_FILE_NAME).is_file():
                    remove_tree(self._disk, path)
                elif not os.path.lexists(checkpoint):
                    # After a power loss it comes back again.
                    self._disk.rename(path, checkpoint)

    def _list_hidden_directories(self) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self.root) if name.startswith(".step-"))
        except FileNotFoundError:
            return []


def _write_manifest_of_draft(draft: LocalDraft, manifest: bytes) -> None:
    file = draft.disk.create(draft.path / MANIFEST_FILE_NAME)
    try:
        file.write(manifest)
        file.sync()
    finally:
        file.close()
