"""The examples do what they say, on one rank and on several."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from types import ModuleType

import pytest

from commands import TINY, finish, loss_curve, start, write_text
from phalanx.checkpoint.manifest import list_checkpoints
from ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _own_loop(rank: int, overrides: list[str]) -> list[float]:
    losses: list[float] = load("own_loop").main(overrides)
    return losses


def test_your_own_loop_computes_the_same_on_any_ranks() -> None:
    (alone,) = run_ranks(1, _own_loop, [])
    assert alone[-1] < 0.6 * alone[0]
    for overrides in ([], ["parallel.dp_shard=2"]):
        first, second = run_ranks(2, _own_loop, overrides)
        assert first == second
        assert first == pytest.approx(alone, rel=1e-5)


def _library_trainer(rank: int, run_dir: str) -> tuple[int, list[str]]:
    state = load("library_trainer").main(Path(run_dir))
    return state.step, [path.name for path in list_checkpoints(Path(run_dir))]


def test_the_trainer_as_a_library(tmp_path: Path) -> None:
    """40 steps, checkpoints, and a loss curve that goes down."""
    ((step, saved),) = run_ranks(1, _library_trainer, str(tmp_path))
    assert (step, saved) == (40, ["step-20", "step-40"])
    curve = loss_curve(tmp_path)
    assert list(curve) == list(range(1, 41))
    assert curve[40] < curve[1] - 0.5


def test_your_own_model_under_phalanx_train(tmp_path: Path) -> None:
    """As its docstring says, from the folder of the examples; here on a smaller text."""
    said = (EXAMPLES / "own_model.py").read_text()
    command = re.search(r"^phalanx train (model\.kind=\S+) '(model\.args=.*?)'", said, re.MULTILINE)
    assert command is not None
    before = set(os.listdir(EXAMPLES)) - {"__pycache__"}
    text = write_text(tmp_path / "text")
    run_dir = tmp_path / "run"
    more = ["parallel.dp_shard=2", f"data.source={text}", f"run.dir={run_dir}", "train.sample_tokens=8"]
    done = finish(start("train", *TINY, *command.groups(), *more, cwd=EXAMPLES))
    assert done.code == 0, done.err
    curve = loss_curve(run_dir)
    assert curve[20] < curve[1] - 0.3
    assert re.search(r"^sample  def ", done.out, re.MULTILINE)
    assert set(os.listdir(EXAMPLES)) - {"__pycache__"} == before
