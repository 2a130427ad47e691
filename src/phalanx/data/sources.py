"""What `data.source` or an input of `data build` names, found on this machine: files of text or of
rows. Torch-free.

Everything that can be wrong with finding them is said here, as a DataError of one line: where it
is, what was wrong and what to do.
"""

from __future__ import annotations

import codecs
import glob
import json
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from phalanx.core.errors import DataError
from phalanx.core.files import open_regular
from phalanx.data.listing import list_files
from phalanx.data.unreadable import unreadable

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
_SNIFF_BYTES = 8192
_JSON_SNIFF_BYTES = 1 << 20
_NPY = "; token ids need no building: data.source takes the .npy itself"


@dataclass(frozen=True)
class SourceFile:
    """One file of an input. Its `name` does not depend on where the tree lies, so that neither does
    the split.
    """

    name: str
    path: str
    num_bytes: int
    modified_ns: int
    # when its content may have changed last, a modification time that was set back notwithstanding
    changed_ns: int
    format: Format


@dataclass(frozen=True)
class SourceListing:
    """The files of one input in order of name, and what was left out."""

    source: str
    files: tuple[SourceFile, ...]
    num_skipped: int  # binary files
    num_skipped_folders: int = 0  # datasets
    num_repeated: int = 0  # files that the input names again, or an input before it
    num_not_files: int = 0  # broken links, linked folders, pipes, devices
    num_empty: int = 0
    num_json_text: int = 0  # .json files that do not hold an object per line: text


def format_of(name: str) -> Format:
    """The kind of a file's content, by its ending; anything that is not known to be rows is one
    document of text.
    """
    lowered = name.lower()
    return next((kind for ending, kind in _ENDINGS.items() if lowered.endswith(ending)), "text")


def find_files(
    sources: Sequence[str], named: str = "data.source", out: Path | None = None
) -> list[SourceListing]:
    """The files of each input, each file once. Datasets in an input are left out, and so is the
    folder `out`.

    Raises DataError for an input where there is nothing to read, as a value of `named`.
    """
    real = _RealPaths()
    try:
        listings = [
            _find(source, f"{number}/" if number else "", out, real)
            for number, source in enumerate(sources)
        ]
        if not any(file.num_bytes for one in listings for file in one.files):
            raise DataError(
                "there is no text in it", where=", ".join(sources), why="every file is empty"
            )
    except DataError as error:
        where = _printable(f"{named} {error.where}".strip())
        raise type(error)(error.what, where=where, why=error.why, fix=error.fix) from None
    return listings


class _RealPaths:
    """The files that were seen, whatever way led to them."""

    def __init__(self) -> None:
        self._folders: dict[str, str] = {}
        self._seen: set[str] = set()

    def is_new(self, path: Path) -> bool:
        real = self._resolve(path)
        is_new = real not in self._seen
        self._seen.add(real)
        return is_new

    def _resolve(self, path: Path) -> str:
        if path.is_symlink():
            return os.path.realpath(path)
        folder, name = os.path.split(path)
        if folder not in self._folders:  # a folder's once, for all of its files
            self._folders[folder] = os.path.realpath(folder)
        return os.path.join(self._folders[folder], name)


def _find(source: str, prefix: str, out: Path | None, real: _RealPaths) -> SourceListing:
    """`prefix` keeps documents apart that have the same name in several inputs."""
    try:
        listed = list_files(source, out)
    except OSError as error:
        raise unreadable(error, error.filename or source) from None
    files: list[SourceFile] = []
    num_skipped = num_repeated = num_empty = num_json_text = 0
    for name in listed.names:
        kind = format_of(name)
        path = listed.root / name
        try:
            status = path.stat()
        except OSError as error:
            raise unreadable(error, path) from None
        if not stat.S_ISREG(status.st_mode):
            raise DataError("not a regular file", where=str(path))
        if not real.is_new(path):
            num_repeated += 1
        elif not status.st_size and kind in ("text", "jsonl") and not _start_of(path, 1):
            num_empty += 1
        elif kind == "text" and _is_binary(path):
            num_skipped += 1
        else:
            if kind == "text" and name.lower().endswith(".json"):
                kind = "jsonl" if _has_object_per_line(path) else "text"
                num_json_text += kind == "text"
            text_name = prefix + _printable(name)
            times = status.st_mtime_ns, max(status.st_mtime_ns, status.st_ctime_ns)
            files.append(SourceFile(text_name, os.path.abspath(path), status.st_size, *times, kind))
    if not files and not num_repeated and not num_empty:
        raise _nothing_found(source, num_skipped, listed.num_datasets)
    return SourceListing(
        _printable(source),
        tuple(files),
        num_skipped,
        listed.num_datasets,
        num_repeated,
        listed.num_not_files,
        num_empty,
        num_json_text,
    )


def _is_binary(path: Path) -> bool:
    """NUL in its first 8 KiB."""
    return b"\0" in _start_of(path, _SNIFF_BYTES)


def _start_of(path: Path, num_bytes: int) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read(num_bytes)
    except OSError as error:
        raise unreadable(error, path) from None


def _has_object_per_line(path: Path) -> bool:
    """True if the first two lines that are not blank are a JSON object each: one alone may be any
    JSON file.
    """
    start = _start_of(path, _JSON_SNIFF_BYTES)
    lines = [line for line in start.removeprefix(codecs.BOM_UTF8).splitlines() if line.strip()][:2]
    try:
        return len(lines) == 2 and all(isinstance(json.loads(line), dict) for line in lines)
    except (ValueError, RecursionError):
        return False


def _printable(name: str) -> str:
    """A name that is text even where the file system's is not UTF-8."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _nothing_found(source: str, num_skipped: int, num_datasets: int) -> DataError:
    if num_datasets and not num_skipped:
        why = (
            "a dataset or a run is" if num_datasets == 1 else f"{num_datasets} datasets or runs are"
        )
        return DataError(
            "there is no text in it", where=str(source), why=f"{why} all that is there"
        )
    if num_skipped:
        count = "the file is" if num_skipped == 1 else f"all {num_skipped} files are"
        return DataError(
            "there is no text in it",
            where=str(source),
            why=f"{count} binary: NUL in the first 8 KiB",
            fix="give text as UTF-8, JSONL, Parquet or Arrow"
            + (_NPY if source.lower().endswith(".npy") else ""),
        )
    if glob.has_magic(source):
        return DataError(
            "no file matches the pattern",
            where=str(source),
            fix='"**" matches folders at any depth',
        )
    return DataError("there is no file in it", where=str(source), why="hidden files do not count")
