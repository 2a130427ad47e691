"""A folder of files as one string of bytes: an index in JSON, then their contents."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path, PurePosixPath

_MAX_FILES = 100_000


def pack_folder(folder: Path, is_kept: Callable[[str], bool]) -> bytes:
    """All regular files below `folder` whose relative path `is_kept` accepts. Raises OSError."""
    names, contents = [], []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if is_kept(name) and path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            names.append([name, len(content)])
            contents.append(content)
    return b"\n".join([json.dumps(names).encode(), b"".join(contents)])


def unpack_into_folder(bundle: bytes, folder: Path) -> int:
    """Write the files of `bundle` that `folder` lacks; returns how many it has.

    Raises ValueError for what is no bundle, or would write outside of `folder`, and OSError.
    """
    index, _, contents = bundle.partition(b"\n")
    names = json.loads(index)
    if not isinstance(names, list) or len(names) > _MAX_FILES:
        raise ValueError("no index")
    start = 0
    for name, num_bytes in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or num_bytes < 0:
            raise ValueError(f"the path {name!r} leaves the folder")
        if start + num_bytes > len(contents):
            raise ValueError("it is cut off")
        _write_if_absent(folder / path, contents[start : start + num_bytes])
        start += num_bytes
    return len(names)


def _write_if_absent(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        return
    # Whole under its name: a thread may look for it.
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)
