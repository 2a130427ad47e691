"""`phalanx plan` reads of the data what `train` reads: vocabulary, numbers of tokens, what is
refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from test_data_megatron import write as write_megatron

from commands import write_text
from phalanx.cli import _app
from phalanx.job.load import load_job
from phalanx.run.plan_job import plan_job
from phalanx.run.prepare import prepare_run

SMALL = (
    "model.num_layers=1",
    "model.dim=32",
    "model.num_heads=2",
    "data.seq_len=32",
    "cluster.device=cpu",
)
OWN = """
import numpy as np
def samples(split):
    return [{"inputs": np.arange(32) % 9, "targets": np.arange(32) % 9} for _ in range(40 if split == "train" else 4)]
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source of each kind."""
    folder = tmp_path_factory.mktemp("sources")
    text = write_text(folder / "text")
    vocabulary = str(folder / "tokenizer.json")
    assert (
        _app.run_command_line(
            ["data", "tokenizer", str(text), "--vocab-size", "400", "--out", vocabulary]
        )
        == 0
    )
    assert (
        _app.run_command_line(
            ["data", "build", str(text), "--tokenizer", vocabulary, "--out", str(folder / "shards")]
        )
        == 0
    )
    assert _app.run_command_line(["data", "build", str(text), "--out", str(folder / "bytes")]) == 0
    np.save(folder / "ids.npy", (np.arange(5000) % 77).astype(np.uint16))
    write_megatron(folder, [[(np.arange(900) % 61).tolist()], [(np.arange(800) % 59).tolist()]])
    (folder / "plan_own_data.py").write_text(OWN)
    return folder


@pytest.mark.parametrize(
    "overrides",
    [
        ("data.source=shards",),
        ("data.source=bytes",),
        ("data.source=ids.npy",),
        ("data.source=corpus",),
        ("data.source=text",),
        ("data.source=text", "data.tokenizer=tokenizer.json"),
        ("data.source=ids.npy", "data.tokenizer=tokenizer.json"),
        ("data.source=shards", "model.vocab_size=1000"),
        ("data.source=plan_own_data:samples", "model.vocab_size=9"),
        ('data.mixture=[{source="bytes", weight=1.0}, {source="text", weight=3.0}]',),
        ('data.mixture=[{source="ids.npy", weight=1.0}, {source="corpus", weight=3.0}]',),
    ],
    ids=lambda overrides: " ".join(overrides),
)
def test_a_plan_is_the_one_that_trains(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    """The whole plan, but for what only building tells of text."""
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(home)
    job = load_job(None, [*SMALL, *overrides])
    planned_job = plan_job(job)
    planned, lines = planned_job.plan, list(planned_job.data_lines)
    with prepare_run(job, tmp_path / "run", resume=False, num_ranks=None) as run:
        trained = run.plan
    assert planned.vocab_size == trained.vocab_size
    assert planned.num_params == trained.num_params
    assert planned.alternatives == trained.alternatives
    if "text" not in overrides[0]:
        assert planned.to_json() == trained.to_json()
    assert len(lines) == (2 if "mixture" in overrides[0] else 1)


@pytest.fixture
def refuse(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def refuse(*arguments: str) -> str:
        before = sorted(home.rglob("*"))
        code = _app.run_command_line(arguments)
        captured = capsys.readouterr()
        (line,) = captured.err.splitlines()
        assert sorted(home.rglob("*")) == before
        return f"{code} {line}"

    return refuse


@pytest.mark.parametrize("verb", ["plan", "verify"])
@pytest.mark.parametrize(
    "override",
    [
        "data.source=nowhere",
        "data.source=nowhere.npy",
        "data.source=no*thing",
        'data.mixture=[{source="text", weight=1.0}, {source="nowhere", weight=1.0}]',
    ],
)
def test_a_source_that_is_not_there_is_exit_4(
    refuse: Callable[..., str], verb: str, override: str
) -> None:
    said = refuse(verb, *SMALL, override)
    assert said.startswith("4 phalanx: ")
    assert "no" in said


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("data.source=ids.npy", "model.vocab_size=50"), "does not fit a vocabulary of 50"),
        (("data.source=ids.npy", "data.seq_len=6000"), "not enough tokens for one sequence"),
        (("data.source=text", "data.tokenizer=nowhere.json"), "no such tokenizer"),
        (("data.source=shards", "data.tokenizer=bytes"), "is not the one of the shards"),
        (
            ('data.mixture=[{source="shards", weight=1.0}, {source="text", weight=1.0}]',),
            "need one tokenizer",
        ),
    ],
)
def test_what_training_refuses_of_data_a_plan_refuses(
    refuse: Callable[..., str], overrides: tuple[str, ...], words: str
) -> None:
    said = refuse("plan", *SMALL, *overrides)
    assert said.startswith("4 phalanx: ")
    assert words in said


def test_a_plan_of_data_imports_no_torch(home: Path) -> None:
    ask = (
        "import json, sys; from phalanx.cli._app import run_command_line; run_command_line(sys.argv[1:]); print('torch' in"
        " sys.modules)"
    )
    command = [sys.executable, "-c", ask, "plan", *SMALL, "data.source=shards", "--json"]
    out = subprocess.run(command, cwd=home, capture_output=True, text=True, check=True).stdout
    body, _, last = out.rstrip().rpartition("\n")
    assert last == "False"
    assert json.loads(body)["vocab_size"] == 400
