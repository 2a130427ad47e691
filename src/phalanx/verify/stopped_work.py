"""The directory in which layouts are judged; after a stop it stays, and the same command goes on in
it.

It holds the rows so far and the references that later rows need. Torch-free.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from phalanx.core.digest import digest
from phalanx.core.errors import ResourceError
from phalanx.core.files import open_regular_file_for_append, read_whole_regular_file
from phalanx.job.hugging_face import is_hugging_face
from phalanx.job.module_probe import find_module_sources, list_file_states
from phalanx.run.scratch import ScratchDirectory, open_scratch_directory
from phalanx.verify.choose import Selection
from phalanx.verify.read_files import READ_FILES_NAME, are_read_files_unchanged
from phalanx.verify.row import Row

STOPPED_WORK_DIR = "~/.cache/phalanx/verify"
KEPT_ROWS, LOCK = "kept-rows.jsonl", "lock"
# Each has a file that is written last, and says that it is whole.
REFERENCE_PREFIXES = ("reference-", "trainer-reference-")
RESUMED_ROW_NOTE = "judged before the command was stopped"
MAX_AGE_S = 7 * 24 * 3600.0
PHALANX_DIR = Path(__file__).parents[1]
USER_CODE_PATTERN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
VERSIONED_PACKAGES = ("torch", "transformers", "numpy")


@dataclass
class VerifyWork:
    """`scratch`: where ranks write. `earlier_rows`: those of a command that was stopped, in the
    order in which they are judged. `is_same_code`: no file of the code has changed since then.
    `stays`: the directory is left for the next command."""

    scratch: ScratchDirectory
    earlier_rows: tuple[Row, ...] = ()
    is_same_code: Callable[[], bool] = lambda: False
    stays: bool = False
    _keeps: bool = field(init=False)

    def __post_init__(self) -> None:
        self._keeps = self.stays

    def keep_row(self, row: Row) -> None:
        """Write a row down for a command that goes on after a stop."""
        # Ranks import the code anew after a crash: from then on rows may be of other code.
        self._keeps = self._keeps and self.is_same_code()
        # Written before the row is.
        self._keeps = self._keeps and are_read_files_unchanged(self.scratch.directory)
        if not self._keeps:
            return
        text = json.dumps(row.to_json())
        line = f"{_hash_text(text)} {text}\n"
        try:
            with open_regular_file_for_append(self.scratch.directory / KEPT_ROWS) as file:
                file.write(line.encode())
        except OSError:
            # A row that is missing would shift those behind it.
            self._keeps = False


@contextmanager
def open_resumable_verify_work(selection: Selection, *, resume: bool) -> Iterator[VerifyWork]:
    """Open the directory that a stopped command has left for the same work, or a new one: the same
    if no file that its ranks have read is another now, either.

    It stays unless `Work.stays` is unset, or a disk refuses. Without `resume`, where the user's own
    code has no source, or where another process works in it, it is one of its own that never stays.
    """
    key = _hash_selection_and_code(selection) if resume else None
    folder = Path(os.path.expanduser(STOPPED_WORK_DIR))
    # Without a home nothing is kept, and no folder is called "~".
    handle = None
    if key is not None and folder.is_absolute():
        handle = _lock_work_directory(folder / key)
    if key is None or handle is None:
        with open_scratch_directory("verify") as scratch:
            yield VerifyWork(scratch)
        return
    directory = folder / key
    _remove_old_work(directory)
    if not are_read_files_unchanged(directory):
        # References are of these files, too.
        for path in directory.iterdir():
            _remove(path)
    work = VerifyWork(
        ScratchDirectory(directory),
        _read_earlier_rows(directory, selection),
        lambda: _hash_selection_and_code(selection) == key,
        stays=True,
    )
    try:
        _remove_all_but_references(work)
        yield work
    except ResourceError:
        work.stays = False
        raise
    finally:
        if not work.stays:
            work.scratch.remove()
            with suppress(OSError):
                _locate_lock_file(directory).unlink()
        os.close(handle)


def _hash_selection_and_code(selection: Selection) -> str | None:
    """A name for this work: what is judged, what of the job as it was asked for is not, and by
    which code; None if some of the code has no source that could be looked at."""
    job: Any = selection.job.to_json()
    sources = sorted(PHALANX_DIR.rglob("*.py"))
    for text in _iterate_strings(job):
        if USER_CODE_PATTERN.fullmatch(text) and not is_hugging_face(text):
            own_sources = find_module_sources(text.partition(":")[0].split("."))
            if not own_sources:
                return None
            sources += own_sources
    work = [
        (dtype, case.name, dict(case.parallel), case.other_name) for dtype, case in selection.work
    ]
    asked_job = None if selection.asked_job is None else selection.asked_job.to_json()
    versions = [sys.version, *map(_find_package_version, VERSIONED_PACKAGES)]
    # Rows say what of the asked job nobody judged, and those of the trainer read it.
    of_rows = [job, asked_job, selection.left_out, work, selection.num_steps, selection.device]
    # Paths are part of it: rows hold for the code of one installation.
    return digest([*of_rows, versions, list_file_states(sources)])


def _iterate_strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _iterate_strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _iterate_strings(item)


def _find_package_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _lock_work_directory(directory: Path) -> int | None:
    """The handle of the directory's lock, held until it is closed; None where another process
    holds it, or nothing can be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(_locate_lock_file(directory), os.O_RDWR | os.O_CREAT)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def _locate_lock_file(directory: Path) -> Path:
    """Beside the directory: it is there before, and goes after it."""
    return directory.with_suffix(f".{LOCK}")


def _remove_old_work(used: Path) -> None:
    """Remove what was left beside `used` a week ago, and nobody came back to."""
    with suppress(OSError):
        for directory in used.parent.iterdir():
            if directory.stem == used.name:
                continue
            if time.time() - directory.stat().st_mtime < MAX_AGE_S:
                continue
            if directory.is_dir():
                shutil.rmtree(directory, ignore_errors=True)
            else:
                directory.unlink()


def _read_earlier_rows(directory: Path, selection: Selection) -> tuple[Row, ...]:
    """The first rows of the work that are whole and tell of no crash, which may be of the stop."""
    rows: list[Row] = []
    try:
        lines = read_whole_regular_file(directory / KEPT_ROWS).splitlines()
    except OSError:
        return ()
    for line, (dtype, case) in zip(lines, selection.work, strict=False):
        checksum, _, text = line.decode("utf-8", "replace").partition(" ")
        # A verdict that is taken over was never changed, not by a bit.
        if checksum != _hash_text(text):
            break
        row = Row.from_json(json.loads(text))
        if (row.dtype, row.layout) != (dtype, case.name) or row.crashed:
            break
        if RESUMED_ROW_NOTE not in row.notes:
            row = replace(row, notes=(*row.notes, RESUMED_ROW_NOTE))
        rows.append(row)
    return tuple(rows)


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _remove_all_but_references(work: VerifyWork) -> None:
    """Leave the references and the earlier rows alone: not what is torn behind them, and no run of
    the trainer that was stopped, whose checkpoints could stand in for those of the next."""
    for path in work.scratch.directory.iterdir():
        if not path.name.startswith(REFERENCE_PREFIXES) and path.name != READ_FILES_NAME:
            _remove(path)
    for row in work.earlier_rows:
        work.keep_row(row)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def count_rows_of_ranks(selection: Selection, rows: Sequence[Row]) -> int:
    """Count the rows that ranks are to write among `rows`."""
    names = {(dtype, case.name) for dtype, case in selection.work}
    return sum((row.dtype, row.layout) in names for row in rows)
