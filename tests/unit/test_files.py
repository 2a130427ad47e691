"""Files are whole or absent; names stay where they belong; a directory that cannot be used is refused."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.core.errors import ExitCode, ResourceError, UsageError
from phalanx.core.files import (
    check_name,
    open_run_directory,
    read_json,
    resource_error,
    write_bytes_atomic,
    write_json_atomic,
)


def test_json_comes_back_and_replaces_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for value in ({"a": 1}, {"é": [1.5, None]}):
        write_json_atomic(path, value)
        assert read_json(path) == value
    assert os.listdir(tmp_path) == ["a.json"]


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """No file may grow beyond 1000 bytes: a disk that fills up in the middle of a write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:  # before anything else is written: the test's own report may go to a file
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_bytes_atomic(path, b"old")
    with small_files(), pytest.raises(OSError):
        write_bytes_atomic(path, b"new" * 1000)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc", "a\n", "a b", "x" * 129, "é"])
def test_names_that_are_no_file_names(name: str) -> None:
    with pytest.raises(UsageError, match="run"):
        check_name(name, "run")


@pytest.mark.parametrize("name", ["a", "run-1.2_x", "x" * 128, "..a"])
def test_names_that_are(name: str) -> None:
    assert check_name(name, "run") == name


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "no space left"),
        (errno.EACCES, "not writable"),
        (errno.EROFS, "not writable"),
        (errno.EIO, "failed"),
    ],
)
def test_errors_of_the_system_say_what_and_where(number: int, words: str) -> None:
    error = resource_error(OSError(number, "x"), "saving", "/runs/a")
    assert error.exit_code == ExitCode.RESOURCES
    assert words in str(error)
    assert "/runs/a" in str(error)
    assert "\n" not in str(error)


def test_a_run_directory_is_made_with_its_parents_and_left_empty(tmp_path: Path) -> None:
    path = open_run_directory(tmp_path / "a" / "b")
    assert path.is_dir()
    assert os.listdir(path) == []


def test_a_run_directory_needs_its_room(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="free"):
        open_run_directory(tmp_path / "a", needed_bytes=2**60)


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(ResourceError, match=r"opening the run directory"):
        open_run_directory(tmp_path / "a" / "b")


def test_a_disk_that_is_full_is_refused_and_nothing_left(tmp_path: Path) -> None:
    with small_files(), pytest.raises(ResourceError):
        open_run_directory(tmp_path / "a")
    assert os.listdir(tmp_path / "a") == []


def test_files_are_readable_by_others(tmp_path: Path) -> None:
    """As umask says, not as a temporary file's 0600."""
    write_bytes_atomic(tmp_path / "a", b"x")
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o666 & ~umask
