"""Files that are either whole or absent, and names that stay where they belong."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

from phalanx.core.errors import PhalanxError, ResourceError, UsageError

SAFE_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


def check_name(name: str, what: str) -> str:
    """Return `name` if it can be a file name; raise UsageError otherwise."""
    if not SAFE_NAME.fullmatch(name) or name in (".", ".."):
        raise UsageError(f"{what} {name!r} is not a usable name", fix="use letters, digits, '.', '_' and '-'")
    return name


def fsync_directory(directory: Path) -> None:
    """Make a rename inside `directory` durable."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_bytes_atomic(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write `data` beside `path`, then rename: a reader sees the old file or the new one, never a part.

    Raises OSError; nothing is left beside `path` then.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if durable:
        fsync_directory(path.parent)


def write_json_atomic(path: Path, value: Any, *, durable: bool = True) -> None:
    text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    write_bytes_atomic(path, text.encode(), durable=durable)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
# What a disk says when it will not do what any other disk would: no fault of a name, a format or a program.
_REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG, errno.ESTALE, errno.ENODEV, errno.ENXIO)

_NO_SPACE = os.strerror(errno.ENOSPC)


def is_refused_by_disk(error: BaseException) -> bool:
    """True for an OSError by which a disk refuses to write or read: full, over quota, read-only, broken, too large."""
    return isinstance(error, OSError) and error.errno in _REFUSALS


def fix_of(error: OSError, path: Path | str, *, place: str = "run.dir") -> str | None:
    """What a person can do about an OSError met at `path`, which they chose as `place`; None where nobody knows."""
    if error.errno == errno.ENOSPC and _has_no_inodes(Path(path)):
        return "remove files there: the file system has no inodes left"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free space there"
    if error.errno == errno.EFBIG:
        return "raise the limit on the size of files (ulimit -f)"
    if error.errno in _NOT_WRITABLE:
        return f"make it writable, or choose another {place}"
    if error.errno in _REFUSALS:
        return f"look at the disk (dmesg), or choose another {place}"
    return None


def resource_error(error: OSError, doing: str, path: Path | str, *, place: str = "run.dir") -> PhalanxError:
    """The PhalanxError for an OSError met while `doing` something with `path`, which the user chose as `place`."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    what = f"failed while {doing}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = f"no space left while {doing}"
    elif error.errno in _NOT_WRITABLE:
        what = f"not writable while {doing}"
    return ResourceError(what, where=str(path), why=reason, fix=fix_of(error, path, place=place))


def disk_problem(error: BaseException, doing: str) -> PhalanxError | None:
    """The ResourceError for an error by which a disk refuses, wherever it was met; None for any other error."""
    if isinstance(error, OSError) and is_refused_by_disk(error):
        return resource_error(error, doing, str(error.filename or "a file"))
    if isinstance(error, RuntimeError) and _NO_SPACE in str(error):  # of C++, which has no errno to look at
        why = str(error).strip().splitlines()[0]
        return ResourceError(f"no space left while {doing}", why=why, fix="free space there")
    return None


def _has_no_inodes(path: Path) -> bool:
    """True where the file system of `path`, or of the nearest folder above it that is there, has no inode left."""
    for folder in (path, *path.parents):
        try:
            status = os.statvfs(folder)
        except OSError:
            continue
        return status.f_files > 0 and status.f_favail == 0
    return False


def open_run_directory(directory: Path, *, needed_bytes: int = 0) -> Path:
    """Create `directory` and prove that it can be written and has room; raise ResourceError otherwise."""
    import shutil

    probe = directory / f".writable.{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"x" * 4096)
        probe.unlink()
        free_bytes = shutil.disk_usage(directory).free
    except OSError as error:
        try:
            probe.unlink(missing_ok=True)
        except OSError:
            pass
        raise resource_error(error, "opening the run directory", directory) from None
    if free_bytes < needed_bytes:
        from phalanx.core.units import format_bytes

        raise ResourceError(
            f"the run needs about {format_bytes(needed_bytes)} and {format_bytes(free_bytes)} are free",
            where=str(directory),
            fix="free space there or choose another run.dir",
        )
    return directory
