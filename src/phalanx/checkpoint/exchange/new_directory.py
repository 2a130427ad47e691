"""A directory that comes into being as a whole: what is written into it is hidden until all of
it is durable."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from phalanx.core.disk import Disk, make_directories, remove_tree, write_bytes_durably
from phalanx.core.disk_errors import build_path_resource_error
from phalanx.core.errors import UsageError
from phalanx.core.files import MAX_TOKENIZER_FILE_BYTES, read_whole_regular_file


@contextmanager
def create_directory_atomically(out: Path, disk: Disk | None = None) -> Iterator[Path]:
    """Yields a hidden directory beside `out`, which becomes `out` if the body succeeds and is gone
    if not.

    Raises UsageError if `out` is there and not empty, ResourceError if it cannot be written.
    """
    disk = disk or Disk()
    require_absent_or_empty(out)
    partial = out.parent / f".{out.name}.{secrets.token_hex(4)}.partial"
    try:
        make_directories(disk, out.absolute().parent)
        disk.make_directory(partial)
        yield partial
        disk.sync_directory(partial)
        # Again: writing may have taken long, and something may have come meanwhile.
        require_absent_or_empty(out)
        with suppress(FileNotFoundError):
            # Only an empty one can be removed: nothing that somebody put there goes.
            disk.remove_directory(out)
        disk.rename(partial, out)
        disk.sync_directory(out.absolute().parent)
    except OSError as error:
        raise build_path_resource_error(error, "writing", out) from None
    finally:
        with suppress(OSError):
            # After the rename it is not there any more: nothing happens.
            remove_tree(disk, partial)


def require_absent_or_empty(out: Path) -> None:
    """Raise UsageError unless there is nothing at `out`, or an empty directory."""
    try:
        is_free = not out.exists() and not out.is_symlink()
        if out.is_dir():
            is_free = not os.listdir(out)
    except OSError as error:
        raise build_path_resource_error(error, "opening", out) from None
    if not is_free:
        raise UsageError(
            "something is there already", where=str(out), fix="choose another --out, or remove it"
        )


def copy_file_durably(source: Path, target: Path, disk: Disk | None = None) -> None:
    """A small file, durably."""
    write_bytes_durably(
        disk or Disk(), target, read_whole_regular_file(source, MAX_TOKENIZER_FILE_BYTES)
    )
