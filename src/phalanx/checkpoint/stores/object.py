"""Checkpoints in an object store that fsspec opens (s3://, gs://, az://, ...). Torch-free.

A checkpoint is a folder `step-N-ATTEMPT-RANDOM`: no save ever writes into the files of another. Its
manifest is put last, in one request, and removed first: a folder without one is no checkpoint. Of
several of one step the one with the highest attempt counts.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from phalanx.checkpoint.chunks import FileSizeAndChecksums
from phalanx.checkpoint.folder import CheckpointFolder, FileRangeReader
from phalanx.checkpoint.manifest import MANIFEST_FILE_NAME
from phalanx.checkpoint.stores._remote import RemoteFolder, RetryPolicy, open_remote_folder
from phalanx.checkpoint.stores.protocol import Draft
from phalanx.core.disk import DiskFile
from phalanx.core.errors import CheckpointError

# Sent in one request.
READ_BLOCK_BYTES = 16 << 20
# At most fetched in one request while a file is read through.
MAX_READ_AHEAD_BYTES = 32 << 20
OWNER_OBJECT_NAME = "owner.json"
_ATTEMPT_NAME_PATTERN = re.compile(r"step-(\d+)-(\d{4,})-[0-9a-f]{8}")


@dataclass(frozen=True)
class ObjectCheckpointFolder:
    """A checkpoint, or a draft of one."""

    remote: RemoteFolder
    name: str

    @property
    def url(self) -> str:
        return self.remote.url(self.name)

    @property
    def step(self) -> int:
        match = _ATTEMPT_NAME_PATTERN.fullmatch(self.name)
        if match is None:
            return -1
        return int(match[1])

    @property
    def attempt_of_name(self) -> int:
        match = _ATTEMPT_NAME_PATTERN.fullmatch(self.name)
        if match is None:
            return -1
        return int(match[2])

    def file_sizes(self) -> dict[str, int]:
        return self.remote.list_file_sizes(self.name)

    def where(self, name: str) -> str:
        return f"{self.url}/{name}"

    def read(self, name: str) -> bytes:
        return self.remote.read(f"{self.name}/{name}")

    def open(self, name: str) -> FileRangeReader:
        return _ObjectRangeReader(self.remote, f"{self.name}/{name}")

    def written_unix_s(self) -> float:
        return self.remote.modified_unix_s(f"{self.name}/{MANIFEST_FILE_NAME}")


class _ObjectRangeReader:
    """Reads ranges of one object.

    The more ranges begin where the last one ended, the more is fetched at once.
    """

    def __init__(self, remote: RemoteFolder, key: str) -> None:
        self._remote, self._key = remote, key
        self._num_bytes = remote.size(key)
        self._start, self._data = 0, memoryview(b"")
        self._end_of_last, self._num_on = -1, 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def fill_buffer_from(self, buffer: memoryview, offset: int) -> None:
        end = offset + len(buffer)
        if not self._start <= offset <= end <= self._start + len(self._data):
            if offset == self._end_of_last:
                self._num_on += 1
            else:
                self._num_on = 0
            # Twice as much each time: a file read through takes few requests, a jump wastes little.
            ahead = min(MAX_READ_AHEAD_BYTES, len(buffer) << max(0, self._num_on - 1))
            stop = min(self._num_bytes, max(end, offset + ahead))
            self._start, self._data = offset, memoryview(self._remote.read(self._key, offset, stop))
        data = self._data[offset - self._start : end - self._start]
        # The object is shorter than it was when it was opened.
        if len(data) != len(buffer):
            raise EOFError
        buffer[:] = data
        self._end_of_last = end

    def close(self) -> None:
        self._data = memoryview(b"")


@dataclass(frozen=True)
class ObjectDraft:
    """A folder without a manifest yet."""

    folder: ObjectCheckpointFolder
    token: str

    @property
    def url(self) -> str:
        return self.folder.url

    @property
    def step(self) -> int:
        return self.folder.step

    def write(
        self, name: str, produce: Callable[[DiskFile], FileSizeAndChecksums]
    ) -> FileSizeAndChecksums:
        return self.folder.remote.write(
            f"{self.folder.name}/{name}", produce, block_bytes=READ_BLOCK_BYTES
        )

    def reuse_file_of_checkpoint(
        self, name: str, folder: CheckpointFolder, earlier_name: str
    ) -> bool:
        """Have the store itself make a copy."""
        if (
            not isinstance(folder, ObjectCheckpointFolder)
            or folder.remote.root != self.folder.remote.root
        ):
            return False
        return self.folder.remote.copy(
            f"{folder.name}/{earlier_name}", f"{self.folder.name}/{name}"
        )


@dataclass(frozen=True)
class StoreOwnerObject:
    """The owner object, a file beside the checkpoints."""

    remote: RemoteFolder

    @property
    def url(self) -> str:
        return self.remote.url(OWNER_OBJECT_NAME)

    def read(self) -> bytes | None:
        try:
            return self.remote.read(OWNER_OBJECT_NAME)
        except FileNotFoundError:
            return None

    def write(self, text: bytes) -> None:
        self.remote.put_object_if_absent(OWNER_OBJECT_NAME, text)

    def remove(self) -> None:
        self.remote.remove(OWNER_OBJECT_NAME)


class ObjectStore:
    """The checkpoints of one run below a URL: no other run may write there."""

    def __init__(self, remote: RemoteFolder) -> None:
        self._remote = remote

    @classmethod
    def open(
        cls,
        url: str,
        *,
        say: Callable[[str], None] = lambda text: None,
        patience: RetryPolicy | None = None,
        on_work: Callable[[], None] = lambda: None,
    ) -> ObjectStore:
        """Open the store at `url`; `on_work` is called for each request or part that is done.
        Raises CheckpointError for a URL that nothing here opens."""
        patience = patience or RetryPolicy()
        return cls(open_remote_folder(url, say=say, patience=patience, on_work=on_work))

    @property
    def url(self) -> str:
        return self._remote.url()

    @property
    def owner(self) -> StoreOwnerObject:
        return StoreOwnerObject(self._remote)

    def folders(self) -> list[CheckpointFolder]:
        newest: dict[int, ObjectCheckpointFolder] = {}
        for name, files in self._list_object_folders().items():
            folder = ObjectCheckpointFolder(self._remote, name)
            other = newest.get(folder.step)
            # Without a manifest it was never committed, or is on its way out.
            if MANIFEST_FILE_NAME in files and (
                other is None or folder.attempt_of_name > other.attempt_of_name
            ):
                newest[folder.step] = folder
        return [newest[step] for step in sorted(newest)]

    def folder(self, name: str) -> ObjectCheckpointFolder:
        return ObjectCheckpointFolder(self._remote, name)

    def require_writable(self) -> None:
        """Raise CheckpointError if the store cannot be written: now, and not after hours at the
        first save."""
        key = f".writable-{secrets.token_hex(4)}"
        self._remote.put_object(key, b"x")
        self._remote.remove(key)

    def begin_draft(self, step: int) -> ObjectDraft:
        self.remove_leftovers()
        last_attempt = 0
        for name in self._list_object_folders():
            folder = self.folder(name)
            if folder.step == step:
                last_attempt = max(last_attempt, folder.attempt_of_name)
        # Random as well: two saves of a step, neither of which sees the other, get two folders.
        return self.join_draft(step, f"{last_attempt + 1:04d}-{secrets.token_hex(4)}")

    def join_draft(self, step: int, token: str) -> ObjectDraft:
        return ObjectDraft(self.folder(f"step-{step}-{token}"), token)

    def get_folder_once_committed(self, draft: Draft) -> ObjectCheckpointFolder:
        assert isinstance(draft, ObjectDraft)
        return draft.folder

    def commit(self, draft: Draft, manifest: bytes) -> CheckpointFolder:
        folder = self.get_folder_once_committed(draft)
        # Before the manifest, which promises that they are there.
        _require_files_uploaded_as_sent(folder, manifest)
        # This one request is the commit: before it the folder is no checkpoint.
        self._remote.put_object(f"{folder.name}/{MANIFEST_FILE_NAME}", manifest)
        with suppress(OSError, CheckpointError):
            # The checkpoint is there: what cannot be removed now, the next save removes.
            for name in self._list_object_folders():
                older = self.folder(name)
                if older.step == folder.step and older.attempt_of_name < folder.attempt_of_name:
                    self.remove(older)
        return folder

    def discard(self, draft: Draft) -> None:
        with suppress(OSError, CheckpointError):
            self.remove(self.get_folder_once_committed(draft))

    def remove(self, folder: CheckpointFolder) -> None:
        files = self._remote.list_file_sizes(folder.name)
        # First, so that a crash on the way leaves no checkpoint with files missing.
        if MANIFEST_FILE_NAME in files:
            self._remote.remove(f"{folder.name}/{MANIFEST_FILE_NAME}")
        for name in files:
            if name != MANIFEST_FILE_NAME:
                self._remote.remove(f"{folder.name}/{name}")
        self._remote.remove_folder_entry(folder.name)

    def remove_leftovers(self) -> None:
        committed = {folder.name for folder in self.folders()}
        for name in self._list_object_folders():
            if name not in committed:
                self.remove(self.folder(name))

    def _list_object_folders(self) -> dict[str, set[str]]:
        """The folders that saves made, with the names of their files."""
        files_by_folder: dict[str, set[str]] = {}
        for key in self._remote.list_file_sizes():
            folder, slash, name = key.partition("/")
            if slash and _ATTEMPT_NAME_PATTERN.fullmatch(folder):
                files_by_folder.setdefault(folder, set()).add(name)
        return files_by_folder


def find_object_folder(url: str) -> ObjectCheckpointFolder | None:
    """The checkpoint at a URL; None if there is no manifest.

    Raises CheckpointError, OSError.
    """
    parent, _, name = url.rstrip("/").rpartition("/")
    # s3://bucket is no folder of a bucket.
    if parent.endswith("/"):
        return None
    folder = ObjectCheckpointFolder(
        open_remote_folder(parent, say=lambda text: None, patience=RetryPolicy()), name
    )
    if MANIFEST_FILE_NAME not in folder.file_sizes():
        return None
    return folder


def _require_files_uploaded_as_sent(folder: ObjectCheckpointFolder, manifest: bytes) -> None:
    """Raise CheckpointError unless the store holds the files as they were sent: an upload that was
    cut off may look finished.

    Removes other files: a copy whose answer was lost has been made all the same.
    """
    files: dict[str, dict[str, Any]] = json.loads(manifest)["files"]
    sizes = folder.file_sizes()
    for name, stored in files.items():
        if sizes.get(name) != stored["num_bytes"]:
            amount = "nothing"
            if name in sizes:
                amount = f"{sizes[name]} bytes"
            raise CheckpointError(
                f"the store has {amount} of it, not the {stored['num_bytes']} bytes sent",
                where=folder.where(name),
            )
    for name in sorted(sizes.keys() - files.keys()):
        folder.remote.remove(f"{folder.name}/{name}")
