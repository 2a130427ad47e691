"""`phalanx plan` refuses options that the others leave without effect, in one line."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from phalanx.cli._plan_options import OPTIONS_OF_MODE, check_option_combination
from phalanx.cli.plan import command
from phalanx.core.errors import JobError, LayoutError, UsageError
from phalanx.plan.described_cluster import list_instance_types


@pytest.mark.parametrize(
    "given",
    [
        ("--gpu", "--nodes", "--model", "--seq-len", "--global-batch"),
        ("--gpu", "--gpus", "--out", "--force", "--page", "--rules"),
        ("--validate", "--anchors"),
        ("--autotune", "--model", "a job file or KEY=VALUE"),
        ("--dry-run", "--gpu", "--gpus", "--all-kinds"),
        ("--explain", "--gpu", "--nodes", "a job file or KEY=VALUE"),
        ("--suggest-rules", "--model", "--verify"),
    ],
)
def test_options_that_go_together_are_taken(given: tuple[str, ...]) -> None:
    check_option_combination(dict.fromkeys(given, True) | {"--recut": None, "--no-cache": False})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--autotune", "--validate"), "two questions"),
        (("--autotune", "--gpu"), "--gpu has no effect with --autotune"),
        (("--validate", "--nodes"), "--nodes has no effect with --validate"),
        (("--models", "a job file or KEY=VALUE"), "has no effect with --models"),
        (("--dry-run", "--page"), "--page has no effect with --dry-run"),
        (("--explain", "--out"), "--out has no effect with --explain"),
        (("--recut", "--rules"), "--rules has no effect with --recut"),
        (("--force",), "--force is for --out"),
        (("--all-kinds",), "--all-kinds is for --dry-run"),
        (("--nodes", "--gpus"), "how large the cluster is"),
    ],
)
def test_options_without_effect_are_refused(given: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_option_combination(dict.fromkeys(given, "x"))


def test_each_mode_is_alone() -> None:
    modes = list(OPTIONS_OF_MODE)
    for first, second in itertools.pairwise(modes):
        with pytest.raises(UsageError):
            check_option_combination({first: True, second: True})


def test_the_verb_refuses_before_it_looks_at_the_job() -> None:
    with pytest.raises(UsageError, match="--verify is for --suggest-rules"):
        command(["no_such_file.toml"], judge=True)


def test_a_range_of_gpus_has_no_page(tmp_path: Path) -> None:
    words = ["model.preset=llama3-8b", "data.seq_len=4096", "train.global_batch_size=64"]
    with pytest.raises(UsageError, match="one number of GPUs"):
        command(words, gpu="h100-sxm", gpus="8..16", page=tmp_path / "page.html")


def test_the_size_of_a_cluster_is_refused_where_no_gpu_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of each the plan was for this machine, with exit 0."""
    monkeypatch.setattr("phalanx.plan.cluster.list_visible_gpus", lambda: ())
    with pytest.raises(UsageError, match="--gpus is for a cluster of known GPUs"):
        command([], gpus="8", dry_run=True)
    with pytest.raises(LayoutError, match=r"cluster\.nodes has no effect"):
        command([], nodes=4)
    with pytest.raises(LayoutError, match=r"cluster\.nodes has no effect"):
        command(["cluster.nodes=4"], autotune=1)


def test_a_cost_says_what_its_price_is(capsys: pytest.CaptureFixture[str]) -> None:
    unchecked = [i for i in list_instance_types().values() if not i.is_checked]
    priced = [i for i in unchecked if i.on_demand_per_hour is not None]
    words = ["model.preset=llama3-8b", "data.seq_len=4096", "train.global_batch_size=64"]
    assert command(words, instance=priced[0].name, nodes=2) == 0
    printed = capsys.readouterr().out
    assert "unchecked" in printed
    assert f"of an unrecorded day in {priced[0].as_of}" in printed
    assert command([*words, "cost"], instance=priced[0].name, nodes=2, explain=True) == 0
    assert f"of an unrecorded day in {priced[0].as_of}" in capsys.readouterr().out


def test_a_typed_key_is_told_of_before_an_option() -> None:
    with pytest.raises(JobError, match=r"parallel\.ep: ep 3 does not divide the 8 experts"):
        command(["parallel.ep=3"], model="mixtral-8x7b", gpu="h100-sxm")


def test_gpus_of_a_machine_are_not_called_machines(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model.preset=llama3-8b", "data.seq_len=4096", "train.global_batch_size=1"]
    assert command(words, instance="p5.48xlarge", nodes=1) == 0
    printed = capsys.readouterr().out
    assert "cluster 8 GPUs of p5.48xlarge (h100-sxm) in 1 node" in printed
    assert ", 1 sequence x 4,096 tokens a step" in printed
