"""Pages of docs/ that tell how to add something: their files are written and their commands run, in
the page's order.

A page shows more runs than a quick test has the time for: what stands under "long" is for `make
test-all`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import TINY, loss_curve, write_text
from walks import checkout, follow

SHORT = [key for key in TINY if not key.startswith("train.steps")]
BOTH_LONG = pytest.mark.parametrize(
    "long", [pytest.param(each, marks=pytest.mark.long) for each in (False, True)]
)


@pytest.mark.parametrize("page", ["new-model.md", "new-axis-implementation.md"])
def test_what_a_page_changes_is_where_it_says(page: str, tmp_path: Path) -> None:
    """Each file is Python when the page is done with it."""
    root = checkout(tmp_path)
    before = {path: path.read_bytes() for path in root.rglob("*.py")}
    follow(page, root, runs=False)
    changed = [path for path in root.rglob("*.py") if path.read_bytes() != before.get(path)]
    assert changed
    for path in changed:
        compile(path.read_bytes(), path, "exec")


def require_equal_and_learned(runs: Path, layouts: list[str], steps: int) -> None:
    curves = [list(loss_curve(runs / layout).values()) for layout in layouts]
    assert {len(curve) for curve in curves} == {steps}
    for curve in curves:
        assert curve == pytest.approx(curves[0], rel=1e-4)
    assert curves[0][-1] < curves[0][0] - 0.2


@BOTH_LONG
def test_a_new_model_is_one_file(tmp_path: Path, long: bool) -> None:
    """Contract tests find it, verify proves it, and it learns the same in every layout."""
    root = checkout(tmp_path)
    text = write_text(tmp_path / "text")
    also = [*SHORT, "model.num_layers=2", "train.steps=8", f"data.source={text}"]
    said = follow("new-model.md", root, also=also, env={"PYTHONPATH": str(root / "src")}, long=long)
    assert int(said[0].done.out.split(" passed")[0].split()[-1]) >= 5
    require_equal_and_learned(root / "runs", ["pp2", "ddp", "zero3", "tp2"] if long else ["pp2"], 8)


@BOTH_LONG
def test_a_new_reduction_of_gradients_is_one_file_and_a_new_attention_two(
    tmp_path: Path, long: bool
) -> None:
    """Tests find both; schema, plan and verify know them.

    Signs learn, and send a bit for each element; turns send what the plan says.
    """
    root = checkout(tmp_path)
    text = write_text(tmp_path / "text")
    also = [*SHORT, "train.steps=12", f"data.source={text}"]
    said = follow(
        "new-axis-implementation.md",
        root,
        also=also,
        env={"PYTHONPATH": str(root / "src")},
        long=long,
    )
    passed = [
        int(each.done.out.split(" passed")[0].split()[-1])
        for each in said
        if each.command.startswith("pytest")
    ]
    assert passed[0] >= 9
    assert passed[1:] == [7], "on 2 and 4 ranks, bf16 and fp16, two texts, and the table"
    if long:
        require_equal_and_learned(root / "runs", ["sign"], 12)


@BOTH_LONG
def test_a_module_of_your_own_is_cut_by_rules(tmp_path: Path, long: bool) -> None:
    """Rules are found, what is left whole is named, wrong ones are refused or differ, and the
    right ones train."""
    text = write_text(tmp_path / "text")
    short = [key for key in SHORT if not key.startswith("model.")]
    also = [*short, "train.steps=12", f"data.source={text}"]
    follow("your-own-module.md", tmp_path, also=also, long=long)
    if long:
        require_equal_and_learned(tmp_path / "runs", ["tp2", "pp2", "zero3"], 12)
