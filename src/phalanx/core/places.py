"""Places that belong to a person or to a while: what `~` stands for, and temporary files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from phalanx.core.disk_errors import build_path_resource_error
from phalanx.core.errors import ResourceError, UsageError


def expand_home(path: Path | str) -> Path:
    """`path` with the home directory for a `~` at its start.

    Raises UsageError where nobody knows that home: `~data` is the home of the user data, and a
    container may have none at all.
    """
    expanded = os.path.expanduser(path)
    if str(expanded).startswith("~"):
        tilde = str(path).partition("/")[0]
        fix = "give the whole path"
        if tilde != "~":
            fix = f"~/{tilde[1:]} lies in your own home, ./{tilde} where you stand"
        raise UsageError(f"no home directory is known for {tilde}", where=str(path), fix=fix)
    return Path(expanded)


def find_temporary_directory() -> Path:
    """Where temporary files go. Raises ResourceError where none can be written."""
    import tempfile  # here: most verbs need none, and would wait for it

    with _naming_temporary_place("looking for a place for temporary files"):
        return Path(tempfile.gettempdir())


def open_unnamed_temporary_file() -> IO[bytes]:
    """A file that is gone when it is closed. Raises ResourceError where none can be made."""
    import tempfile

    with _naming_temporary_place("making a file for a while"):
        return tempfile.TemporaryFile()


def create_temporary_directory(prefix: str = "") -> Path:
    """A new directory, which the caller removes. Raises ResourceError where none can be made."""
    import tempfile

    with _naming_temporary_place("making a directory for a while"):
        return Path(tempfile.mkdtemp(prefix=prefix))


@contextmanager
def open_temporary_directory(prefix: str = "") -> Iterator[Path]:
    """A directory that is gone afterwards. Raises ResourceError where none can be made."""
    import shutil

    directory = create_temporary_directory(prefix)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _naming_temporary_place(doing: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # Without a name: no folder of those that Python tries can be written.
        place = error.filename or "TMPDIR"
        problem = build_path_resource_error(error, doing, place, place="TMPDIR")
        fix = problem.fix or "set TMPDIR to a folder that can be written"
        raise ResourceError(problem.what, where=problem.where, why=problem.why, fix=fix) from None
