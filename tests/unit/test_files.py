"""Files are whole or absent; names stay where they belong; a directory that cannot be used is
refused."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from phalanx.core.disk_errors import (
    PERMANENT_WRITE_ERRNOS,
    build_path_resource_error,
    convert_disk_error,
)
from phalanx.core.errors import ExitCode, ResourceError, UsageError
from phalanx.core.files import (
    create_writable_run_directory,
    read_json,
    require_file_name,
    write_bytes_atomically,
    write_json_atomically,
)
from phalanx.core.library_errors import find_os_error_behind


def test_json_comes_back_and_replaces_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for value in ({"a": 1}, {"é": [1.5, None]}):
        write_json_atomically(path, value)
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
    write_bytes_atomically(path, b"old")
    with small_files(), pytest.raises(OSError):
        write_bytes_atomically(path, b"new" * 1000)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc", "a\n", "a b", "x" * 129, "é"])
def test_names_that_are_no_file_names(name: str) -> None:
    with pytest.raises(UsageError, match="run"):
        require_file_name(name, "run")


@pytest.mark.parametrize("name", ["a", "run-1.2_x", "x" * 128, "..a"])
def test_names_that_are(name: str) -> None:
    assert require_file_name(name, "run") == name


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "no space left"),
        (errno.EACCES, "not writable"),
        (errno.EROFS, "not writable"),
        (errno.EIO, "failed"),
        (errno.EMFILE, "no file can be opened any more while saving"),
        (errno.EMFILE, "raise the limit on open files (ulimit -n)"),
        (errno.ENFILE, "sysctl fs.file-max"),
    ],
)
def test_errors_of_the_system_say_what_and_where(number: int, words: str) -> None:
    error = build_path_resource_error(OSError(number, "x"), "saving", "/runs/a")
    assert error.exit_code == ExitCode.RESOURCES
    assert words in str(error)
    assert "/runs/a" in str(error)
    assert "\n" not in str(error)


def write_safetensors(path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1000)}, path)


def write_tokenizer(path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {str(number): number for number in range(1000)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0")).save(str(path))


def write_parquet(path: Path) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow as arrow
    from pyarrow import parquet

    parquet.write_table(arrow.table({"x": np.random.default_rng(0).random(1000)}), path)


def write_pickled(path: Path) -> None:
    torch.save(torch.zeros(1000), path, _use_new_zipfile_serialization=False)


CUT_SHORT = None  # these libraries do not tell why
WRITERS: dict[Callable[[Path], None], int | None] = {
    write_safetensors: errno.EFBIG,
    write_tokenizer: errno.EFBIG,
    write_pickled: errno.EFBIG,
    lambda path: torch.save(torch.zeros(1000), path): CUT_SHORT,
    lambda path: np.zeros(1000).tofile(path): CUT_SHORT,
}


@pytest.mark.parametrize("write", list(WRITERS))
def test_what_a_disk_said_to_a_library_is_heard(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    with small_files(), pytest.raises(Exception) as caught:
        write(tmp_path / "file")
    assert not (
        isinstance(caught.value, OSError) and caught.value.errno
    )  # that would need no words
    found = find_os_error_behind(caught.value, PERMANENT_WRITE_ERRNOS)
    assert isinstance(found, OSError), repr(caught.value)
    assert found.errno == WRITERS[write]


def test_arrow_has_the_number_itself(tmp_path: Path) -> None:
    with small_files(), pytest.raises(OSError) as caught:
        write_parquet(tmp_path / "file")
    assert caught.value.errno == errno.EFBIG


def test_a_library_that_our_code_calls_is_exit_7_and_one_that_the_users_calls_is_not(
    tmp_path: Path,
) -> None:
    from phalanx.verify.trace import _save_tensors

    with small_files(), pytest.raises(Exception, match="os error 27") as caught:
        _save_tensors(tmp_path / "initial", {"x": torch.zeros(1000)})
    problem = convert_disk_error(
        caught.value, "writing the reference", where=tmp_path / "phalanx-scratch-verify-a1b2c3d4"
    )
    assert isinstance(problem, ResourceError)
    assert problem.where == str(tmp_path / "phalanx-scratch-verify-a1b2c3d4")
    assert "(File too large); raise the limit" in str(problem)
    with small_files(), pytest.raises(Exception, match="os error 27") as caught:
        write_safetensors(tmp_path / "theirs")  # no frame of ours is on the way
    assert convert_disk_error(caught.value, "training") is None


@pytest.mark.parametrize(
    "error",
    [
        ValueError("No space left on device (os error 28)"),
        RuntimeError("shape '[2, 28]' is invalid for input of size 28"),
        RuntimeError("[gloo/transport/tcp/pair.cc:534] writev: Input/output error"),
        Exception("no such file (os error 2)"),
        OSError(errno.ENOENT, "No space left on device"),
    ],
)
def test_words_that_are_no_refusal_of_a_disk(error: Exception) -> None:
    assert find_os_error_behind(error, PERMANENT_WRITE_ERRNOS) is None


def test_a_folder_for_a_while_is_mended_by_TMPDIR() -> None:
    full = build_path_resource_error(
        OSError(errno.ENOSPC, "full"), "saving", "/tmp/phalanx-scratch-eval-abcd_123/rows.jsonl"
    )
    assert full.fix == "free space there, or choose another TMPDIR"
    unwritable = build_path_resource_error(
        OSError(errno.EROFS, "ro"), "saving", "/tmp/phalanx-scratch-eval-abcd_123/logs"
    )
    assert unwritable.fix == "make it writable, or choose another TMPDIR"


def test_a_run_directory_is_made_with_its_parents_and_left_empty(tmp_path: Path) -> None:
    path = create_writable_run_directory(tmp_path / "a" / "b")
    assert path.is_dir()
    assert os.listdir(path) == []


def test_a_run_directory_needs_its_room(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="free"):
        create_writable_run_directory(tmp_path / "a", needed_bytes=2**60)


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(ResourceError, match=r"opening the run directory"):
        create_writable_run_directory(tmp_path / "a" / "b")


def test_a_disk_that_is_full_is_refused_and_nothing_left(tmp_path: Path) -> None:
    with small_files(), pytest.raises(ResourceError):
        create_writable_run_directory(tmp_path / "a")
    assert os.listdir(tmp_path / "a") == []


def test_files_are_readable_by_others(tmp_path: Path) -> None:
    """As umask says, not as a temporary file's 0600."""
    write_bytes_atomically(tmp_path / "a", b"x")
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o666 & ~umask
