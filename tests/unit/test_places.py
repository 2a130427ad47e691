"""Paths that nobody can look at, homes that nobody knows, and machines without a place for
temporary files: one line each."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phalanx.cli._app import run_command_line
from phalanx.cli._os_errors import convert_uncaught_os_error
from phalanx.core import places, uncaught
from phalanx.core.errors import ExitCode, ResourceError, UsageError
from phalanx.core.files import read_whole_regular_file
from phalanx.core.host_lock import holding_host_lock
from phalanx.core.places import (
    create_temporary_directory,
    expand_home,
    open_temporary_directory,
    open_unnamed_temporary_file,
)
from phalanx.data.tokenizer import tokenizer_path
from phalanx.data.worker_log import _open_log_or_unnamed_file
from phalanx.job.hugging_face import find_config_file, find_weights_directory
from phalanx.job.module_probe import _find_shape_cache_file

NOBODY = 65534
COMMANDS = (
    ("report", "{}"),
    ("trace", "{}"),
    ("watch", "{}"),
    ("metrics", "{}"),
    ("checkpoint", "ls", "{}"),
    ("checkpoint", "import", "{}", "--out", "/tmp/never"),
    ("plan", "{}/job.toml"),
    ("plan", "model.kind=hf:{}"),
)


def refuse(capsys: pytest.CaptureFixture[str], command: tuple[str, ...], path: Path) -> str:
    """What a command says in its one line about `path`."""
    code = run_command_line([word.format(path) for word in command])
    out, err = capsys.readouterr()
    assert code != ExitCode.INTERNAL, err
    assert (out, len(err.splitlines())) == ("", 1), err
    assert str(path) in err
    return err


@contextmanager
def being_nobody() -> Iterator[None]:
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_path_that_cannot_be_looked_at_is_named_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    refuse(capsys, command, tmp_path / ("x" * 300))
    if os.geteuid() != 0:
        return
    (tmp_path / "locked").mkdir(mode=0o700)
    tmp_path.chmod(0o700)
    with being_nobody():
        assert "ermission" in refuse(capsys, command, tmp_path / "locked" / "run")


def test_a_path_that_cannot_be_looked_at_is_an_error_in_json_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / ("x" * 300)
    assert run_command_line(["plan", "--json", f"model.init_from={path}"]) == ExitCode.USAGE
    said = json.loads(capsys.readouterr().out)
    assert (said["exit_code"], said["where"]) == (ExitCode.USAGE, str(path / "manifest.json"))


def test_a_mistake_of_phalanx_and_what_user_code_meets_keep_their_tracebacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    long = "x" * 300
    assert isinstance(convert_uncaught_os_error(catch_own(long)), UsageError)
    monkeypatch.setenv(uncaught.TRACEBACK_VARIABLE, "1")
    assert convert_uncaught_os_error(catch_own(long)) is None
    monkeypatch.delenv(uncaught.TRACEBACK_VARIABLE)
    assert convert_uncaught_os_error(ValueError("x")) is None
    assert convert_uncaught_os_error(catch_own(f"{places.__file__}/x")) is None
    with pytest.raises(OSError, match="too long") as raised:
        Path(long).stat()
    assert convert_uncaught_os_error(raised.value) is None


def catch_own(path: str) -> OSError:
    """The error that our own code meets at `path`."""
    with pytest.raises(OSError, match=os.path.basename(path)) as raised:
        read_whole_regular_file(path)
    trace = raised.value.__traceback__
    # Without the frame of this test.
    return raised.value.with_traceback(trace and trace.tb_next)


# Homes


def test_a_home_that_nobody_knows_is_not_taken_for_a_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert expand_home("~/a") == Path.home() / "a"
    assert expand_home("a/~b") == Path("a/~b")
    with pytest.raises(UsageError, match=r"no home directory is known for ~nobody-here.*~/nobody"):
        expand_home("~nobody-here/llama")
    for look in (find_config_file, find_weights_directory, tokenizer_path):
        with pytest.raises(UsageError, match="no home directory"):
            look("~nobody-here/llama")
    monkeypatch.setattr(os.path, "expanduser", os.fspath)
    with pytest.raises(UsageError, match="no home directory is known for ~; give the whole path"):
        expand_home("~/a")


def test_without_a_home_no_shape_is_kept(tmp_path: Path) -> None:
    assert _find_shape_cache_file("json:loads", {}, tmp_path) is not None
    assert _find_shape_cache_file("json:loads", {}, Path("~/.cache/phalanx/shapes")) is None


# Temporary files


@pytest.fixture
def no_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/nowhere"])


@pytest.mark.usefixtures("no_temporary_folder")
def test_without_a_place_for_temporary_files_one_line_says_so() -> None:
    words = r"TMPDIR: failed while (making|looking) .* for .*; set TMPDIR to a folder that can be"
    for make in (
        open_unnamed_temporary_file,
        create_temporary_directory,
        open_temporary_directory().__enter__,
        lambda: _open_log_or_unnamed_file(None),
        holding_host_lock("build", 1.0).__enter__,
    ):
        with pytest.raises(ResourceError, match=words):
            make()


@pytest.mark.usefixtures("no_temporary_folder")
def test_a_refusal_is_shown_where_ranks_cannot_mark_that_it_was(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delattr(sys, "ps1", raising=False)
    with pytest.raises(SystemExit) as ended:
        uncaught._print_uncaught_error(UsageError, UsageError("no such layout"), None)
    assert ended.value.code == ExitCode.USAGE
    assert "phalanx: no such layout" in capsys.readouterr().err
