"""Commands that phalanx prints can be pasted as they are: also where `phalanx` is not on the
PATH."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from phalanx.cli._app import run_command_line
from phalanx.run.next_command import build_next_line_after_planning, format_next_command


def test_the_command_is_the_one_that_was_typed_unless_the_path_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "my env" / "phalanx"
    script.parent.mkdir()
    script.touch(mode=0o755)
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setattr(sys, "argv", [str(script), "train"])
    assert format_next_command("train", "my job.toml") == f"next    '{script}' train 'my job.toml'"
    monkeypatch.setenv("PATH", f"/usr/bin:{script.parent}")
    assert format_next_command("report", "run") == "next    phalanx report run"
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setattr(sys, "argv", ["/venv/lib/phalanx/__main__.py", "train"])
    for python in ("/usr/bin/python3", "/my env/bin/python"):
        monkeypatch.setattr(sys, "executable", python)
        assert (
            format_next_command("report", "run")
            == f"next    {shlex.quote(python)} -m phalanx report run"
        ), "python -m phalanx"
    monkeypatch.setenv("PATH", str(script.parent))
    assert format_next_command("report", "run") == "next    phalanx report run"


def test_a_name_that_begins_like_an_option_is_spelled_so_that_a_verb_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setattr(sys, "argv", ["/my env/phalanx", "init"])
    assert run_command_line(["init", "--", "-y.toml"]) == 0
    said = capsys.readouterr().out
    assert said == "wrote   -y.toml; next: '/my env/phalanx' train ./-y.toml\n"
    assert run_command_line(["init", "plain.toml"]) == 0
    assert capsys.readouterr().out.endswith("train plain.toml\n")
    line = build_next_line_after_planning(["-y.toml", "optim.lr=1e-3"])
    assert line.endswith("train ./-y.toml optim.lr=1e-3")
