"""A disk that cannot be read is no damaged file: exit 7, where a file that is damaged or missing is
exit 4 or 5.

A link to /proc/self/mem is a regular file whose first byte is read with EIO, as on a disk that
fails.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.checkpoint.manifest import MANIFEST_FILE_NAME, read_manifest
from phalanx.checkpoint.ownership.fencing_token import TOKEN_FILE_NAME, read_fencing_token_number
from phalanx.cli._app import run_command_line
from phalanx.core.errors import DataError, DataStorageError, ExitCode, PhalanxError
from phalanx.data import corpus, dataset
from phalanx.data.build import build_dataset
from phalanx.data.shards import open_shard
from phalanx.data.sources import list_source_files
from phalanx.data.token_sources import _hash_file_content
from phalanx.data.tokenizer import load_tokenizer
from phalanx.data.unreadable import build_unreadable_data_error


def failing(path: Path) -> Path:
    """A file at `path` on a disk that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to("/proc/self/mem")
    with pytest.raises(OSError, match="Input/output error"):
        path.read_bytes()
    return path


READERS: dict[str, Callable[[Path], Any]] = {
    "a text": lambda folder: list_source_files([str(failing(folder / "a.txt"))]),
    "a tokenizer": lambda folder: load_tokenizer(str(failing(folder / "tokenizer.json"))),
    "a dataset": lambda folder: dataset.read_dataset_manifest(
        failing(folder / dataset.DATASET_FILE_NAME).parent
    ),
    "a shard": lambda folder: open_shard(failing(folder / "shard-00000.bin")),
    "prepared data": lambda folder: corpus.load_corpus(
        failing(folder / corpus.CORPUS_FILE_NAME).parent
    ),
    "tokens": lambda folder: _hash_file_content(failing(folder / "tokens.npy")),
    "the token": lambda folder: read_fencing_token_number(failing(folder / TOKEN_FILE_NAME).parent),
    "a manifest": lambda folder: read_manifest(
        failing(folder / "step-4" / MANIFEST_FILE_NAME).parent
    ),
}


@pytest.mark.parametrize("what", list(READERS))
def test_a_disk_that_fails_is_exit_7_and_said_to_be_one(what: str, tmp_path: Path) -> None:
    with pytest.raises(PhalanxError) as caught:
        READERS[what](tmp_path)
    assert caught.value.exit_code == ExitCode.RESOURCES
    assert "Input/output error" in str(caught.value)
    assert "build" not in str(caught.value)  # nor advice for a file that is damaged


def test_what_is_missing_or_may_not_be_read_is_the_datas_own_problem(tmp_path: Path) -> None:
    for code in (errno.ENOENT, errno.EACCES, errno.EISDIR, errno.EINVAL, errno.EMFILE):
        assert (
            type(build_unreadable_data_error(OSError(code, os.strerror(code)), tmp_path))
            is DataError
        )
    for code in (errno.EIO, errno.ESTALE, errno.ENODEV):
        assert (
            type(build_unreadable_data_error(OSError(code, os.strerror(code)), tmp_path))
            is DataStorageError
        )


def test_a_dataset_with_a_failing_shard_is_exit_7_in_every_verb(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("a text\n" * 99)
    built = build_dataset([str(tmp_path / "a.txt")], tmp_path / "built")
    failing(built.directory / built.manifest.shards[0].file)
    assert run_command_line(["data", "verify", str(built.directory), "--json"]) == 7
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert [problem["exit_code"] for problem in problems] == [7]
    assert run_command_line(["data", "stats", str(built.directory)]) == 7
    assert "Input/output error" in capsys.readouterr().err
