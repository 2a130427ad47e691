"""Pages of docs/ that tell how to add something: their files are written and their commands run, in the page's order."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import TINY, loss_curve, write_text
from walks import checkout, follow

SHORT = [key for key in TINY if not key.startswith("train.steps")]


@pytest.mark.parametrize(
    "layouts", [("zero3", "pp2"), pytest.param(("zero3", "pp2", "ddp", "tp2"), marks=pytest.mark.long)]
)
def test_a_new_model_is_one_file(tmp_path: Path, layouts: tuple[str, ...]) -> None:
    """Contract tests find it, verify proves it, and it learns the same in every layout."""
    root = checkout(tmp_path)
    text = write_text(tmp_path / "text")
    also = [*SHORT, "model.num_layers=2", "train.steps=8", f"data.source={text}"]
    env = {"PYTHONPATH": str(root / "src")}
    said = follow("new-model.md", root, also=also, env=env, long="ddp" in layouts)
    assert int(said[0].done.out.split(" passed")[0].split()[-1]) >= 5
    curves = [list(loss_curve(root / "runs" / layout).values()) for layout in layouts]
    assert len(curves[0]) == 8
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=1e-4)
    assert curves[0][-1] < curves[0][0] - 0.2


def test_a_new_reduction_of_gradients_is_one_file(tmp_path: Path) -> None:
    """Contract tests find it; schema, plan and verify know it; it learns, and sends a bit for each element."""
    root = checkout(tmp_path)
    text = write_text(tmp_path / "text")
    also = [*SHORT, "train.steps=12", f"data.source={text}"]
    said = follow("new-axis-implementation.md", root, also=also, env={"PYTHONPATH": str(root / "src")})
    assert int(said[0].done.out.split(" passed")[0].split()[-1]) >= 9
    curve = list(loss_curve(root / "runs" / "sign").values())
    assert curve[-1] < curve[0] - 0.2


@pytest.mark.parametrize("layouts", [("tp2",), pytest.param(("tp2", "pp2", "zero3"), marks=pytest.mark.long)])
def test_a_module_of_your_own_is_cut_by_rules(tmp_path: Path, layouts: tuple[str, ...]) -> None:
    """Rules are found, what is left whole is named, wrong ones are refused or differ, and the right ones train."""
    text = write_text(tmp_path / "text")
    short = [key for key in SHORT if not key.startswith("model.")]
    also = [*short, "train.steps=12", f"data.source={text}"]
    follow("your-own-module.md", tmp_path, also=also, long="pp2" in layouts)
    curves = [list(loss_curve(tmp_path / "runs" / layout).values()) for layout in layouts]
    for curve in curves:
        assert curve == pytest.approx(curves[0], rel=1e-4)
    assert curves[0][-1] < curves[0][0] - 0.2
