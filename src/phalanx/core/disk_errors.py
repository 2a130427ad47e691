"""What a disk refuses us, as an error that says what to do about it."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Collection
from pathlib import Path

from phalanx.core.errors import PhalanxError, ResourceError
from phalanx.core.library_errors import LIBRARY_MODULE_NAMES, find_os_error_behind

_NOT_WRITABLE_ERRNOS = (errno.EACCES, errno.EPERM, errno.EROFS)
# A process, or the machine, may open no more files.
_TOO_MANY_FILES_ERRNOS = (errno.EMFILE, errno.ENFILE)
# What a disk or the system says when it will not do what any other would: no fault of a name, a
# format or a program.
PERMANENT_WRITE_ERRNOS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG),
    *_TOO_MANY_FILES_ERRNOS,
)
# The rest may pass: an NFS server may come back.
WRITE_FAILURE_ERRNOS = (*PERMANENT_WRITE_ERRNOS, errno.ESTALE, errno.ENODEV, errno.ENXIO)


def _list_errnos_of_this_platform(*names: str) -> tuple[int, ...]:
    # Some are Linux's alone.
    return tuple(getattr(errno, name) for name in names if hasattr(errno, name))


# What only a failing disk or file server says when it is read: of a file that is missing or damaged
# it says otherwise.
READ_FAILURE_ERRNOS = _list_errnos_of_this_platform(
    *("EIO", "ESTALE", "ENODEV", "ENXIO", "EUCLEAN", "EBADMSG"),
    *("EREMOTEIO", "ETIMEDOUT", "ENOTCONN"),
)
_PACKAGE_NAME = __name__.partition(".")[0]

_FEW_INODES, _ROOM_BYTES = 16, 64 * 2**20

# Folders in which verbs keep what they need for a while: only TMPDIR says where they are.
SCRATCH_DIRECTORY_PREFIX = "phalanx-scratch-"
_SCRATCH_NAME_PATTERN = re.compile(rf"{SCRATCH_DIRECTORY_PREFIX}\w+-\w{{8}}")


def suggest_fix_for_path_error(
    error: OSError, path: Path | str, *, place: str = "run.dir"
) -> str | None:
    """The fix for an OSError at `path`, which the user chose by the setting `place`; None if none
    is known."""
    is_scratch = _is_path_in_scratch_directory(Path(path))
    setting = "TMPDIR" if is_scratch else place
    # The kernel has one code for both: no space left, and no inode.
    if error.errno == errno.ENOSPC and _has_no_free_inodes(Path(path)):
        return "remove files there: the file system has no inodes left"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        if is_scratch:
            return "free space there, or choose another TMPDIR"
        return "free space there"
    if error.errno == errno.EFBIG:
        return "raise the limit on the size of files (ulimit -f)"
    if error.errno == errno.EMFILE:
        return "raise the limit on open files (ulimit -n)"
    if error.errno == errno.ENFILE:
        return "raise the machine's limit on open files (sysctl fs.file-max)"
    if error.errno in _NOT_WRITABLE_ERRNOS:
        return f"make it writable, or choose another {setting}"
    if error.errno in WRITE_FAILURE_ERRNOS or error.errno in READ_FAILURE_ERRNOS:
        return f"look at the disk (dmesg), or choose another {setting}"
    return None


def build_path_resource_error(
    error: OSError, doing: str, path: Path | str, *, place: str = "run.dir"
) -> PhalanxError:
    """The PhalanxError for an OSError met while `doing` something with `path`, which the user
    chose as `place`."""
    reason = error.strerror
    if not reason:
        reason = os.strerror(error.errno) if error.errno else str(error)
    summary = f"failed while {doing}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        summary = f"no space left while {doing}"
    elif error.errno in _NOT_WRITABLE_ERRNOS:
        summary = f"not writable while {doing}"
    elif error.errno in _TOO_MANY_FILES_ERRNOS:
        summary = f"no file can be opened any more while {doing}"
    return ResourceError(
        summary,
        where=str(path),
        why=reason,
        fix=suggest_fix_for_path_error(error, path, place=place),
    )


def convert_disk_error(
    error: BaseException,
    doing: str,
    *,
    refusals: Collection[int] = WRITE_FAILURE_ERRNOS,
    run_dir: Path | None = None,
    where: Path | None = None,
) -> PhalanxError | None:
    """The ResourceError for an error by which a disk refuses us something; None for any other
    error.

    Us: it was raised by our own code, or is about a file of the run. What user code met elsewhere
    is its own error, whose traceback tells where. `where`: the folder that was written to, for
    errors that name no file.
    """
    if not _is_raised_by_phalanx_code(error) and not _is_about_file_inside(run_dir, error):
        return None
    if isinstance(error, OSError) and error.errno is not None:
        refusal: OSError | None = error
    else:
        refusal = find_os_error_behind(error, refusals)
    if refusal is None or (refusal.errno is not None and refusal.errno not in refusals):
        return None
    path = str(refusal.filename or where or "a file")
    if refusal.errno is not None:
        return build_path_resource_error(refusal, doing, path)
    summary = f"the disk did not take all of a file while {doing}"
    return ResourceError(
        summary, where=path, why=str(refusal), fix="free space there, or look at the disk (dmesg)"
    )


def _is_raised_by_phalanx_code(error: BaseException) -> bool:
    """True if the innermost frame is ours, those of the libraries not counted that do our work
    as well as a user's."""
    innermost, trace = "", error.__traceback__
    while trace is not None:
        home = str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        # Of the frames from the outermost to the innermost: the last one that counts stays.
        if home not in sys.stdlib_module_names and home not in LIBRARY_MODULE_NAMES:
            innermost = home
        trace = trace.tb_next
    return innermost == _PACKAGE_NAME


def _is_about_file_inside(directory: Path | None, error: BaseException) -> bool:
    name = getattr(error, "filename", None)
    if directory is None or not isinstance(name, str | bytes):
        return False
    path = os.path.realpath(os.fsdecode(name))
    return path.startswith(os.path.join(os.path.realpath(directory), ""))


def _is_path_in_scratch_directory(path: Path) -> bool:
    """True for a path inside a folder that a verb made where temporary files go."""
    return any(map(_SCRATCH_NAME_PATTERN.fullmatch, path.parts))


def _has_no_free_inodes(path: Path) -> bool:
    """True where the file system of `path`, or of the nearest folder above it that is there, has no
    inode left.

    A few may be free again when this is asked: what was half written has been removed. There is
    room for bytes then.
    """
    for folder in (path, *path.parents):
        try:
            status = os.statvfs(folder)
        except OSError:
            continue
        most = 0
        if status.f_bavail * status.f_frsize > _ROOM_BYTES:
            most = _FEW_INODES
        # f_files is 0 where a file system makes inodes as it needs them.
        return status.f_files > 0 and status.f_favail <= most
    return False
