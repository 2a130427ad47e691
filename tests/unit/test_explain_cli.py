"""`--explain`: each value of a job with where it comes from."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli import _app
from phalanx.core.files import write_json_atomically
from phalanx.job.findings import list_keys_by_section
from phalanx.job.load import load_job
from phalanx.job.schema import Job

JOB = """\
[model]
preset = "llama3-8b"
num_layers = 2
vocab_size = 300
[train]
steps = 300
global_batch_size = 24
[optim]
lr = 1e-3
lr_scaling = "sqrt"
reference_batch_size = 6
[parallel]
ranks = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Values by key, as JSON says them."""
    assert _app.run_command_line([*arguments, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["schema"] == "phalanx.explain/1"
    return {value["key"]: value for value in body["values"]} | {"": body}


MEMORY = "cluster.memory_gib=64"


def test_every_key_is_explained_and_its_value_is_the_jobs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = ask(capsys, "train", "job.toml", "--explain", "train.steps=20", MEMORY)
    job = load_job("job.toml", ["train.steps=20", MEMORY]).to_json()
    for section, keys in list_keys_by_section().items():
        for key in keys:
            told = found[f"{section}.{key}"]
            if told["origin"] in ("file", "override", "default") and job[section][key] is not None:
                assert told["value"] == job[section][key], told
    assert found[""]["plan"]["world_size"] == 3
    assert [path.name for path in folder.iterdir()] == ["job.toml"]


def test_origins(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = ask(
        capsys,
        "plan",
        "job.toml",
        "--explain",
        "train.steps=20",
        "optim.eps=1e-7",
        MEMORY,
    )

    def told(key: str) -> tuple[Any, str, str]:
        return found[key]["value"], found[key]["origin"], found[key]["where"] or found[key]["why"]

    assert told("train.steps") == (20, "override", "job.toml:6:1 says 300")
    assert told("optim.eps") == (1e-7, "override", "")
    assert told("train.global_batch_size") == (24, "file", "job.toml:7:1")
    assert told("model.preset") == ("llama3-8b", "file", "job.toml:2:1")
    assert told("model.dim") == (4096, "preset", "preset llama3-8b")
    assert told("model.num_layers") == (2, "file", "job.toml:3:1")
    assert told("model.vocab_size") == (300, "file", "job.toml:4:1")
    assert told("train.compile") == (False, "default", "")
    assert told("parallel.ranks")[1] == "file"
    assert told("parallel.dp_replicate")[:2] == (3, "derived")
    assert told("train.micro_batch_size")[:2] == (8, "derived")
    assert "24 / 3 ranks" in told("train.micro_batch_size")[2]
    assert found["optim.lr"]["value"] == pytest.approx(2e-3)
    assert found["optim.lr"]["origin"] == "derived"
    assert "Adam" in found["optim.lr"]["why"]


def test_the_default_job_is_explained_without_a_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = ask(capsys, "train", "--explain")
    assert {value["origin"] for key, value in found.items() if key} <= {
        "default",
        "derived",
        "preset",
    }
    assert found["model.vocab_size"]["value"] == 257


def test_a_resumed_run_is_explained_from_its_own_job(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job().model_copy(update={"eval": Job().eval.model_copy(update={"tokens": 100})})
    write_json_atomically(folder / "job.json", job.to_json())
    found = ask(capsys, "train", "--resume", str(folder), "--explain", "train.steps=700")
    assert (found["eval.tokens"]["value"], found["eval.tokens"]["origin"]) == (100, "run")
    assert found["eval.tokens"]["where"].endswith("job.json")
    assert found["train.steps"]["origin"] == "override"
    assert found["train.sample_tokens"]["origin"] == "default"


def test_the_table_is_aligned_and_plain_where_nobody_looks(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _app.run_command_line(["train", "job.toml", "--explain", MEMORY]) == 0
    out = capsys.readouterr().out
    assert out.isprintable() or "\033" not in out
    lines = [line for line in out.splitlines() if line and not line.startswith("[")]
    starts = {re.match(r"\S+ +", line).end() for line in lines}  # type: ignore[union-attr]
    assert len(starts) == 1
    assert [line for line in out.splitlines() if line.startswith("[")] == [
        f"[{name}]" for name in (*list_keys_by_section(), "plan")
    ]


def test_a_bad_job_is_refused_and_told_as_json_too(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        _app.run_command_line(["train", "--explain", "--json", "train.steps=0", "optim.lrr=1"]) == 3
    )
    captured = capsys.readouterr()
    body = json.loads(captured.out)
    assert (body["schema"], body["exit_code"]) == ("phalanx.error/1", 3)
    assert {problem["key"] for problem in body["problems"]} == {"train.steps", "optim.lrr"}
    assert len(captured.err.splitlines()) == 2


@pytest.mark.parametrize(
    ("override", "what"),
    [
        (["eval.tokens=0", "eval.every_steps=5"], "needs an evaluation, and eval.tokens is 0"),
        (["eval.tokens=0", "eval.keep_best=true"], "needs an evaluation, and eval.tokens is 0"),
    ],
)
def test_evaluations_that_cannot_be(
    override: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _app.run_command_line(["plan", *override]) == 3
    assert what in capsys.readouterr().err
    assert _app.run_command_line(["plan", "eval.keep_best=true"]) == 0  # at the end only
