"""Which error of a checkpoint an OSError is: the disk refuses, or what is wanted is not there.

Torch-free.
"""

from __future__ import annotations

import errno

from phalanx.core.errors import CheckpointError, StorageError

# What is wanted is not there, or is something else. Any other OSError says that the disk, or its
# owner, refuses.
_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL)


def kind_of(error: OSError) -> type[CheckpointError]:
    """StorageError (exit 7) where the disk refuses; CheckpointError (exit 5) where something is
    missing or wrong."""
    return CheckpointError if error.errno in _MISSING else StorageError


def unreadable(error: OSError, what: str, where: str, fix: str | None = None) -> CheckpointError:
    """The error that says that `what` is so because of `error`."""
    return kind_of(error)(what, where=where, why=error.strerror or str(error), fix=fix)
