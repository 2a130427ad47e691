"""What `phalanx plan` prints under its answer, `--explain TERM`, `--rules` and `--page`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.cli import _app
from phalanx.cli._plan_advice import split_explained_term
from phalanx.core.errors import UsageError
from phalanx.plan.advice import what_if
from phalanx.plan.advice.explain_term import parse_term_name
from phalanx.plan.advice.waterfall import TERM_LABELS

QUESTION = [
    "plan",
    "--model",
    "llama3-8b",
    "--gpu",
    "h100-sxm",
    "--nodes",
    "1",
    "--seq-len",
    "4096",
    "--global-batch",
    "64",
]


def test_the_answer_has_a_waterfall_memory_and_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert _app.run_command_line([*QUESTION]) == 0
    text = capsys.readouterr().out
    for part in ("products at peak", "backward", "rules   of thumb", "--rules shows all"):
        assert part in text
    assert "\x1b" not in text
    assert "█" not in text


def test_json_has_the_advice_and_rules_show_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert _app.run_command_line([*QUESTION, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    rules = body["advice"]["rules"]
    assert {"name", "value", "limit", "state", "remedy", "comparison"} <= set(rules[0])
    assert body["advice"]["time"]["terms"]["ideal"] > 0
    assert _app.run_command_line([*QUESTION, "--rules"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for rule in rules:
        assert rule["title"] in text
    assert "heuristics" in text


def test_json_of_this_machines_plan_has_the_advice_where_rules_are_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = ["plan", "cluster.device=cpu", "parallel.ranks=2", "train.recompute=full", "--json"]
    assert _app.run_command_line(here) == 0
    assert "advice" not in json.loads(capsys.readouterr().out)
    assert _app.run_command_line([*here, "--rules"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["schema"] == "phalanx.plan/1"
    states = {rule["name"]: rule["state"] for rule in body["advice"]["rules"]}
    assert states["recompute-where-needed"] == "fails"


def test_a_term_is_explained_with_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert _app.run_command_line([*QUESTION, "--explain", "elementwise"]) == 0
    assert capsys.readouterr().out.startswith("elementwise: ")
    assert (
        _app.run_command_line(
            ["plan", "--explain", "activations", "train.recompute=full", "--json"]
        )
        == 0
    )
    body = json.loads(capsys.readouterr().out)
    assert body["schema"].startswith("phalanx.plan-term/")
    assert body["unit"] == "bytes"
    assert body["calls"]


def test_wrong_terms_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert _app.run_command_line(["plan", "--explain", "quux"]) == 2
    assert "dp-exposed" in capsys.readouterr().err
    assert _app.run_command_line(["plan", "--explain", "bubble", "cluster.device=cpu"]) == 2
    assert "named GPUs" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["products at peak", "tensor-parallel", "failures, saves"])
def test_a_term_has_the_name_that_the_screen_shows(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse_term_name(name) in ("ideal", "tp", "goodput")
    assert {parse_term_name(label) for label in TERM_LABELS.values()} == set(TERM_LABELS)


def test_figures_of_the_answer_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {"step": "ideal", "goodput": "mtbf_hours", "cost": "tokens_per_s", "mfu": "peak_flops"}
    for term, part in (shown | {"backward": "activations", "between steps": "optimizer"}).items():
        assert _app.run_command_line([*QUESTION, "--explain", term]) == 0
        text = capsys.readouterr().out
        assert text.startswith(f"{term}: ")
        assert part in text
    assert _app.run_command_line(["plan", "--explain", "mfu", "cluster.device=cpu"]) == 2
    assert "named GPUs" in capsys.readouterr().err


def test_terms_are_told_from_job_files_and_overrides(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    assert split_explained_term([str(job), "tp", "train.steps=3"]) == (
        [str(job), "train.steps=3"],
        "tp",
    )
    assert split_explained_term(["train.steps=3"]) == (["train.steps=3"], None)
    with pytest.raises(UsageError):
        split_explained_term(["dp", "exposed"])


def test_pages_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(what_if, "SEQ_LEN_AND_DEVICE_FACTORS", (1,))
    monkeypatch.setattr(what_if, "MICRO_BATCH_FACTORS", (1,))
    page, out = tmp_path / "a.html", tmp_path / "out"
    assert _app.run_command_line([*QUESTION, "--page", str(page), "--out", str(out)]) == 0
    assert page.read_text() == (out / "page.html").read_text()
    assert "Winner and runners-up" in page.read_text()
    # A directory is no file to write.
    assert _app.run_command_line([*QUESTION, "--page", str(tmp_path)]) == 7


def test_a_job_file_after_page_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`phalanx plan --page job.toml`, by whoever takes --page for a switch."""
    job = tmp_path / "job.toml"
    job.write_text("[train]\nsteps = 5\n")
    assert _app.run_command_line(["plan", "--page", str(job)]) == 2
    assert f"{job}: is there already, and is no page" in capsys.readouterr().err
    assert job.read_text() == "[train]\nsteps = 5\n"


def test_the_next_command_trains_what_was_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """Options of the plan are keys of the job: without them another model would be trained."""
    command = ["plan", "--model", "small-mixtral", "--seq-len", "64", "parallel.ranks=2"]
    assert _app.run_command_line(command) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last.endswith(
        "phalanx train data.seq_len=64 model.preset=small-mixtral parallel.ranks=2"
    )
