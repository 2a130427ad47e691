"""What becomes of an error of the system's that no verb has caught: one line, where it is nobody's
bug."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from phalanx.core.disk_errors import convert_disk_error
from phalanx.core.errors import PhalanxError, ResourceError, UsageError


def convert_uncaught_os_error(error: Exception) -> PhalanxError | None:
    """The error for a disk that refuses something, or a path that cannot be looked at; None for
    anything else, whose traceback is the message."""
    return convert_disk_error(error, "writing or reading files") or _convert_path_error(error)


def _convert_path_error(error: Exception) -> PhalanxError | None:
    """The error for a path that the system lets nobody look at: in a folder that may not be
    searched, say, or too long for a name. None for anything else, for a file of phalanx's own code,
    and for what user code met, whose traceback tells where."""
    from phalanx.core.uncaught import TRACEBACK_VARIABLE

    name = getattr(error, "filename", None)
    # A pipe that nobody reads any more is no path: whoever read has enough.
    if not isinstance(error, OSError) or isinstance(error, BrokenPipeError):
        return None
    if error.errno is None or not isinstance(name, str | bytes):
        return None
    path = os.path.abspath(os.fsdecode(name))
    if Path(path).is_relative_to(Path(__file__).parents[1]) or os.environ.get(TRACEBACK_VARIABLE):
        return None
    if convert_disk_error(error, "looking at files", refusals=(error.errno,)) is None:
        return None
    where = os.fsdecode(name)
    if error.errno in (errno.EACCES, errno.EPERM):
        fix = "it takes the permission to search every folder above it, too"
        return ResourceError("it cannot be opened", where=where, why=error.strerror, fix=fix)
    return UsageError("it cannot be opened", where=where, why=error.strerror)
