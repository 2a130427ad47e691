"""Which files a folder, a pattern or a name stands for; datasets and runs in it are no text.

Torch-free.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from phalanx.core.errors import DataError, format_nearest_word_hint
from phalanx.core.files import read_json

_DATASET_FILE_NAME = "dataset.json"
_RUN_FILE_NAMES = {"job.json", "plan.json"}  # what every run's directory has
_SHARD_FILE_PATTERN = re.compile(r"shard-\d{5,}\.tokens")
_SKIPPED_STDLIB_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test"}
)


class FileListing(NamedTuple):
    """The folder that names are relative to, the sorted names of regular files, and how much was
    left out."""

    root: Path
    names: list[str]
    num_datasets: int = 0  # and runs
    num_not_files: int = 0  # broken links, linked folders, pipes, sockets, devices


def list_files(source: str, out: Path | None) -> FileListing:
    """Raises DataError for a source that is not there or is a dataset itself, OSError for a
    folder it cannot list."""
    if source == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        listed = _list_files_below(root, _SKIPPED_STDLIB_FOLDERS, None)
        return listed._replace(names=[name for name in listed.names if name.endswith(".py")])
    path = _expand_user_path(source)
    if source and path.is_dir():
        _refuse_dataset_as_source(path, source)
        return _list_files_below(path, frozenset(), out)
    if source and path.exists():
        return FileListing(path.parent, [path.name])
    if glob.has_magic(source) and "://" not in source:
        root, pattern = _split_glob_pattern(path)
        matches = glob.glob(pattern, root_dir=root, recursive=True)
        if matches:
            _refuse_dataset_as_source(root, source)
        names, not_files = set(), set()
        for match in matches:
            path = root / match
            if path.is_file():
                names.add(Path(match).as_posix())
            elif not path.is_dir():
                not_files.add(os.path.realpath(path))
        listed = _remove_files_inside_datasets(root, sorted(names), out)
        return listed._replace(num_not_files=len(not_files))
    raise _missing_source_error(source)


def _list_files_below(root: Path, ignored_folders: frozenset[str], out: Path | None) -> FileListing:
    """The non-hidden files below `root`.

    Linked folders are not followed, but counted like all that is no file.
    """

    # os.walk passes over folders that it cannot list, unless it is given something to call.
    def stop(error: OSError) -> None:
        raise error

    names: list[str] = []
    num_datasets = num_not_files = 0
    for folder, subfolders, files in os.walk(root, onerror=stop):
        if Path(folder) != root and (
            reason := _find_reason_to_skip_folder(Path(folder), files, out)
        ):
            subfolders.clear()
            num_datasets += reason == "dataset"
            continue
        # In place: os.walk goes down into what is left of its own list.
        for name in list(subfolders):
            if name in ignored_folders or name.startswith("."):
                subfolders.remove(name)
            elif os.path.islink(Path(folder, name)):
                num_not_files += 1
        for name in files:
            path = Path(folder, name)
            if name.startswith("."):
                continue
            if path.is_file():
                names.append(path.relative_to(root).as_posix())
            else:
                num_not_files += 1
    return FileListing(root, sorted(names), num_datasets, num_not_files)


def _remove_files_inside_datasets(root: Path, names: list[str], out: Path | None) -> FileListing:
    """The names of a pattern that are text: without those inside of datasets and of `out`."""
    reasons: dict[Path, str] = {Path("."): ""}  # the input itself was refused before
    datasets = set()
    text_names = []
    for name in names:
        folders = Path(name).parents
        for folder in folders:
            if folder not in reasons:
                path = root / folder
                reasons[folder] = _find_reason_to_skip_folder(path, _list_folder_names(path), out)
                if reasons[folder] == "dataset":
                    datasets.add(os.path.realpath(path))
        if not any(reasons[folder] for folder in folders):
            text_names.append(name)
    return FileListing(root, text_names, len(datasets))


def _find_reason_to_skip_folder(
    folder: Path, names: Sequence[str], out: Path | None
) -> Literal["out", "dataset", ""]:
    """The reason to leave out a folder inside an input: "out" for the one that is being written,
    "dataset" for a dataset, finished or not, or a run; else ""."""
    with contextlib.suppress(OSError):
        if out is not None and os.path.samefile(folder, out):
            return "out"
    if set(names) >= _RUN_FILE_NAMES or _has_dataset_files(folder, names):
        return "dataset"
    return ""


def find_dataset_around(folder: Path) -> Path | None:
    """The dataset, finished or not, in whose folder `folder` lies or would lie."""
    for parent in Path(os.path.abspath(folder)).parents:
        if _has_dataset_files(parent, _list_folder_names(parent)):
            return parent
    return None


def _has_dataset_files(folder: Path, names: Sequence[str]) -> bool:
    if any(map(_SHARD_FILE_PATTERN.fullmatch, names)):
        return True
    if _DATASET_FILE_NAME not in names:
        return False
    # Many things are called dataset.json: one that cannot be read is none of ours.
    with contextlib.suppress(OSError, ValueError, RecursionError):
        manifest = read_json(folder / _DATASET_FILE_NAME)
        return isinstance(manifest, dict) and {"format", "shards", "tokenizer"} <= manifest.keys()
    return False


def _refuse_dataset_as_source(folder: Path, source: str) -> None:
    names = _list_folder_names(folder)
    if not _has_dataset_files(folder, names):
        return
    if _DATASET_FILE_NAME in names:
        raise DataError(
            "it is a dataset already", where=source, fix=f"train on it: data.source={folder}"
        )
    why = "token shards without dataset.json"
    raise DataError(
        "it is a dataset that was not finished", where=source, why=why, fix="finish its build first"
    )


def _list_folder_names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # said where its files are read
        return []


def _split_glob_pattern(pattern: Path) -> tuple[Path, str]:
    """'texts/2024/*/a*.txt' -> ('texts/2024', '*/a*.txt'): documents are named from the first
    wildcard on."""
    parts = pattern.parts
    first = next(position for position, part in enumerate(parts) if glob.has_magic(part))
    return Path(*parts[:first]), str(Path(*parts[first:]))


def _missing_source_error(source: str) -> DataError:
    path = _expand_user_path(source)
    if os.path.islink(path):
        # A file of that name is there: no other one was meant.
        return DataError(
            "the link leads nowhere",
            where=str(source),
            why=f"{os.readlink(path)} is not there",
        )
    if "://" in source:
        fix = "only files of this machine are read: copy it here first"
    else:
        fix = _suggest_file_name(source) or 'give a file, a folder, a pattern, or "stdlib"'
    return DataError("no such file or folder", where=str(source), fix=fix)


def _suggest_file_name(source: str) -> str:
    """'did you mean "x"?' for a name that exists beside the first missing part of `source`, or
    nothing."""
    path = _expand_user_path(source)
    missing = path
    while missing.parent != missing and not os.path.exists(missing.parent):
        missing = missing.parent
    known = _list_folder_names(missing.parent)
    if os.sep not in source:
        known.append("stdlib")
    return format_nearest_word_hint(missing.name, known)


def _expand_user_path(source: str) -> Path:
    return Path(os.path.expanduser(source))
