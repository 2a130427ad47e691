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
from phalanx.core.files import open_regular_file
from phalanx.data.listing import list_files
from phalanx.data.unreadable import build_unreadable_data_error

Format = Literal["text", "jsonl", "jsonl.gz", "jsonl.zst", "parquet", "arrow"]

_FORMAT_OF_SUFFIX: dict[str, Format] = {
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
_NPY_HINT = "; token ids need no building: data.source takes the .npy itself"


@dataclass(frozen=True)
class SourceFile:
    """One file of an input. Its `name` does not depend on where the tree lies, so that neither does
    the split.
    """

    name: str
    path: str
    num_bytes: int
    modified_ns: int
    # When its content may have changed last, even if its modification time was set back.
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


def detect_file_format(name: str) -> Format:
    """The kind of a file's content, by its ending; anything that is not known to be rows is one
    document of text.
    """
    for ending, kind in _FORMAT_OF_SUFFIX.items():
        if name.lower().endswith(ending):
            return kind
    return "text"


def list_source_files(
    sources: Sequence[str], named: str = "data.source", out: Path | None = None
) -> list[SourceListing]:
    """The files of each input, each file once. Datasets in an input are left out, and so is the
    folder `out`.

    Raises DataError for an input where there is nothing to read, as a value of `named`.
    """
    real = _SeenFileIds()
    try:
        listings = []
        for number, source in enumerate(sources):
            # The first has none: what it holds is named as if it were alone.
            prefix = f"{number}/" if number else ""
            listings.append(_find_source_files(source, prefix, out, real))
        if not any(file.num_bytes for listing in listings for file in listing.files):
            raise DataError(
                "there is no text in it", where=", ".join(sources), why="every file is empty"
            )
    except DataError as error:
        where = _make_printable_name(f"{named} {error.where}".strip())
        raise type(error)(error.what, where=where, why=error.why, fix=error.fix) from None
    return listings


class _SeenFileIds:
    """The files that were seen, whatever way led to them."""

    def __init__(self) -> None:
        self._folders: dict[str, str] = {}
        self._seen: set[str] = set()

    def is_new(self, path: Path) -> bool:
        real = self._resolve_file_id(path)
        is_new = real not in self._seen
        self._seen.add(real)
        return is_new

    def _resolve_file_id(self, path: Path) -> str:
        if path.is_symlink():
            return os.path.realpath(path)
        folder, name = os.path.split(path)
        if folder not in self._folders:
            # A folder's once for all of its files: each realpath asks the disk for every part.
            self._folders[folder] = os.path.realpath(folder)
        return os.path.join(self._folders[folder], name)


def _find_source_files(
    source: str, prefix: str, out: Path | None, real: _SeenFileIds
) -> SourceListing:
    """`prefix` keeps documents apart that have the same name in several inputs."""
    try:
        listed = list_files(source, out)
    except OSError as error:
        raise build_unreadable_data_error(error, error.filename or source) from None
    files: list[SourceFile] = []
    num_skipped = num_repeated = num_empty = num_json_text = 0
    for name in listed.names:
        path = listed.root / name
        status = _stat_regular_file(path)
        kind = detect_file_format(name)
        if not real.is_new(path):
            num_repeated += 1
        elif _is_file_empty(path, status, kind):
            num_empty += 1
        elif kind == "text" and _is_binary_file(path):
            num_skipped += 1
        else:
            if kind == "text" and name.lower().endswith(".json"):
                if _has_json_object_per_line(path):
                    kind = "jsonl"
                else:
                    num_json_text += 1
            text_name = prefix + _make_printable_name(name)
            times = status.st_mtime_ns, max(status.st_mtime_ns, status.st_ctime_ns)
            files.append(SourceFile(text_name, os.path.abspath(path), status.st_size, *times, kind))
    if not files and not num_repeated and not num_empty:
        raise _build_no_text_error(source, num_skipped, listed.num_datasets)
    return SourceListing(
        _make_printable_name(source),
        tuple(files),
        num_skipped,
        listed.num_datasets,
        num_repeated,
        listed.num_not_files,
        num_empty,
        num_json_text,
    )


def _stat_regular_file(path: Path) -> os.stat_result:
    """The status of a file. Raises DataError for what is no regular file, or cannot be read."""
    try:
        status = path.stat()
    except OSError as error:
        raise build_unreadable_data_error(error, path) from None
    if not stat.S_ISREG(status.st_mode):
        raise DataError("not a regular file", where=str(path))
    return status


def _is_file_empty(path: Path, status: os.stat_result, kind: Format) -> bool:
    # Files of /proc have a size of 0 and something in them.
    return not status.st_size and kind in ("text", "jsonl") and not _read_file_start(path, 1)


def _is_binary_file(path: Path) -> bool:
    """NUL in its first 8 KiB."""
    return b"\0" in _read_file_start(path, _SNIFF_BYTES)


def _read_file_start(path: Path, num_bytes: int) -> bytes:
    try:
        with open_regular_file(path) as file:
            return file.read(num_bytes)
    except OSError as error:
        raise build_unreadable_data_error(error, path) from None


def _has_json_object_per_line(path: Path) -> bool:
    """True if the first two lines that are not blank are a JSON object each: one alone may be any
    JSON file.
    """
    start = _read_file_start(path, _JSON_SNIFF_BYTES)
    lines = [line for line in start.removeprefix(codecs.BOM_UTF8).splitlines() if line.strip()]
    if len(lines) < 2:
        return False
    try:
        return all(isinstance(json.loads(line), dict) for line in lines[:2])
    except (ValueError, RecursionError):
        return False


def _make_printable_name(name: str) -> str:
    """A name that is text even where the file system's is not UTF-8."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _build_no_text_error(source: str, num_skipped: int, num_datasets: int) -> DataError:
    if num_datasets and not num_skipped:
        why = f"{num_datasets} datasets or runs are all that is there"
        if num_datasets == 1:
            why = "a dataset or a run is all that is there"
        return DataError("there is no text in it", where=str(source), why=why)
    if num_skipped:
        why = f"all {num_skipped} files are binary: NUL in the first 8 KiB"
        if num_skipped == 1:
            why = "the file is binary: NUL in the first 8 KiB"
        fix = "give text as UTF-8, JSONL, Parquet or Arrow"
        if source.lower().endswith(".npy"):
            fix += _NPY_HINT
        return DataError("there is no text in it", where=str(source), why=why, fix=fix)
    if glob.has_magic(source):
        return DataError(
            "no file matches the pattern",
            where=str(source),
            fix='"**" matches folders at any depth',
        )
    return DataError("there is no file in it", where=str(source), why="hidden files do not count")
