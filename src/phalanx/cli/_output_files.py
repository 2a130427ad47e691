"""Files that a command writes at its end, looked at before the work that they would hold."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from phalanx.core.files import require_regular_file_mode


def require_writable_place(file: Path, *, makes_folder: bool) -> None:
    """Raise OSError where `file` is something else than a regular file, or its folder cannot be
    written; with `makes_folder` a folder that is not there is made later."""
    if file.exists():
        # A device has its name for others, too: it is not replaced.
        require_regular_file_mode(file.stat().st_mode, file)
    folder = file.parent
    while makes_folder and not folder.exists():
        folder = folder.parent
    if not folder.exists():
        raise FileNotFoundError(errno.ENOENT, "there is no such folder", str(folder))
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "is not a folder", str(folder))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
