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


def resource_error(error: OSError, doing: str, path: Path | str, *, place: str = "run.dir") -> PhalanxError:
    """The PhalanxError for an OSError met while `doing` something with `path`, which the user chose as `place`."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError(f"no space left while {doing}", where=str(path), why=reason, fix="free space there")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return ResourceError(f"not writable while {doing}", where=str(path), why=reason, fix=f"choose another {place}")
    return ResourceError(f"failed while {doing}", where=str(path), why=reason)


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
