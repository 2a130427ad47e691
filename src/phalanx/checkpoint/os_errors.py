"""Maps an OSError of a checkpoint's files to the error of phalanx: the disk refuses, or a file is
missing or wrong.

Torch-free.
"""

from __future__ import annotations

import errno

from phalanx.core.errors import CheckpointError, StorageError

# The file is not there, or is something else. Any other OSError says that the disk, or its owner,
# refuses.
_MISSING_FILE_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL)


def choose_checkpoint_error_class(error: OSError) -> type[CheckpointError]:
    """StorageError (exit 7) if the disk refuses; CheckpointError (exit 5) if a file is missing or
    wrong."""
    if error.errno in _MISSING_FILE_ERRNOS:
        return CheckpointError
    return StorageError


def convert_os_error(
    error: OSError, message: str, where: str, fix: str | None = None
) -> CheckpointError:
    """The CheckpointError or StorageError that says `message`, with `error` as its reason."""
    why = error.strerror or str(error)
    return choose_checkpoint_error_class(error)(message, where=where, why=why, fix=fix)
