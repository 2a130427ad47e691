"""`phalanx checkpoint`: the verbs on checkpoints of a run, in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_retention import damage, save

from phalanx.checkpoint.best import write_best
from phalanx.checkpoint.locks import hold_run_lock
from phalanx.cli._app import run


def phalanx(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run(["checkpoint", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def a_run(tmp_path: Path) -> Path:
    for step in (10, 20, 30):
        save(tmp_path, step)
    write_best(tmp_path, step=10, loss=1.5, num_targets=100)
    return tmp_path


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code, out, _ = phalanx(capsys, *arguments, "--json")
    return code, json.loads(out)


def test_ls(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(a_run / "checkpoints" / "step-20")  # not looked at: ls is quick
    (a_run / "checkpoints" / "step-30" / "manifest.json").write_text("{}")
    code, out, _ = phalanx(capsys, "ls", str(a_run))
    lines = out.splitlines()
    assert code == 0
    assert [line.split()[0] for line in lines] == ["step-10", "step-20", "step-30"]
    assert lines[0].endswith("best")
    assert "damaged" in lines[2]
    code, facts = as_json(capsys, "ls", str(a_run))
    assert (code, facts["schema"], facts["best"]) == (0, "phalanx.checkpoints/1", 10)
    assert [c["step"] for c in facts["checkpoints"]] == [10, 20, 30]
    assert "format None" in facts["checkpoints"][2]["error"]


def test_verify_reads_the_newest_or_all(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(a_run / "checkpoints" / "step-20")
    assert phalanx(capsys, "verify", str(a_run))[0] == 0
    code, out, err = phalanx(capsys, "verify", str(a_run), "--all")
    assert code == 5
    assert [line.split()[0] for line in out.splitlines()] == ["whole", "damaged", "whole"]
    assert "step-20/a.safetensors" in err
    code, facts = as_json(capsys, "verify", str(a_run / "checkpoints" / "step-20"))
    assert (code, facts["checkpoints"][0]["ok"]) == (5, False)


def test_verify_says_what_was_never_committed(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (a_run / "checkpoints" / "step-30" / "manifest.json").unlink()
    code, _, err = phalanx(capsys, "verify", str(a_run / "checkpoints" / "step-30"))
    assert (code, "never committed" in err) == (5, True)
    assert phalanx(capsys, "verify", str(a_run))[0] == 0  # the newest that is one


def test_diff(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert phalanx(capsys, "diff", str(a_run), str(a_run / "checkpoints" / "step-30"))[0] == 0
    code, facts = as_json(capsys, "diff", str(a_run), str(a_run / "checkpoints" / "step-10"))
    assert (code, facts["tensors"][0]["max_abs"]) == (11, 20.0)


def test_prune_keeps_the_best_and_refuses_a_run_in_use(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("prune", str(a_run), "--keep-last", "1")
    code, out, _ = phalanx(capsys, *arguments, "--dry-run")
    assert (code, "would remove  step-20" in out, "would keep  step-10, step-30" in out) == (0, True, True)
    with hold_run_lock(a_run):
        code, _, err = phalanx(capsys, *arguments)
        assert (code, "in use" in err) == (9, True)
    code, facts = as_json(capsys, *arguments)
    assert (code, facts["removed"], facts["kept"]) == (0, ["step-20"], ["step-10", "step-30"])
    assert not (a_run / "checkpoints" / "step-20").exists()


@pytest.mark.parametrize("verb", ["ls", "verify", "prune"])
def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str) -> None:
    more = ["--keep-last", "1"] if verb == "prune" else []
    assert phalanx(capsys, verb, str(tmp_path / "nowhere"), *more)[0] == 2
    code, out, err = phalanx(capsys, verb, str(tmp_path), *more)
    assert (code, out, "no checkpoint is there" in err) == (5, "", True)
