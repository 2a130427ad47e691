"""What `data.source` or an input of `data build` names, found on this machine: files of text or of rows. Torch-free.

Everything that can be wrong with finding them is said here, as a DataError of one line: where it is, what was wrong and
what to do.
"""

from __future__ import annotations

import glob
import os
import stat
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from phalanx.core.errors import DataError, did_you_mean

Format = Literal["text", "jsonl", "jsonl.gz", "jsonl.zst", "parquet", "arrow"]

_ENDINGS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonl.gz": "jsonl.gz",
    ".ndjson.gz": "jsonl.gz",
    ".json.gz": "jsonl.gz",
    ".jsonl.zst": "jsonl.zst",
    ".json.zst": "jsonl.zst",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
_DATASET = "dataset.json"
_SNIFF_BYTES = 8192
_NPY = "; token ids need no building: data.source takes the .npy itself"
_NOT_LIBRARY_SOURCE = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


@dataclass(frozen=True)
class SourceFile:
    """One file of an input. Its `name` does not depend on where the tree lies, so that neither does the split."""

    name: str
    path: str
    num_bytes: int
    modified_ns: int
    format: Format


@dataclass(frozen=True)
class Found:
    """The files of one input in order of name, and how many binary files were left out."""

    source: str
    files: tuple[SourceFile, ...]
    num_skipped: int


def format_of(name: str) -> Format:
    """What a file holds, by its ending; anything that is not known to be rows is one document of text."""
    lowered = name.lower()
    return next((kind for ending, kind in _ENDINGS.items() if lowered.endswith(ending)), "text")


def find_files(sources: Sequence[str], named: str = "data.source") -> list[Found]:
    """The files of each input. Raises DataError for one where there is nothing to read, as a value of `named`."""
    try:
        found = [_find(source, f"{number}/" if number else "") for number, source in enumerate(sources)]
        if not any(file.num_bytes for one in found for file in one.files):
            raise DataError("there is no text in it", where=", ".join(sources), why="every file is empty")
    except DataError as error:
        where = _printable(f"{named} {error.where}".strip())
        raise DataError(error.what, where=where, why=error.why, fix=error.fix) from None
    return found


def _find(source: str, prefix: str) -> Found:
    """`prefix` keeps documents apart that have the same name in several inputs."""
    try:
        root, names = _list_files(source)
    except OSError as error:
        raise _unreadable(error, error.filename or source) from None
    if (root / _DATASET).is_file() and _DATASET in names:
        raise DataError("it is a dataset already", where=source, fix=f"train on it: data.source={source}")
    files: list[SourceFile] = []
    num_skipped = 0
    for name in names:
        kind = format_of(name)
        path = root / name
        try:
            status = path.stat()
        except OSError as error:
            raise _unreadable(error, path) from None
        if not stat.S_ISREG(status.st_mode):
            raise DataError("not a regular file", where=str(path))
        if kind == "text" and _is_binary(path):
            num_skipped += 1
        else:
            text_name = prefix + _printable(name)
            files.append(SourceFile(text_name, os.path.abspath(path), status.st_size, status.st_mtime_ns, kind))
    if not files:
        raise _nothing_found(source, num_skipped)
    return Found(_printable(source), tuple(files), num_skipped)


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


def _is_binary(path: Path) -> bool:
    """NUL in its first 8 KiB."""
    try:
        with open(path, "rb") as file:
            return b"\0" in file.read(_SNIFF_BYTES)
    except OSError as error:
        raise _unreadable(error, path) from None


def _printable(name: str) -> str:
    """A name that is text even where the file system's is not UTF-8."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _unreadable(error: OSError, path: str | Path) -> DataError:
    return DataError("cannot be read", where=str(path), why=error.strerror or str(error))


def _nothing_found(source: str, num_skipped: int) -> DataError:
    if num_skipped:
        count = "the file is" if num_skipped == 1 else f"all {num_skipped} files are"
        return DataError(
            "there is no text in it",
            where=str(source),
            why=f"{count} binary: NUL in the first 8 KiB",
            fix="give text as UTF-8, JSONL, Parquet or Arrow" + (_NPY if source.lower().endswith(".npy") else ""),
        )
    if glob.has_magic(source):
        return DataError("no file matches the pattern", where=str(source), fix='"**" matches folders at any depth')
    return DataError("there is no file in it", where=str(source), why="hidden files do not count")


def _missing(source: str) -> DataError:
    if "://" in source:
        fix = "only files of this machine are read: copy it here first"
    else:
        fix = _near_name(source) or 'give a file, a folder, a pattern, or "stdlib"'
    return DataError("no such file or folder", where=str(source), fix=fix)


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
