"""What `phalanx bench scaling` says of an efficiency, and of runs that failed or were stopped."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from phalanx.cli._app import run_command_line
from phalanx.cli._bench_scaling import describe_scaling
from phalanx.core.errors import LayoutError
from phalanx.job.load import check_job
from phalanx.job.schema import Job
from phalanx.observe.events import StepFinished, wrap_event_in_envelope
from phalanx.observe.units import choose_metric_units_of_job
from phalanx.plan.cluster import Cluster
from phalanx.plan.planner import make_plan
from phalanx.run import scaling
from phalanx.run.scaling import ScalingPoint, ScalingResult, ScalingRun


@pytest.mark.parametrize(
    ("efficiency", "is_good", "words"),
    [
        (0.5, False, "below the 80 % that guides ask for"),
        (0.95, True, "at least the 80 % that guides ask for"),
        (23.5, False, "says little of scaling"),
    ],
)
def test_an_efficiency_far_above_linear_is_not_praised(
    efficiency: float, is_good: bool, words: str
) -> None:
    first = ScalingPoint(1, "one rank", 2, 0.28, 100.0, 1.0)
    second = ScalingPoint(2, "dp=2", 4, 0.012, 200.0 * efficiency, efficiency)
    assert second.is_good is is_good
    assert second.to_json()["is_credible"] is (efficiency < 1.2)
    result = ScalingResult((first, second), (), is_strong=False)
    verdict = list(describe_scaling(result))[-1]
    assert words.replace("80 %", "80%") in verdict
    assert ("guides" in verdict) is (efficiency < 1.2)


def test_speeds_have_the_unit_of_the_job() -> None:
    points = (ScalingPoint(1, "one rank", 2, 0.28, 100.0, 1.0),)
    for preset, unit in (("small", "100 tok/s"), ("vit-b16", "100 targets/s")):
        units = choose_metric_units_of_job({"model": {"preset": preset}})
        result = ScalingResult(points, (), is_strong=False, units=units)
        assert unit in list(describe_scaling(result))[1]
        assert result.to_json()["rate_unit"] == units.rate_unit


Outcome = ScalingRun | str | int


def patch_runs(monkeypatch: pytest.MonkeyPatch, outcome_of: Callable[[int, int], Outcome]) -> None:
    """Let no rank start: `outcome_of` has the number of the run and its ranks."""
    ranks_of_runs: list[int] = []

    def train(job: Job, run_dir: Path) -> Outcome:
        ranks_of_runs.append(job.parallel.ranks or 1)
        return outcome_of(len(ranks_of_runs), ranks_of_runs[-1])

    monkeypatch.setattr(scaling, "_train_on_ranks", train)


def succeed(ranks: int) -> ScalingRun:
    return ScalingRun(ranks, 0.1, 100.0 * ranks, {"forward": 0.1})


@pytest.mark.parametrize("is_refused", [True, False])
def test_the_fewest_ranks_that_fail_take_no_other_run_with_them(
    is_refused: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def decide(_: int, ranks: int) -> Outcome:
        if ranks > 1:
            return succeed(ranks)
        if is_refused:
            raise LayoutError("too large for 1 rank")
        return "killed by SIGKILL"

    patch_runs(monkeypatch, decide)
    assert run_command_line(["bench", "scaling", "--ranks", "1,2,4"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("  1 rank  failed: ")
    assert "100.0% of linear" in lines[2]
    assert "100.0% of linear" in lines[3]
    assert any("linear scaling is that from 2 ranks, the fewest that did" in line for line in lines)


def test_where_no_number_of_ranks_trains_the_first_reason_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    patch_runs(monkeypatch, lambda _, ranks: f"{ranks} fell")
    assert run_command_line(["bench", "scaling", "--ranks", "1,2"]) == 2
    assert "the run on 1 rank failed: 1 fell" in capsys.readouterr().err


@pytest.mark.parametrize("num_done", [0, 1, 3])
def test_a_stop_leaves_what_had_run(
    num_done: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    patch_runs(monkeypatch, lambda run, ranks: succeed(ranks) if run <= num_done else 130)
    assert run_command_line(["bench", "scaling", "--ranks", "1,2", "--json"]) == 130
    printed = capsys.readouterr()
    if not num_done:
        assert printed.out == ""
        assert printed.err.endswith("stopped before the first run was done\n")
        return
    body = json.loads(printed.out)
    assert [point["num_ranks"] for point in body["points"]] == [1, 2][:num_done]
    assert body["remarks"][0].startswith(f"stopped after {num_done} of 4 runs")


@pytest.mark.parametrize(
    "overrides",
    [
        ["checkpoint.every=auto", "checkpoint.mtbf_hours=10"],
        ["optim.schedule=wsd", "optim.warmup_steps=30"],
        ["parallel.ranks=4", "resilience.min_ranks=2"],
    ],
)
def test_jobs_of_long_runs_are_measured(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys that a few steps, or a few ranks, leave no room for are no reason to refuse the job."""
    trained: list[int] = []

    def train(job: Job, _: Path) -> Outcome:
        plan = make_plan(check_job(job), cluster=Cluster("cpu", 4, 2**36), vocab_size=257)
        trained.append(plan.world_size)
        return succeed(trained[-1])

    monkeypatch.setattr(scaling, "_train_on_ranks", train)
    assert run_command_line(["bench", "scaling", *overrides, "--ranks", "1,2"]) == 0
    assert trained == [1, 2, 1, 2]


@dataclass
class _Trained:
    exit_code: int = 0
    error: str = ""


@pytest.mark.parametrize("has_targets", [True, False])
def test_tokens_of_a_step_are_the_mean_of_all_steps(
    has_targets: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of documents differ, and the last one may have no target."""

    def train(job: Job, **_: object) -> _Trained:
        assert job.run.dir
        lines = []
        for step in range(1, 21):
            num_targets = 100 * (step % 2) * has_targets
            event = StepFinished(
                step, 2.0, num_targets, 0, 1e-3, 1.0, 0.5, 0.0, {"forward": 0.5}, 0.0, 1
            )
            lines.append(wrap_event_in_envelope(event, rank=0, attempt=0, seq=step).to_line())
        (tmp_path / "events").mkdir()
        (tmp_path / "events" / "rank-0000-attempt-00.jsonl").write_text("\n".join(lines) + "\n")
        return _Trained()

    monkeypatch.setattr(scaling, "train_job", train)
    outcome = scaling._train_on_ranks(Job(), tmp_path)
    if has_targets:
        assert isinstance(outcome, ScalingRun)
        # Of steps 4 to 20 eight have targets.
        assert outcome.tokens_per_s == pytest.approx(100 * 8 / 17 / 0.5)
    else:
        assert outcome == "no step after the first ones has a target"
