"""`phalanx plan` for a cluster that is not here: answers, files, exit codes."""

from __future__ import annotations

import json
import typing
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.cli import _app
from phalanx.cli._plan_options import OutOption
from phalanx.job.load import load_job
from phalanx.plan.accelerators import list_accelerators
from phalanx.plan.described_cluster import list_instance_types
from phalanx.plan.planner import make_plan
from phalanx.plan.search.comparison import _format_lead, explain_why_slower, explain_why_winner
from phalanx.plan.search.describe import format_goodput
from phalanx.plan.search.result import SearchResult
from phalanx.plan.search.search import search_layouts
from phalanx.plan.search.task import build_search_task

ROOT = Path(__file__).parents[2]
SMALL = ["plan", "--model", "gpt2", "--gpu", "h100-sxm", "--seq-len", "1024"]
QUESTION = [*SMALL, "--global-batch", "64"]


def test_the_answer_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert _app.run_command_line([*QUESTION, "--instance", "p5.48xlarge"]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("FITS · ")
    for part in ("80 %", "tokens/s/GPU", "MFU", "peak", "goodput"):
        assert part in first
    assert any("on demand" in line and "kWh" in line for line in others)


def test_out_writes_a_job_that_plans_as_the_answer_and_replaces_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "plan"
    assert _app.run_command_line([*QUESTION, "--out", str(folder)]) == 0
    written = [line for line in capsys.readouterr().out.splitlines() if line[:5] == "wrote"]
    names = [Path(line.split()[1]).name for line in written]
    assert names == ["job.toml", "page.html", "plan.json"]
    # Each may stand in the way, and so each is told of.
    page = (ROOT / "docs" / "plan.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith("| `--out DIR`")]
    help_text = typing.get_args(OutOption)[1].help
    assert all(name in row and name in help_text for name in names)
    body = json.loads((folder / "plan.json").read_text())
    assert body["schema"] == "phalanx.plan-search/1"
    assert body["advice"]["rules"]
    result = SearchResult.from_json(body)
    assert result.winner is not None
    plan = make_plan(load_job(folder / "job.toml"))
    assert plan.layout == result.winner.layout
    assert plan.chosen.total_bytes == result.winner.memory.total_bytes
    assert _app.run_command_line([*QUESTION, "--out", str(folder)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert _app.run_command_line([*QUESTION, "--out", str(folder), "--force"]) == 0
    other = tmp_path / "other"
    other.mkdir()
    (other / "page.html").write_text("mine")
    assert _app.run_command_line([*QUESTION, "--out", str(other)]) == 2
    assert [path.name for path in other.iterdir()] == ["page.html"]
    assert (other / "page.html").read_text() == "mine"


def test_a_module_whose_samples_are_not_traced_does_not_fit_by_its_weights_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "untraced.py").write_text(
        "from torch import nn\n\ndef make():\n    return nn.Linear(8, 8)\n\n"
        "def rows(split):\n    return [{'other': 1.0}]\n"
    )
    monkeypatch.chdir(tmp_path)
    question = ["plan", "--model", "untraced:make", "--gpu", "h100-sxm", "--gpus", "8"]
    code = _app.run_command_line([*question, "--global-batch", "64", "data.source=untraced:rows"])
    done = capsys.readouterr()
    assert (code, done.out) == (3, "")
    assert "whether the job fits is not known" in done.err


def test_what_does_not_fit_is_exit_3_with_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    large = ["plan", "--model", "llama3-70b", "--gpu", "h100-sxm", "--seq-len", "8192"]
    assert _app.run_command_line([*large, "--global-batch", "64"]) == 3
    text = capsys.readouterr().out
    assert text.startswith("DOES NOT FIT")
    assert "parallel.offload=parameters" in text
    assert "16 ranks" in text


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["--gpu", "h100-smx"], 3, "h100-sxm"),
        (["--instance", "p5"], 3, "no machine is called"),
        (["--model", "llama3-8c"], 3, "llama3-8b"),
        (["--cluster", "/nowhere.toml"], 3, "cannot be read"),
        (["--gpus", "1..x"], 3, "64..1024"),
        (["--nodes", "0"], 2, "nodes"),
        (["--global-batch", "7", "parallel.dp_replicate=8"], 3, "global_batch_size"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], code: int, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    question = ["plan", "--model", "gpt2", "--gpu", "h100-sxm", "--seq-len", "1024"]
    assert _app.run_command_line([*question, *arguments]) == code
    captured = capsys.readouterr()
    assert named in captured.err
    if code == 3:
        assert len(captured.err.splitlines()) == 1


def test_numbers_of_gpus_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert _app.run_command_line([*QUESTION, "--gpus", "8..32", "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)["counts"]
    assert [count["num_devices"] for count in counts] == [8, 16, 32]
    rates = [count["tokens_per_s"] for count in counts]
    assert rates == sorted(rates)
    assert counts[0]["efficiency"] == 1


def test_a_row_of_a_range_is_the_answer_for_its_number(capsys: pytest.CaptureFixture[str]) -> None:
    """A range looked at fewer families, and named another winner where several are a tie."""
    question = ["plan", "--model", "llama3-8b", "--gpu", "h100-sxm", "--seq-len", "4096"]
    question += ["--global-batch", "64", "--json", "--gpus"]
    assert _app.run_command_line([*question, "8..16"]) == 0
    of_range = json.loads(capsys.readouterr().out)["counts"][0]["winner"]
    assert _app.run_command_line([*question, "8"]) == 0
    alone = json.loads(capsys.readouterr().out)["winner"]
    assert of_range["job_keys"] == alone["job_keys"]


def test_the_page_of_the_verb_names_every_gpu_and_machine() -> None:
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    for name in (*list_accelerators(), *list_instance_types()):
        assert f"| `{name}` |" in page


def test_a_winner_that_fills_its_memory_names_what_needs_less_and_how_much_a_plan_may_fill(
    capsys: pytest.CaptureFixture[str],
) -> None:
    question = ["plan", "--model", "llama2-13b", "--gpu", "a100-sxm", "--nodes", "2"]
    question += ["--seq-len", "2048", "--global-batch", "64"]
    assert _app.run_command_line(question) == 0
    text = capsys.readouterr().out
    assert "of 70.8 GiB that a plan may fill" in text
    assert "90% of a GPU's 80.0 GiB" in text
    [room] = [line for line in text.splitlines() if line.startswith("room")]
    words, _, keys = room.partition(" of the step: ")
    assert "fills 95% of what a plan may fill; 4 (zero3) needs 12.1 GiB less, for +0.1%" in words
    # They give the plan that the line promises.
    assert _app.run_command_line([*question, *keys.split()]) == 0
    text = capsys.readouterr().out
    assert "peak 54.9 GiB of" in text
    assert "room" not in text


def test_faster_runners_up_of_a_tie_say_why_they_lose_all_the_same() -> None:
    job = load_job(
        None,
        [
            "model.preset=llama2-13b",
            "cluster.gpu=a100-sxm",
            "cluster.nodes=2",
            "data.seq_len=2048",
            "train.global_batch_size=64",
        ],
    )
    result = search_layouts(build_search_task(job))
    winner, faster = result.winner, result.runners_up[0]
    assert winner is not None
    assert winner.step_s is not None
    assert faster.step_s is not None
    assert faster.step_s < winner.step_s
    assert faster.num_mechanisms == winner.num_mechanisms
    assert faster.why_not == "0.4% faster, which is a tie; a copy spread over 16 ranks, not 8"
    why = explain_why_winner(winner, [winner, *result.runners_up])
    assert why == "a tie with the fastest (it is 0.4% faster), and as simple or simpler"


def test_how_much_faster_the_other_one_of_a_tie_is_has_one_number() -> None:
    job = load_job(
        None,
        [
            "model.preset=llama3-8b",
            "cluster.gpu=h100-sxm",
            "data.seq_len=4096",
            "cluster.nodes=1",
            "train.global_batch_size=64",
        ],
    )
    winner = search_layouts(build_search_task(job)).winner
    assert winner is not None
    assert winner.time is not None
    # 2.95 % behind in parts of the fastest, which is 2.87 % of the winner's own step.
    terms = {term: seconds / 1.0295 for term, seconds in winner.time.terms.items()}
    fastest = replace(winner, time=replace(winner.time, terms=terms))
    assert "(it is 2.9% faster)" in explain_why_winner(winner, [winner, fastest])
    assert explain_why_slower(fastest, winner).startswith("2.9% faster, which is a tie")
    assert _format_lead(0.0004) == "less than 0.1%"


def test_a_length_that_no_ranks_can_share_is_named_where_nothing_fits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    question = ["plan", "--model", "qwen2.5-32b", "--gpu", "h200-sxm", "--nodes", "1"]
    assert _app.run_command_line([*question, "--seq-len", "1000003", "--global-batch", "8"]) == 3
    text = capsys.readouterr().out
    assert "data.seq_len 1,000,003 divides into no equal parts" in text
    assert "as they could --seq-len 999936" in text
    assert "none fits by formulas in bulk" in text


def test_advice_of_rules_beside_a_search_says_what_the_search_has_weighed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    question = ["plan", "--model", "llama3-8b", "--gpu", "l40s", "--nodes", "3"]
    assert _app.run_command_line([*question, "--seq-len", "3000", "--global-batch", "72"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert ("try" in text) == ("the search has weighed it" in text)
    assert "try" in text


def test_a_network_that_is_assumed_is_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["plan", "--model", "gpt2", "--seq-len", "1024", "--global-batch", "64"]
    question = [*small, "--instance", "gpu-l40s-a_1gpu-8vcpu-32gb"]
    assumed = "the network of gpu-l40s-a_1gpu-8vcpu-32gb is not known: 12.5 GB/s per GPU"
    assert _app.run_command_line([*question, "--nodes", "4"]) == 0
    assert f"remark  {assumed}" in capsys.readouterr().out
    assert _app.run_command_line([*question, "--nodes", "1"]) == 0
    assert assumed not in capsys.readouterr().out


def test_steps_that_the_job_names_have_a_cost_of_their_own_and_goodput_is_not_100(
    capsys: pytest.CaptureFixture[str],
) -> None:
    question = [*QUESTION, "--instance", "p5.48xlarge"]
    assert _app.run_command_line([*question, "train.steps=20000"]) == 0
    text = capsys.readouterr().out
    assert "goodput 99.9" in text
    [line] = [line for line in text.splitlines() if line.startswith("        20,000 steps: ")]
    assert " h, $" in line
    assert _app.run_command_line(question) == 0
    assert "steps:" not in capsys.readouterr().out
    assert format_goodput(0.99999999) == "99.99%"
    assert format_goodput(0.984) == "98.4%"


def test_a_winner_that_leaves_nothing_and_has_no_leaner_rival_names_the_key_that_leaves_room(
    capsys: pytest.CaptureFixture[str],
) -> None:
    question = ["plan", "--model", "llama2-13b", "--gpu", "a100-sxm-40", "--nodes", "2"]
    question += ["--seq-len", "4096", "--global-batch", "512"]
    # Of one family there is no runner-up.
    question += ["parallel.dp_shard=16", "parallel.zero_stage=3", "parallel.tp=1"]
    question += ["parallel.pp=1", "parallel.cp=1"]
    assert _app.run_command_line(question) == 0
    text = capsys.readouterr().out
    [room] = [line for line in text.splitlines() if line.startswith("room")]
    assert "fills 99.0% of what a plan may fill, and no runner-up" in room
    before = float(text.partition("peak ")[2].split()[0])
    assert _app.run_command_line([*question, room.split()[-1]]) == 0
    after = float(capsys.readouterr().out.partition("peak ")[2].split()[0])
    assert after <= 0.96 * before
