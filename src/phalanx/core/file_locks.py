"""The kernel's lock on an open file, and what there is in its place on file systems without one."""

from __future__ import annotations

import errno
import fcntl

# What flock answers on file systems without it, some network ones among them.
_FLOCK_UNSUPPORTED_ERRNOS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


def try_to_lock_file(descriptor: int) -> bool:
    """Lock an open file for this process alone, without waiting; False if another one has it.

    True also where files cannot be locked: nothing keeps others out there. Raises OSError.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _FLOCK_UNSUPPORTED_ERRNOS:
            return True
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True
