"""Two runs side by side: `phalanx report A B`."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from statistics import fmean, stdev

import pytest

from phalanx.cli._app import run_command_line
from phalanx.observe.events import RunFinished, StepFinished, StepSkipped, wrap_event_in_envelope
from phalanx.report.compare import (
    RunComparison,
    compare_runs,
    estimate_relative_variance_of_mean,
    list_comparison_lines,
)
from phalanx.report.reduce import collect_run_facts


def write_run(
    run_dir: Path,
    backward_s: float,
    *,
    job: dict[str, object] | None = None,
    attempt: int = 0,
    first_step: int = 1,
    num_steps: int = 40,
    step_tokens: int = 100,
) -> Path:
    noise = random.Random(run_dir.name)
    (run_dir / "events").mkdir(parents=True, exist_ok=True)
    lines = []
    for step in range(first_step, first_step + num_steps):
        seconds = {"forward": 0.03, "backward": backward_s * noise.uniform(0.95, 1.05)}
        step_s = sum(seconds.values())
        event = StepFinished(
            step, 2.0, 100, 100 * step, 1e-3, 1.0, step_s, 100 / step_s, seconds, 0.0, 1
        )
        lines.append(wrap_event_in_envelope(event, rank=0, attempt=attempt, seq=step).to_line())
    (run_dir / "events" / f"rank-0000-attempt-{attempt:02d}.jsonl").write_text(
        "\n".join(lines) + "\n"
    )
    (run_dir / "job.json").write_text(json.dumps(job or {"train": {"steps": 40}}))
    plan = {"global_batch_size": step_tokens // 10, "seq_len": 10}
    (run_dir / "plan.json").write_text(json.dumps(plan))
    return run_dir


def test_a_faster_run_is_faster_and_the_term_that_changed_is_shown(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", 0.09, job={"train": {"micro_batch_size": 1}})
    second = write_run(tmp_path / "b", 0.06, job={"train": {"micro_batch_size": 4}})
    comparison = compare_runs(collect_run_facts(first), collect_run_facts(second))
    assert comparison.is_clear
    assert comparison.speedup == pytest.approx(0.12 / 0.09, rel=0.02)
    terms = {term.name.strip(): term.ratio for term in comparison.terms}
    assert terms["backward"] == pytest.approx(0.06 / 0.09, rel=0.03)
    assert terms["forward"] == pytest.approx(1.0, rel=0.01)
    assert comparison.changed_keys == ("train.micro_batch_size: 1 -> 4",)
    lines = list_comparison_lines(comparison, ("a", "b"))
    assert "1.3" in lines[0]
    assert "faster" in lines[0]


def test_models_of_other_cost_are_said_and_keys_without_a_value(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", 0.09, job={"model": {"dim": 64}})
    second = write_run(tmp_path / "b", 0.06, job={"model": {"kind": "own:build"}})
    for run, flops in ((first, 837e3), (second, 1.08e6)):
        plan = json.loads((run / "plan.json").read_text())
        (run / "plan.json").write_text(json.dumps({**plan, "flops_per_token": flops}))
    comparison = compare_runs(collect_run_facts(first), collect_run_facts(second))
    assert "model.dim: 64 -> not set" in comparison.changed_keys
    (remark,) = [text for text in comparison.remarks if "FLOP" in text]
    assert remark.startswith("their models take 837 KFLOP and 1.08 MFLOP a token")


def test_a_run_whose_events_end_before_it_did_says_so(tmp_path: Path) -> None:
    """Its file was cut off between two lines: none of them is damaged."""
    first = write_run(tmp_path / "a", 0.06, job={"data": {"seq_len": math.nan}})
    second = write_run(tmp_path / "b", 0.06, job={"data": {"seq_len": 8}})
    end = wrap_event_in_envelope(RunFinished("finished", 0, 60, 9.0), rank=-1, attempt=0, seq=0)
    (second / "events" / "supervisor.jsonl").write_text(end.to_line() + "\n")
    comparison = compare_runs(collect_run_facts(first), collect_run_facts(second))
    assert comparison.changed_keys == ("data.seq_len: nan -> 8",)
    assert comparison.remarks == (
        "they did 40 and 60 steps: their wall times are not those of the same work",
        "the first has no end on record",
        "of the second, steps 41 to 60 are not on record: the run finished at step 60, and its"
        " events end before",
    )


def test_runs_of_different_length_or_steps_of_different_size_are_compared_with_a_remark(
    tmp_path: Path,
) -> None:
    first = write_run(tmp_path / "a", 0.06)
    second = write_run(tmp_path / "b", 0.06, num_steps=90, step_tokens=200)
    comparison = compare_runs(collect_run_facts(first), collect_run_facts(second))
    assert comparison.num_steps == (37, 87)
    for remark in (
        "their steps are of 100 and 200 tokens: compare tokens/s, and not seconds of a step",
        "they did 40 and 90 steps: their wall times are not those of the same work",
        "the last losses are those of steps 40 and 90",
        "the mean step is that of steps 4 to 40 and of steps 4 to 90",
    ):
        assert remark in comparison.remarks
    assert "37 and 87 steps" in list_comparison_lines(comparison, ("a", "b"))[0]
    same = compare_runs(collect_run_facts(first), collect_run_facts(first))
    assert same.remarks == ("the first has no end on record", "the second has no end on record")


def test_steps_that_are_slow_together_are_not_so_many_measurements() -> None:
    """Runs of one code on a machine that is busy for fifty steps at a time: nothing between them is
    clear, twenty times in twenty-one."""
    noise = random.Random(5)

    def list_step_seconds() -> list[float]:
        seconds, load = [], 0.0
        for _ in range(2000):
            load = 0.96 * load + noise.gauss(0, 0.02)
            seconds.append(1 + load + noise.gauss(0, 0.02))
        return seconds

    num_clear, num_clear_if_independent = 0, 0
    for _ in range(60):
        pair = list_step_seconds(), list_step_seconds()
        apart = abs(math.log(fmean(pair[0]) / fmean(pair[1])))
        variances = map(estimate_relative_variance_of_mean, pair)
        num_clear += apart > 2.262 * math.sqrt(sum(variances))
        independent = ((stdev(each) / fmean(each)) ** 2 / len(each) for each in pair)
        num_clear_if_independent += apart > 1.96 * math.sqrt(sum(independent))
    assert num_clear <= 6
    assert num_clear_if_independent > 30


def test_equal_runs_are_not_called_faster(tmp_path: Path) -> None:
    facts = [collect_run_facts(write_run(tmp_path / name, 0.06)) for name in ("a", "b")]
    comparison = compare_runs(*facts)
    assert not comparison.is_clear
    assert "within their spread" in list_comparison_lines(comparison, ("a", "b"))[0]


def test_the_first_line_is_about_the_steps_of_the_table(tmp_path: Path) -> None:
    """Of a run that was started again: the steps of its last attempt."""
    first = write_run(tmp_path / "a", 0.06)
    second = write_run(tmp_path / "b", 0.06)
    write_run(second, 0.12, attempt=1, first_step=41)
    comparison = compare_runs(collect_run_facts(first), collect_run_facts(second))
    (step,) = [term for term in comparison.terms if term.name == "step, mean"]
    assert comparison.speedup == pytest.approx(1 / step.ratio)
    assert comparison.speedup == pytest.approx(0.09 / 0.15, rel=0.02)


def test_runs_whose_steps_vary_much_are_not_called_equally_fast(tmp_path: Path) -> None:
    comparison = RunComparison((), 0.94, 0.70, 1.22, (), ())
    line = list_comparison_lines(comparison, ("a", "b"))[0]
    assert "cannot be told apart" in line
    assert "0.70 to 1.22" in line


def test_the_last_loss_is_that_of_the_last_applied_step(tmp_path: Path) -> None:
    """A step without targets has a loss of 0 that says nothing."""
    run = write_run(tmp_path / "a", 0.06)
    (path,) = (run / "events").iterdir()
    skip = wrap_event_in_envelope(
        StepSkipped(40, "no_targets", 0.0, 0, 1), rank=0, attempt=0, seq=99
    )
    path.write_text(path.read_text().replace('"step":40,"loss":2.0', '"step":40,"loss":0.0'))
    path.write_text(path.read_text() + skip.to_line() + "\n")
    facts = collect_run_facts(run)
    assert facts.steps.loss[-1] == 0
    assert facts.final_loss == (39, 2.0)
    terms = {term.name: term.first for term in compare_runs(facts, facts).terms}
    assert terms["last training loss"] == 2.0


def test_runs_without_steps_are_not_compared_and_nothing_fails(tmp_path: Path) -> None:
    (tmp_path / "empty" / "events").mkdir(parents=True)
    second = collect_run_facts(write_run(tmp_path / "b", 0.06))
    comparison = compare_runs(collect_run_facts(tmp_path / "empty"), second)
    assert "cannot be compared" in list_comparison_lines(comparison, ("empty", "b"))[0]
    assert comparison.to_json()["speedup"] is None


def test_the_command_prints_it_and_refuses_what_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = write_run(tmp_path / "a", 0.09), write_run(tmp_path / "b", 0.06)
    assert run_command_line(["report", str(first), str(second), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "phalanx.run-comparison/1"
    assert not (first / "report.html").exists()
    assert run_command_line(["report", str(first), str(tmp_path)]) == 2
    assert "no run is there" in capsys.readouterr().err


def test_what_could_not_be_read_of_a_run_is_said_beside_it(tmp_path: Path) -> None:
    first, second = write_run(tmp_path / "a", 0.09), write_run(tmp_path / "b", 0.06)
    (second / "events" / "rank-0001-attempt-00.jsonl").mkdir()
    comparison = compare_runs(collect_run_facts(first), collect_run_facts(second))
    gap = "of the second, events/rank-0001-attempt-00.jsonl cannot be read"
    lines = list_comparison_lines(comparison, ("a", "b"))
    assert any(line.startswith(f"note    {gap}") for line in lines)
    assert not any("of the first, events" in line for line in lines)


def test_runs_with_other_units_compare_neither_rates_nor_losses(tmp_path: Path) -> None:
    """The one counts tokens, and the other images with a class each."""
    first = write_run(tmp_path / "a", 0.09, job={"model": {"kind": "decoder"}}, step_tokens=200)
    second = write_run(tmp_path / "b", 0.06, job={"model": {"kind": "vit"}}, num_steps=60)
    comparison = compare_runs(collect_run_facts(first), collect_run_facts(second))
    names = {term.name for term in comparison.terms}
    assert {"step, mean", "wall time"} <= names
    assert not any("/s" in name or "loss" in name for name in names)
    assert (
        "they count tokens and targets, and measure their losses in other units: their rates and"
        " losses are not compared"
    ) in comparison.remarks
    assert not any(
        "their steps are" in text or "last losses" in text for text in comparison.remarks
    )


@pytest.mark.parametrize("lacking", ["a", "ab"])
@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_jobs_that_cannot_be_read_are_not_compared(
    lacking: str, text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job: dict[str, object] = {"model": {"kind": "own:build", "objective": "own:loss"}}
    runs = [write_run(tmp_path / name, 0.06, job=job) for name in ("a", "b")]
    for run in runs:
        if run.name in lacking:
            (run / "job.json").unlink()
            if text is not None:
                (run / "job.json").write_text(text)
    facts = [collect_run_facts(run) for run in runs]
    comparison = compare_runs(*facts)
    assert comparison.changed_keys == ()
    assert comparison.to_json()["has_both_jobs"] is False
    assert ("last training loss" in {term.name for term in comparison.terms}) == (lacking == "ab")
    assert any(remark.startswith("of the first, job.json is not") for remark in comparison.remarks)
    lines = list_comparison_lines(comparison, ("a", "b"))
    assert [line for line in lines if line.startswith("job ")] == [
        "job     cannot be compared: not both can be read"
    ]
    # Of one run alone it is said, too.
    assert any(warning.startswith("job.json is not") for warning in facts[0].warnings)
    assert run_command_line(["report", str(runs[0])]) == 0
    assert "warn    job.json is not" in capsys.readouterr().err


def test_keys_with_dots_have_their_values(tmp_path: Path) -> None:
    """Names of modules, and null beside a key that another release does not write."""
    jobs: list[dict[str, object]] = [
        {"parallel": {"rules": {"blocks.*.mlp.up": "column"}, "chunks": None}},
        {"parallel": {"rules": {"blocks.*.mlp.up": "row"}}},
    ]
    runs = [write_run(tmp_path / str(index), 0.06, job=job) for index, job in enumerate(jobs)]
    comparison = compare_runs(*map(collect_run_facts, runs))
    assert comparison.changed_keys == ("parallel.rules.blocks.*.mlp.up: column -> row",)
