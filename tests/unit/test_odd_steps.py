"""What is called step-N is a checkpoint for every verb, whole or damaged: a file, a pipe or a
link, too."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from test_retention import save, steps, store

from phalanx.checkpoint.reading.verify import find_checkpoint_problems
from phalanx.checkpoint.writing.retention import RetentionRule, prune_checkpoints
from phalanx.cli import _app
from phalanx.core.disk import Disk, remove_tree

ODD: dict[str, Callable[[Path], object]] = {
    "a file": lambda path: path.write_text("x"),
    "a pipe": os.mkfifo,
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a link to a folder": lambda path: path.symlink_to(path.parent.parent / "else"),
    "an empty folder": os.mkdir,
}


@pytest.fixture(params=ODD)
def a_run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A run with two checkpoints, a damaged newest one, and a folder that is none of its
    business."""
    run = tmp_path / "run"
    for step in (2, 4):
        save(run, step)
    (run / "else").mkdir()
    (run / "else" / "precious").write_text("data")
    ODD[request.param](run / "checkpoints" / "step-6")
    return run


def test_every_verb_sees_it(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = str(a_run / "checkpoints" / "step-6")
    assert steps(a_run) == [2, 4, 6]
    for words, code in (
        (["ls", str(a_run)], 0),
        (["verify", str(a_run)], 5),
        (["verify", str(a_run), "--all"], 5),
        (["verify", odd], 5),
        (["diff", str(a_run), str(a_run)], 5),
        (["export", str(a_run), "--out", str(a_run / "out")], 5),
    ):
        assert _app.run_command_line(["checkpoint", *words]) == code, words
        out, err = capsys.readouterr()
        assert "step-6" in out + err, words
        assert "Traceback" not in err


def test_it_is_not_what_keeps_others_from_going(a_run: Path) -> None:
    """Nor does removing it touch what a link leads to."""
    said: list[str] = []
    prune_checkpoints(store(a_run), RetentionRule(keep_last=1), say=said.append)
    assert "step-6 does not verify" in said[0]
    assert steps(a_run) == [2, 4, 6]  # the newest that verifies would have gone
    store(a_run).remove(store(a_run).folder("step-6"))
    assert steps(a_run) == [2, 4]
    assert (a_run / "else" / "precious").read_text() == "data"


def test_a_save_of_that_step_takes_its_place(a_run: Path) -> None:
    places = store(a_run)
    draft = places.begin_draft(6)
    for name in ("a.safetensors",):
        (draft.path / name).write_bytes((a_run / "checkpoints" / "step-4" / name).read_bytes())
    places.commit(draft, (a_run / "checkpoints" / "step-4" / "manifest.json").read_bytes())
    assert (a_run / "checkpoints" / "step-6").is_dir()
    assert not (a_run / "checkpoints" / "step-6").is_symlink()
    assert "step-6 holds step 4" in str(
        find_checkpoint_problems(a_run / "checkpoints" / "step-6")[0]
    )
    assert (a_run / "else" / "precious").read_text() == "data"


def test_names_that_no_save_writes_are_none(tmp_path: Path) -> None:
    save(tmp_path, 2)
    for name in ("step-02", "step-٣", "step-", "step-1" + "0" * 30, "step-3 ", "step-3x"):
        (tmp_path / "checkpoints" / name).mkdir()
    assert steps(tmp_path) == [2]


def test_of_a_link_only_the_link_is_removed(tmp_path: Path) -> None:
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "precious").write_text("data")
    (tmp_path / "link").symlink_to("else")
    remove_tree(Disk(), tmp_path / "link")
    assert not os.path.lexists(tmp_path / "link")
    assert (tmp_path / "else" / "precious").read_text() == "data"
