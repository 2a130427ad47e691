"""Libraries that a compiler has left unfinished in the folder in which torch compiles: it was
killed, with the process that had started it. Torch takes what exists for what it would make, and
fails to load it, in every later process of this user."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import filelock

from phalanx.core.files import open_regular_file

_HEADER_BYTES = 64
_SUFFIXES = (".so", ".o")


def remove_cut_off_libraries(folder: Path) -> list[Path]:
    """Remove the libraries and object files below `folder`, torch's, that end before they should;
    returns them. Those that somebody is making now stay."""
    removed = []
    for directory, _, names in os.walk(folder):
        for name in names:
            path = Path(directory, name)
            if name.endswith(_SUFFIXES) and _ends_too_early(path):
                removed += [path] if _remove_unless_in_work(path, folder / "locks") else []
    return removed


def _ends_too_early(path: Path) -> bool:
    """True for a file that is shorter than its own header says: linkers write the table of sections
    at the end. Files that are no ELF of 64 bits are not known to be."""
    try:
        with open_regular_file(path) as file:
            header = file.read(_HEADER_BYTES)
            num_bytes = os.fstat(file.fileno()).st_size
    except OSError:
        return False
    if len(header) < _HEADER_BYTES:
        return True
    # 64 bits, little-endian.
    if header[:6] != b"\x7fELF\x02\x01":
        return False
    (table_start,) = struct.unpack_from("<Q", header, 40)
    entry_bytes, num_entries = struct.unpack_from("<HH", header, 58)
    return bool(table_start + entry_bytes * num_entries > num_bytes)


def _remove_unless_in_work(path: Path, lock_folder: Path) -> bool:
    """Remove a file whose lock of torch's is free; True if it was removed."""
    # Torch locks the name up to its first dot while it has the file made.
    lock = filelock.FileLock(lock_folder / f"{path.name.split('.')[0]}.lock", timeout=0)
    try:
        lock_folder.mkdir(exist_ok=True)
        with lock:
            # It may have been finished meanwhile.
            if _ends_too_early(path):
                path.unlink()
                return True
    except (filelock.Timeout, OSError):
        pass
    return False
