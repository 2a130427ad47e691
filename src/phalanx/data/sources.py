"""What `data.source` names, found on this machine: documents of text, or one array of token ids. Torch-free.

Everything that can be wrong with a source is said here, as a DataError of one line: where it is, what was wrong and
what to do.
"""

from __future__ import annotations

import glob
import os
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import DataError, did_you_mean

END_OF_DOCUMENT = 256
CHUNK_TOKENS = 1 << 20

_SNIFF_BYTES = 8192
_NOT_LIBRARY_SOURCE = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


@dataclass(frozen=True)
class Document:
    """One file of text. Its `name` does not depend on where the tree lies, so that neither does the split."""

    name: str
    path: Path
    num_bytes: int

    @property
    def num_tokens(self) -> int:
        """One token per byte, and the end of the document."""
        return self.num_bytes + 1


@dataclass(frozen=True)
class Documents:
    """The text documents of a source in order of name, and how many binary files were left out."""

    found: tuple[Document, ...]
    num_skipped: int


def is_token_ids(source: str) -> bool:
    """True if `source` is a .npy of token ids rather than text."""
    is_pattern = glob.has_magic(source) and not os.path.exists(_path(source))
    return source.lower().endswith(".npy") and not is_pattern and not os.path.isdir(_path(source))


def find_documents(source: str) -> Documents:
    """The documents of a text source. Raises DataError where there is none."""
    try:
        root, names = _list_files(source)
    except OSError as error:
        raise _unreadable(error, error.filename or source) from None
    documents: list[Document] = []
    num_skipped = 0
    for name in names:
        num_bytes, binary = _look_at(root / name)
        if binary:
            num_skipped += 1
        else:
            documents.append(Document(_printable(name), root / name, num_bytes))
    if not documents:
        raise _nothing_found(source, num_skipped)
    if not any(document.num_bytes for document in documents):
        raise DataError("there is no text in it", where=where_of(source), why="every file is empty")
    return Documents(tuple(documents), num_skipped)


def read_tokens(document: Document) -> Iterator[NDArray[np.uint16]]:
    """The document's bytes as tokens, at most CHUNK_TOKENS at a time, then the end-of-document token."""
    try:
        with open(document.path, "rb") as file:
            while chunk := file.read(CHUNK_TOKENS):
                yield np.frombuffer(chunk, np.uint8).astype(np.uint16)
    except OSError as error:
        raise _unreadable(error, document.path) from None
    yield np.array([END_OF_DOCUMENT], np.uint16)


def open_token_ids(source: str) -> NDArray[np.integer]:
    """The ids of a .npy, memory-mapped, 1-D [num_tokens]. Raises DataError unless that is what the file holds."""
    try:
        ids = np.lib.format.open_memmap(_path(source), mode="r")  # unlike np.load it never unpickles
    except FileNotFoundError:
        raise _missing(source) from None
    except OSError as error:
        raise _unreadable(error, source) from None
    except (ValueError, EOFError) as error:
        raise DataError("not a readable .npy file", where=where_of(source), why=str(error)) from None
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise DataError("not a 1-D array of integers", where=where_of(source), why=f"it is {ids.ndim}-D {ids.dtype}")
    if ids.size == 0:
        raise DataError("there are no token ids in it", where=where_of(source), why="the array is empty")
    return ids


def _list_files(source: str) -> tuple[Path, list[str]]:
    """The folder that names are relative to, and the sorted names of the regular files of `source`."""
    if source == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        return root, [name for name in _walk(root, _NOT_LIBRARY_SOURCE) if name.endswith(".py")]
    path = _path(source)
    if source and path.is_dir():
        return path, _walk(path, frozenset())
    if source and path.exists():
        return path.parent, [path.name]
    if glob.has_magic(source) and "://" not in source:
        root, pattern = _split_pattern(path)
        matches = glob.glob(pattern, root_dir=root, recursive=True)
        return root, sorted({Path(match).as_posix() for match in matches if (root / match).is_file()})
    raise _missing(source)


def _walk(root: Path, ignored_folders: frozenset[str]) -> list[str]:
    """Relative names of the regular, non-hidden files below `root`, sorted. Linked folders are not followed."""

    def stop(error: OSError) -> None:
        raise error

    names: list[str] = []
    for folder, subfolders, files in os.walk(root, onerror=stop):
        subfolders[:] = [name for name in subfolders if name not in ignored_folders and not name.startswith(".")]
        paths = [Path(folder, name) for name in files if not name.startswith(".")]
        names += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    return sorted(names)


def _split_pattern(pattern: Path) -> tuple[Path, str]:
    """'texts/2024/*/a*.txt' -> ('texts/2024', '*/a*.txt'): documents are named from the first wildcard on."""
    parts = pattern.parts
    first = next(position for position, part in enumerate(parts) if glob.has_magic(part))
    return Path(*parts[:first]), str(Path(*parts[first:]))


def _look_at(path: Path) -> tuple[int, bool]:
    """Size in bytes, and whether the file is binary (NUL in its first 8 KiB)."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise DataError("not a regular file", where=where_of(path))
        with open(path, "rb") as file:
            return status.st_size, b"\0" in file.read(_SNIFF_BYTES)
    except OSError as error:
        raise _unreadable(error, path) from None


def _printable(name: str) -> str:
    """A name that is text even where the file system's is not UTF-8."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def where_of(source: str | Path) -> str:
    """How an error names a source, or a file of it."""
    return f"data.source {_printable(str(source))}"


def _unreadable(error: OSError, path: str | Path) -> DataError:
    return DataError("cannot be read", where=where_of(path), why=error.strerror or str(error))


def _nothing_found(source: str, num_skipped: int) -> DataError:
    if num_skipped:
        count = "the file is" if num_skipped == 1 else f"all {num_skipped} files are"
        return DataError(
            "there is no text in it",
            where=where_of(source),
            why=f"{count} binary: NUL in the first 8 KiB",
            fix="give text as UTF-8, or token ids as a .npy",
        )
    if glob.has_magic(source):
        return DataError("no file matches the pattern", where=where_of(source), fix='"**" matches folders at any depth')
    return DataError("there is no file in it", where=where_of(source), why="hidden files do not count")


def _missing(source: str) -> DataError:
    if "://" in source:
        fix = "only files of this machine are read: copy it here first"
    else:
        fix = _near_name(source) or 'give a file, a folder, a pattern, or "stdlib"'
    return DataError("no such file or folder", where=where_of(source), fix=fix)


def _near_name(source: str) -> str:
    """'did you mean "x"?' for a name that exists beside the first missing part of `source`, or nothing."""
    path = _path(source)
    missing = next((part for part in [*reversed(path.parents), path] if not os.path.exists(part)), path)
    try:
        known = os.listdir(missing.parent)
    except OSError:
        known = []
    return did_you_mean(missing.name, [*known, "stdlib"] if os.sep not in source else known)


def _path(source: str) -> Path:
    return Path(os.path.expanduser(source))
