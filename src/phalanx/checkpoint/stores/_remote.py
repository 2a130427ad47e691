"""A file system of fsspec with bounded retries, which are reported, and errors in one line without
secrets."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from phalanx.checkpoint.chunks import FileSizeAndChecksums
from phalanx.core.disk import DiskFile
from phalanx.core.errors import CheckpointError, EnvironmentProblem, StorageError
from phalanx.core.secrets import Redactor
from phalanx.core.store_urls import find_url_problem

T = TypeVar("T")
ReportRetry = Callable[[str], None]

# Errors that another attempt cannot mend.
_PERMANENT_ERROR_CLASSES = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
)
# FileNotFoundError is an answer there, and no failure.
_READ_OPERATION_NAMES = ("reading", "looking at")
# Of libraries that may not be installed, and so by name.
_PERMANENT_ERROR_NAMES = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "ParamValidationError",
)
# The libraries give up soon (30 s without a byte) and ask once, because every request is made again
# here.
_OPTIONS_WITHOUT_CLIENT_RETRIES = {"mode": "standard", "total_max_attempts": 1}
_S3_FILE_SYSTEM_OPTIONS = {
    "config_kwargs": {
        "connect_timeout": 10,
        "read_timeout": 30,
        "retries": _OPTIONS_WITHOUT_CLIENT_RETRIES,
    }
}
_OPTIONS_OF_PROTOCOL: dict[str, dict[str, Any]] = {
    "s3": _S3_FILE_SYSTEM_OPTIONS,
    "s3a": _S3_FILE_SYSTEM_OPTIONS,
}
# At most so much is copied at once: see `_ObjectUploadStream.write`.
_UPLOAD_PART_BYTES = 1 << 22
_PIP_EXTRA_OF_PROTOCOL = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}


@dataclass(frozen=True)
class RetryPolicy:
    """The number of attempts of a request, and the wait before the second one; it doubles before
    each further one."""

    attempts: int = 4
    first_wait_s: float = 0.5


@dataclass(frozen=True)
class RemoteFolder:
    """A folder of a remote file system. Keys are paths below it.

    Every method raises StorageError, or FileNotFoundError for what is not there.
    """

    fs: Any
    protocol: str
    root: str
    say: ReportRetry = field(compare=False)
    patience: RetryPolicy = field(compare=False)
    on_work: Callable[[], None] = field(default=lambda: None, compare=False)
    """Called when a request, or a part of an upload, is done: a slow link gets on."""

    def url(self, key: str = "") -> str:
        """The URL of a key, for people, without user and password."""
        return _redact_url_in_text(f"{self.protocol}://{self._full_path_of_key(key).lstrip('/')}")

    def list_file_sizes(self, key: str = "") -> dict[str, int]:
        """Every file below a folder, by its path relative to it, with its bytes."""
        base = self._full_path_of_key(key).rstrip("/")

        def find() -> dict[str, Any]:
            try:
                # Sizes come with the listing: no request for each file.
                return dict(self.fs.find(base, detail=True))
            except FileNotFoundError:
                return {}

        sizes = {}
        for full_path, info in self._call_with_retries("listing", key, find).items():
            path = self._path_relative_to_base(full_path, base)
            if path:
                sizes[path] = int(info["size"])
        return sizes

    def size(self, key: str) -> int:
        return int(
            self._call_with_retries(
                "looking at", key, lambda: self.fs.info(self._full_path_of_key(key))
            )["size"]
        )

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._call_with_retries(
            "reading",
            key,
            lambda: bytes(self.fs.cat_file(self._full_path_of_key(key), start=start, end=stop)),
        )

    def modified_unix_s(self, key: str) -> float:
        try:
            return float(self.fs.modified(self._full_path_of_key(key)).timestamp())
        except Exception:
            # A file system without times.
            return 0.0

    def put_object(self, key: str, data: bytes) -> None:
        """Write an object in one request: it is there as a whole, or not at all."""
        self._call_with_retries(
            "writing", key, lambda: self.fs.pipe_file(self._full_path_of_key(key), data)
        )

    def put_object_if_absent(self, key: str, data: bytes) -> None:
        """Write an object unless it is there, in stores that can make a request depend on that
        (`If-None-Match`); others overwrite."""
        try:
            self.fs.pipe_file(self._full_path_of_key(key), data, mode="create")
        except FileExistsError:
            return
        except Exception:
            # A store that cannot do that, or that has an outage: `put_object` reports the second.
            self.put_object(key, data)

    def copy(self, source: str, target: str) -> bool:
        """Copy an object; returns False if the store does not copy."""
        try:
            self._call_with_retries(
                "copying",
                source,
                lambda: self.fs.cp_file(
                    self._full_path_of_key(source), self._full_path_of_key(target)
                ),
            )
        except (CheckpointError, OSError) as error:
            self.say(
                f"{self.url(source)} is sent again, because the store did not copy it: {error}"
            )
            return False
        return True

    def remove(self, key: str) -> None:
        """Remove an object. Does nothing if it is not there."""

        def remove() -> None:
            with suppress(FileNotFoundError):
                self.fs.rm_file(self._full_path_of_key(key))

        self._call_with_retries("removing", key, remove)

    def remove_folder_entry(self, key: str) -> None:
        """Remove a folder's own entry, if the file system has one."""
        with suppress(Exception):
            self.fs.rmdir(self._full_path_of_key(key))

    def write(
        self, key: str, produce: Callable[[DiskFile], FileSizeAndChecksums], *, block_bytes: int
    ) -> FileSizeAndChecksums:
        """Write an object from a stream; from its start again if that breaks."""
        return self._call_with_retries(
            "writing", key, lambda: self._write_object_once(key, produce, block_bytes)
        )

    def _write_object_once(
        self, key: str, produce: Callable[[DiskFile], FileSizeAndChecksums], block_bytes: int
    ) -> FileSizeAndChecksums:
        # A new upload for each attempt: `produce` writes the stream from its start.
        file = self.fs.open(self._full_path_of_key(key), "wb", block_size=block_bytes)
        try:
            stored = produce(_ObjectUploadStream(file, self.on_work))
            file.close()
        except BaseException:
            _abandon_upload(file)
            raise
        return stored

    def _full_path_of_key(self, key: str) -> str:
        if not key:
            return self.root
        return f"{self.root}/{key}"

    def _path_relative_to_base(self, path: str, base: str) -> str:
        return path.lstrip("/").removeprefix(base.lstrip("/")).lstrip("/")

    def _call_with_retries(self, doing: str, key: str, call: Callable[[], T]) -> T:
        """Call `call` until it succeeds, as often as `patience` allows.

        Raises StorageError with the last error after that, or at once for one that lasts.
        """
        wait_s = self.patience.first_wait_s
        for attempt in range(1, self.patience.attempts + 1):
            try:
                answer = call()
                self.on_work()
                return answer
            except CheckpointError:
                raise
            except Exception as error:
                # Stores have errors of their own, of no common class.
                if isinstance(error, FileNotFoundError) and doing in _READ_OPERATION_NAMES:
                    raise
                why = _redact_url_in_text(f"{type(error).__name__}: {error}")
                lasting = _is_error_without_retry(error)
                if lasting or attempt == self.patience.attempts:
                    message = f"failed while {doing} it"
                    if not lasting:
                        message += f", tried {attempt} times"
                    raise StorageError(
                        message,
                        where=self.url(key),
                        why=why,
                        fix="look at the store, its address and the credentials in the environment",
                    ) from None
                self.say(
                    f"{doing} {self.url(key)} failed and is tried again in {wait_s:g} s: {why}"
                )
                time.sleep(wait_s)
                # A store with too much to do gets more time with each attempt.
                wait_s *= 2
        raise AssertionError("unreachable")


class _ObjectUploadStream:
    """An object that is being sent. It is there once the file is closed."""

    def __init__(self, file: Any, on_work: Callable[[], None]) -> None:
        self._file, self._on_work = file, on_work

    def write(self, data: bytes | memoryview) -> None:
        """Write in parts: some file systems of fsspec copy all data that they get, and some only
        take bytes."""
        view = memoryview(data)
        for start in range(0, len(view), _UPLOAD_PART_BYTES):
            self._file.write(bytes(view[start : start + _UPLOAD_PART_BYTES]))
            self._on_work()

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


def _abandon_upload(file: Any) -> None:
    """End an upload without finishing it, so that no part of it stays and its finalizer sends
    nothing."""
    with suppress(Exception):
        file.discard()
    with suppress(Exception):
        file.closed = True


def _is_error_without_retry(error: Exception) -> bool:
    """True if a retry cannot help."""
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return (
        is_full
        or isinstance(error, _PERMANENT_ERROR_CLASSES)
        or type(error).__name__ in _PERMANENT_ERROR_NAMES
    )


def open_remote_folder(
    url: str,
    *,
    say: ReportRetry,
    patience: RetryPolicy,
    on_work: Callable[[], None] = lambda: None,
) -> RemoteFolder:
    """Open the folder at `url`.

    Raises EnvironmentProblem if a library is missing, CheckpointError for a URL that nothing opens.
    """
    if (refused := find_url_problem(url)) is not None:
        message, where = "the store cannot be opened", _redact_url_in_text(url)
        raise CheckpointError(message, where=where, why=f"it {refused.what}", fix=refused.fix)
    import fsspec

    protocol = url.partition("://")[0]
    # No cache of listings: other ranks, and other jobs, write there as well.
    try:
        fs, root = fsspec.core.url_to_fs(
            url, use_listings_cache=False, **_OPTIONS_OF_PROTOCOL.get(protocol, {})
        )
    except ImportError as error:
        fix = "install the library that fsspec names"
        if protocol in _PIP_EXTRA_OF_PROTOCOL:
            fix = f"pip install 'phalanx[{_PIP_EXTRA_OF_PROTOCOL[protocol]}]'"
        raise EnvironmentProblem(
            f"{protocol}:// needs a library", why=_redact_url_in_text(str(error)), fix=fix
        ) from None
    except Exception as error:
        why = _redact_url_in_text(f"{type(error).__name__}: {error}")
        raise CheckpointError(
            "the store cannot be opened", where=_redact_url_in_text(url), why=why
        ) from None
    if protocol in _OPTIONS_OF_PROTOCOL:
        # s3fs has retries of its own, around those of botocore.
        fs.retries = 1
    return RemoteFolder(fs, protocol, str(root).rstrip("/"), say, patience, on_work)


def _redact_url_in_text(text: str) -> str:
    return Redactor(os.environ).redact_text(text)
