"""The examples do what they say, on one rank and on several."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from commands import (
    TINY,
    Done,
    environment,
    events,
    finish,
    loss_curve,
    start,
    write_text,
)
from phalanx.checkpoint.best import read_best_step
from phalanx.checkpoint.manifest import list_checkpoint_paths_of_run
from phalanx.observe.events import EvalFinished, Note, StepFinished
from ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = [override for override in TINY if not override.startswith("model.")]


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


def test_your_own_loop_saves_and_goes_on_in_another_layout(tmp_path: Path) -> None:
    (straight,) = run_ranks(1, _own_loop, [])
    in_run = f"run.dir={tmp_path}"
    run_ranks(1, _own_loop, [in_run, "train.steps=20"])
    assert [path.name for path in list_checkpoint_paths_of_run(tmp_path)] == ["step-20"]
    resumed, _ = run_ranks(2, _own_loop, [in_run, "parallel.dp_shard=2"])
    assert resumed == pytest.approx(straight[20:], rel=1e-5)


def _library_trainer(rank: int, run_dir: str) -> tuple[int, list[str]]:
    state = load("library_trainer").main(Path(run_dir))
    return state.step, [path.name for path in list_checkpoint_paths_of_run(Path(run_dir))]


def test_the_trainer_as_a_library(tmp_path: Path) -> None:
    """40 steps, checkpoints, and a loss curve that goes down."""
    ((step, saved),) = run_ranks(1, _library_trainer, str(tmp_path))
    assert (step, saved) == (40, ["step-20", "step-40"])
    curve = loss_curve(tmp_path)
    assert list(curve) == list(range(1, 41))
    assert curve[40] < curve[1] - 0.5


def test_training_from_python(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It finishes, goes on, and says where the newest checkpoint is."""
    source = write_text(tmp_path / "text")
    more = [
        f"data.source={source}",
        "eval.tokens=0",
        "train.sample_tokens=0",
        "observe.sinks=[]",
        "parallel.ranks=2",
    ]
    result = load("train_from_python").main(str(tmp_path / "run"), more)
    assert (result.status, result.exit_code, result.last_step) == ("finished", 0, 60)
    assert result.newest_checkpoint == str(tmp_path / "run" / "checkpoints" / "step-60")
    out = capfd.readouterr().out
    assert (
        out.splitlines()[-1]
        == f"dp_replicate=2: step 60, loss {loss_curve(tmp_path / 'run')[30]:.3f} ->"
        f" {result.metrics['loss']:.3f}, {result.newest_checkpoint}"
    )
    assert out.count("step 30/30") == 1
    assert "step 60/60" not in out, "the second run is quiet"


def test_your_own_model_under_phalanx_train(tmp_path: Path) -> None:
    """As its docstring says, from the folder of the examples; here on a smaller text."""
    said = (EXAMPLES / "own_model.py").read_text()
    command = re.search(r"^phalanx train (model\.kind=\S+) '(model\.args=.*?)'", said, re.MULTILINE)
    assert command is not None
    before = set(os.listdir(EXAMPLES)) - {"__pycache__"}
    text = write_text(tmp_path / "text")
    run_dir = tmp_path / "run"
    more = [
        "parallel.dp_shard=2",
        f"data.source={text}",
        f"run.dir={run_dir}",
        "train.sample_tokens=8",
    ]
    done = finish(start("train", *SMALL, *command.groups(), *more, cwd=EXAMPLES))
    assert done.code == 0, done.err
    curve = loss_curve(run_dir)
    assert curve[20] < curve[1] - 0.3
    assert re.search(r"^sample  \S", done.out, re.MULTILINE)
    assert set(os.listdir(EXAMPLES)) - {"__pycache__"} == before


def run_script(folder: str, script: str, run_dir: Path) -> str:
    """What an example's own script prints about a run."""
    command = [sys.executable, script, str(run_dir)]
    quiet = environment(PYTHONDONTWRITEBYTECODE="1")
    done = subprocess.run(command, cwd=EXAMPLES / folder, env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def train_example(folder: str, run_dir: Path, *overrides: str) -> Done:
    """The command of the job file's first lines, in the example's folder."""
    said = (EXAMPLES / folder / "job.toml").read_text()
    assert re.search(rf"^#     phalanx train job\.toml run\.dir=runs/{folder}$", said, re.MULTILINE)
    arguments = ("train", "job.toml", f"run.dir={run_dir}", "observe.sinks=[]", *overrides)
    done = finish(start(*arguments, cwd=EXAMPLES / folder))
    assert done.code == 0, done.err
    return done


@pytest.mark.long
def test_digits_are_told_apart_by_a_net_with_batchnorm(tmp_path: Path) -> None:
    """At least 95 % of the held-out ones, trained on two ranks and evaluated as a plain module
    in one process."""
    done = train_example("digits", tmp_path / "run")
    assert "warn" not in done.out
    said = run_script("digits", "evaluate.py", tmp_path / "run")
    found = re.search(r"step 150: ([\d.]+)% of 300 held-out digits are right", said)
    assert found is not None, said
    assert float(found[1]) >= 95
    evaluated = [envelope.event for envelope in events(tmp_path / "run", EvalFinished)]
    accuracies = {
        event.step: event.metrics["accuracy"]
        for event in evaluated
        if isinstance(event, EvalFinished)
    }
    assert f"{accuracies[150]:.1%}" == f"{found[1]}%", (
        "what two ranks measured is what one process measures"
    )
    best = read_best_step(tmp_path / "run")
    assert best is not None
    assert (best.metric, best.value) == ("accuracy", max(accuracies.values()))
    assert accuracies[best.step] == best.value


FEW = (
    "train.steps=10",
    "eval.tokens=0",
    "eval.every_steps=none",
    "eval.keep_best=false",
    "data.args.shift=true",
)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """Ten steps on two ranks, with something to be warned of."""
    run_dir = tmp_path_factory.mktemp("digits") / "run"
    more = (*FEW, "parallel.ranks=2", "parallel.dp_shard=2", "optim.reference_batch_size=32")
    return run_dir, train_example("digits", run_dir, *more)


@pytest.mark.long
def test_digits_learn_the_same_on_one_rank_and_on_two(
    sharded: tuple[Path, Done], tmp_path: Path
) -> None:
    """Own dataset with random shifts, BatchNorm over both ranks: the losses of ten steps are those
    of one rank.

    The first steps are equal but for rounding. AdamW divides by gradients that are near 0 in these
    steps, so that later ones differ by up to a few ten-thousandths, on some CPUs more than on
    others.
    """
    train_example("digits", tmp_path / "run", *FEW, "parallel.ranks=1", "checkpoint.at_end=false")
    alone, two = loss_curve(tmp_path / "run"), loss_curve(sharded[0])
    assert list(alone) == list(two) == list(range(1, 11))
    assert list(two.values())[:4] == pytest.approx(list(alone.values())[:4], rel=1e-5)
    assert list(two.values()) == pytest.approx(list(alone.values()), rel=2e-3)


@pytest.mark.long
def test_a_run_says_its_warnings_and_keeps_them(sharded: tuple[Path, Done]) -> None:
    """On the terminal, in plan.json, and as an event for the page."""
    run_dir, done = sharded
    (line,) = re.findall(r"^warn    (.*)$", done.out, re.MULTILINE)
    assert "lr 0.003 was tuned for 32" in line
    assert json.loads((run_dir / "plan.json").read_text())["warnings"] == [
        {"code": "lr_ignores_batch", "text": line}
    ]
    notes = [envelope.event for envelope in events(run_dir, Note)]
    assert [
        note.facts["text"] for note in notes if isinstance(note, Note) and note.code == "warning"
    ] == [line]


@pytest.mark.long
@pytest.mark.long
def test_a_resumed_run_with_another_batch_scales_its_rate(sharded: tuple[Path, Done]) -> None:
    """Batch 128 instead of the reference of 32: twice the rate, in the reasons and in what the
    steps used."""
    run_dir, _ = sharded
    before = len(events(run_dir, StepFinished))
    more = (
        "train.steps=12",
        "train.global_batch_size=128",
        "optim.lr_scaling=auto",
        "optim.schedule=constant",
    )
    done = finish(start("train", "--resume", str(run_dir), *more, cwd=EXAMPLES / "digits"))
    assert done.code == 0, done.err
    assert (
        "why     lr 0.003 x sqrt(128/32) = 0.006: batch 128 instead of 32; Adam follows the square"
        " root" in done.out
    )
    new = [envelope.event for envelope in events(run_dir, StepFinished)][before:]
    assert {event.learning_rate for event in new if isinstance(event, StepFinished)} == {0.006}


@pytest.mark.long
def test_regression_finds_the_least_squares_solution(tmp_path: Path) -> None:
    train_example("regression", tmp_path / "run")
    said = run_script("regression", "compare.py", tmp_path / "run")
    found = re.search(r"relative distance (\S+)", said)
    assert found is not None, said
    assert float(found[1]) < 1e-3


@pytest.mark.parametrize("name", ["digits", pytest.param("regression", marks=pytest.mark.long)])
def test_examples_without_sequences_are_verified_as_they_stand(name: str) -> None:
    command = ("verify", "job.toml", "--ranks", "2", "--types", "float64", "--steps", "1", "--json")
    done = finish(start(*command, "--layouts", "ddp,zero3", cwd=EXAMPLES / name))
    rows = [json.loads(line) for line in done.out.splitlines()]
    assert [(row["layout"], row["ok"], row["refused"]) for row in rows] == [
        ("ddp", True, ""),
        ("zero3", True, ""),
    ], done.err
