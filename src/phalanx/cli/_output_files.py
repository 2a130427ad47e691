"""Files that a command writes at its end, looked at before the work that they would hold."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from phalanx.core.disk_errors import build_path_resource_error
from phalanx.core.errors import ResourceError, UsageError
from phalanx.core.files import open_regular_file, read_json, require_regular_file_mode


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


def require_writable_output(file: Path, doing: str, *, option: str) -> None:
    """Raise ResourceError where `file`, of which `option` names the place, cannot be written."""
    try:
        require_writable_place(file, makes_folder=True)
    except OSError as error:
        raise build_path_resource_error(error, doing, file, place=option) from None


def require_no_device(file: Path) -> None:
    """Raises ResourceError where `file` is there and is neither a file nor a directory: what
    replaced /dev/null would take its place for the whole machine, and /dev/stdout is a link that
    leads to a file for a moment."""
    if not file.exists() or file.is_dir():
        return
    if not file.is_file() or os.path.realpath(file.parent) == "/dev":
        raise ResourceError(
            "it is no file that can be replaced", where=str(file), fix="give the name of a file"
        )


def require_page_or_new_file(file: Path) -> None:
    """Raises UsageError where `file` is there and is no page that a page may replace: the job file
    of `phalanx plan --page job.toml`, say, or an event file; ResourceError for a device."""
    require_no_device(file)
    beginning = _read_beginning(file)
    if beginning and not beginning.lstrip().lower().startswith(b"<!doctype html"):
        raise _build_overwriting_error(file, "page")


def require_trace_or_new_file(file: Path) -> None:
    """Raises UsageError where `file` is there and is no trace."""
    # Each packet of a trace is field 1 of its message, a text begins otherwise.
    beginning = _read_beginning(file)
    if beginning and not beginning.startswith(b"\x0a"):
        raise _build_overwriting_error(file, "trace")


def require_profile_or_new_file(file: Path) -> None:
    """Raises UsageError where `file` is there and is no profile that `phalanx bench` wrote, of any
    version."""
    from phalanx.plan.profiles import PROFILE_SCHEMA

    if not _read_beginning(file):
        return
    try:
        profile = read_json(file)
    except ValueError:
        profile = None
    except OSError:
        return
    schema = profile.get("schema") if isinstance(profile, dict) else None
    if not str(schema).startswith(PROFILE_SCHEMA.partition("/")[0] + "/"):
        raise _build_overwriting_error(file, "profile")


def _read_beginning(file: Path) -> bytes:
    """Nothing of a file that is not there, or that cannot be read: whoever writes it says why."""
    try:
        with open_regular_file(file) as opened:
            return opened.read(64)
    except OSError:
        return b""


def _build_overwriting_error(file: Path, kind: str) -> UsageError:
    return UsageError(
        f"is there already, and is no {kind}; it is not overwritten",
        where=str(file),
        fix="give another file",
    )
