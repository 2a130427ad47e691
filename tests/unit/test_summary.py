"""The last lines of a run: they claim no more than what was predicted and measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.checkpoint.best import record_best_step
from phalanx.cli._app import run_command_line
from phalanx.core.units import format_seconds
from phalanx.observe.bus import Bus
from phalanx.observe.events import (
    Envelope,
    EvalFinished,
    Event,
    InvariantChecked,
    MemoryMeasured,
    RankFailed,
    RestartScheduled,
    RunFinished,
    RunStarted,
    StepFinished,
    StepSkipped,
    wrap_event_in_envelope,
)
from phalanx.observe.words import describe_event
from phalanx.report.end_of_run import list_end_of_run_lines, list_restart_lines
from phalanx.report.page import write_report
from phalanx.report.reduce import collect_run_facts
from phalanx.report.sections.memory import render_memory
from phalanx.report.summary import build_run_json

MIB = 2**20


@pytest.mark.parametrize(
    ("predicted", "said", "on_page"),
    [
        (
            {"parameters": MIB, "activations": 2 * MIB},
            "3.0 MiB predicted, 6.0 MiB measured (the plan was 3.0 MiB too low)",
            0,
        ),
        ({"parameters": MIB}, "1.0 MiB predicted, 6.0 MiB measured (activations not predicted)", 3),
        (
            {"parameters": MIB, "activations": 0},
            "1.0 MiB predicted, 6.0 MiB measured (activations not predicted)",
            3,
        ),
    ],
)
def test_a_sum_that_lacks_the_activations_has_no_error(
    predicted: dict[str, int], said: str, on_page: int, tmp_path: Path
) -> None:
    """As of a user's own module.

    On the page: the rank's sum, and of the details the activations and the sum.
    """
    predicted = predicted | {"peak": sum(predicted.values())}
    bus = Bus(rank=0, run_dir=tmp_path)
    bus.emit(RunStarted("r", "d", 1, 0, 1, "cpu", {}))
    bus.emit(
        MemoryMeasured(
            predicted, {"parameters": MIB, "activations": 4 * MIB, "peak": 6 * MIB}, 100 * MIB
        )
    )
    bus.close()
    (line,) = list_end_of_run_lines(collect_run_facts(tmp_path))
    assert said in line
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert page.count("activations not predicted") == on_page
    assert ("3.0 MiB too low" in page) == (on_page == 0)


@pytest.mark.parametrize(
    ("kind", "is_said"), [("my_model:build", True), ("hf:DIR", False), ("decoder", False)]
)
def test_what_an_own_module_imports_is_said_to_count(
    tmp_path: Path, kind: str, is_said: bool
) -> None:
    """It is imported when training has begun: 56 MiB of scikit-learn were taken for the model's."""
    (tmp_path / "job.json").write_text(json.dumps({"model": {"kind": kind}}))
    bus = Bus(rank=0, run_dir=tmp_path)
    bus.emit(RunStarted("r", "d", 1, 0, 1, "cpu", {}))
    bus.emit(MemoryMeasured({"peak": MIB}, {"peak": 6 * MIB}, 100 * MIB))
    bus.close()
    (line,) = list_end_of_run_lines(collect_run_facts(tmp_path))
    assert ("what your modules import is counted" in line) == is_said


def test_metrics_are_told_wherever_the_loss_is(tmp_path: Path) -> None:
    """In the line of the evaluation, in the last lines, on the page and for programs; the best
    is the best by one."""
    best = {"judged_by": "accuracy", "best_step": 1, "best_loss": 2.0, "best_value": 0.75}
    last = EvalFinished(2, 1.5, 100, 0.1, metrics={"accuracy": 0.5, "top 5": 0.875}, **best)  # type: ignore[arg-type]
    bus = Bus(rank=0, run_dir=tmp_path)
    bus.emit(RunStarted("r", "d", 1, 0, 2, "cpu", {}))
    bus.emit(EvalFinished(1, 2.0, 100, 0.1, metrics={"accuracy": 0.75, "top 5": 0.75}, **best))  # type: ignore[arg-type]
    bus.emit(StepFinished(2, 1.0, 64, 128, 1e-3, 0.5, 0.1, 640.0, {}, 0.1, 2**30))
    bus.emit(last)
    bus.close()
    record_best_step(tmp_path, step=1, loss=2.0, num_targets=100, metric="accuracy", value=0.75)
    line = describe_event(wrap_event_in_envelope(last, rank=0, attempt=0)) or ""
    assert line.startswith(
        "held-out loss 1.5000 nats/token, accuracy 0.5000, top 5 0.8750 at step 2, best 0.7500 at"
        " step 1"
    )
    lines = list_end_of_run_lines(collect_run_facts(tmp_path))
    assert "        accuracy  0.5000" in lines
    assert "        the best was accuracy 0.750, at step 1" in lines
    assert lines[-1].endswith("checkpoints/step-1 (accuracy 0.7500 at step 1)")
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "best accuracy 0.7500 at step 1; accuracy 0.5000; top 5 0.8750" in page
    assert "held-out 0.8750" in page, "a curve of its own"
    facts = build_run_json(collect_run_facts(tmp_path))
    assert [evaluation["metrics"]["accuracy"] for evaluation in facts["evaluations"]] == [0.75, 0.5]
    assert (facts["best"]["step"], facts["best"]["metric"], facts["best"]["value"]) == (
        1,
        "accuracy",
        0.75,
    )


@pytest.mark.parametrize(
    ("applied", "said"),
    [
        (
            (False, False),
            (
                "warning no step was applied, the weights are those it began with: each of the 2"
                " steps had no targets"
            ),
        ),
        ((True, False), "warning 1 of 2 steps was not applied: 1 had no targets"),
        ((True, True), None),
    ],
)
def test_a_run_that_applied_no_step_or_few_says_so(
    applied: tuple[bool, ...],
    said: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And its final loss is that of the last step that was applied, not the 0 of one without
    targets."""
    bus = Bus(rank=0, run_dir=tmp_path)
    bus.emit(RunStarted("r", "d", 1, 0, 2, "cpu", {}))
    for step, is_applied in enumerate(applied, 1):
        if not is_applied:
            bus.emit(StepSkipped(step, "no_targets", 0.0, 0, 1))
        loss = 3.5 if is_applied else 0.0
        bus.emit(StepFinished(step, loss, 0, 0, 1e-3, 0.0, 0.1, 0.0, {}, 0.0, 0))
    bus.emit(RunFinished("finished", 0, 2, 1.0))
    bus.close()
    assert [
        line
        for line in list_end_of_run_lines(collect_run_facts(tmp_path))
        if line.startswith("warning")
    ] == ([said] if said else [])
    facts = build_run_json(collect_run_facts(tmp_path))
    assert facts["final_loss"] == (3.5 if applied[-1] or applied[0] else None)
    assert run_command_line(["report", str(tmp_path)]) == 0
    assert (str(said).removeprefix("warning ") in capsys.readouterr().out) == (said is not None)
    warnings = [text for text in facts["warnings"] if ".json" not in text]
    assert [f"warning {text}" for text in warnings] == ([said] if said else [])


@pytest.mark.parametrize(
    ("sent", "said"), [(2**20, "1.0 MiB a step, 25 % of what fp32 sends"), (2**22, None)]
)
def test_compressed_gradients_are_told_in_bytes(
    sent: int, said: str | None, tmp_path: Path
) -> None:
    """In the last lines where it is not what everybody sends; on the page and for programs
    always."""
    bus = Bus(rank=0, run_dir=tmp_path)
    bus.emit(RunStarted("train", "", 2, 0, 2, "cpu", {"dp_replicate": 2}, plain_bytes=2**22))
    for step in (1, 2):
        bus.emit(
            StepFinished(
                step, 1.0, 64, 64 * step, 1e-3, 0.5, 0.1, 640.0, {}, 0.1, 2**30, sent_bytes=sent
            )
        )
    bus.close()
    lines = [
        line
        for line in list_end_of_run_lines(collect_run_facts(tmp_path))
        if line.startswith("wire")
    ]
    assert lines == ([f"wire    gradients {said}"] if said else [])
    assert build_run_json(collect_run_facts(tmp_path))["sent_bytes_per_step"] == sent
    assert "Gradients sent" in write_report(tmp_path).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("axis", "noun"),
    [
        ("tp", "activations"),
        ("cp", "keys and values"),
        ("ep", "rows of experts"),
        ("pp", "hidden states"),
    ],
)
def test_what_goes_over_an_axis_is_told_and_nothing_where_nobody_counts(
    axis: str, noun: str, tmp_path: Path
) -> None:
    for sent, line in ((3 * 2**20, [f"wire    {noun} over {axis} 3.0 MiB a step"]), (0, [])):
        run_dir = tmp_path / str(sent)
        bus = Bus(rank=0, run_dir=run_dir)
        bus.emit(RunStarted("train", "", 2, 0, 2, "cpu", {axis: 2}))
        step = StepFinished(1, 1.0, 64, 64, 1e-3, 0.5, 0.1, 640.0, {}, 0.1, 2**30)
        bus.emit(replace(step, **{f"sent_{axis}_bytes": sent}))
        bus.close()
        assert [
            one
            for one in list_end_of_run_lines(collect_run_facts(run_dir))
            if one.startswith("wire")
        ] == line
        assert build_run_json(collect_run_facts(run_dir))[f"sent_{axis}_bytes_per_step"] == (
            sent or None
        )
        page = write_report(run_dir).read_text(encoding="utf-8")
        assert (f"Sent over {axis}" in page) == bool(sent)


def test_a_run_says_how_often_it_was_started_again_and_why(tmp_path: Path) -> None:
    bus = Bus(rank=-1, run_dir=tmp_path)

    def fail(step: int, detail: str, number: int) -> None:
        bus.emit(RankFailed(1, step, "forward", "exception", detail, 0.1))
        bus.emit(RestartScheduled(number, 3, 0))

    fail(2, "of an earlier command", 1)
    fail(12, "ValueError: no", 1)
    bus.close()
    assert list_restart_lines(tmp_path, 0) == []
    assert list_restart_lines(tmp_path, 1) == [
        "again   the ranks were started again once, after rank 1 at step 12: ValueError: no"
    ]
    bus = Bus(rank=-1, run_dir=tmp_path)
    fail(12, "ValueError: no", 2)
    fail(15, "killed by SIGKILL", 3)
    bus.close()
    assert list_restart_lines(tmp_path, 3) == [
        "again   the ranks were started again 3 times, after rank 1 at step 12: ValueError: no (2"
        " times); rank 1 at step 15: killed by SIGKILL"
    ]


@pytest.mark.parametrize(
    ("step_time", "said"),
    [
        (
            {"terms": {"ideal": 0.11}, "low_s": 0.09, "high_s": 0.12},
            "110 ms predicted, 100 ms measured (median of 8 steps; the plan was 10 % too high;",
        ),
        ({"terms": {"ideal": 0.05}, "low_s": 0.04, "high_s": 0.06}, "50 % too low; outside its 80"),
        (None, ""),
        ({"terms": "damaged"}, ""),
    ],
)
def test_predicted_time_stands_beside_what_steps_took(
    step_time: object, said: str, tmp_path: Path
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"step_time": step_time}))
    bus = Bus(rank=0, run_dir=tmp_path)
    for step in range(1, 12):
        # The first steps warm up.
        seconds = 5.0 if step <= 3 else 0.1
        bus.emit(StepFinished(step, 1.0, 10, 10, 1e-3, 1.0, seconds, 100.0, {}, 0.0, 1))
    bus.close()
    lines = [
        line
        for line in list_end_of_run_lines(collect_run_facts(tmp_path))
        if line.startswith("time ")
    ]
    assert len(lines) == bool(said)
    assert said in "".join(lines)


def test_the_last_lines_name_the_rank_with_the_highest_peak_and_whose_memory_grows(
    tmp_path: Path,
) -> None:
    """Each rank measures itself, in a file of its own."""
    for rank in (0, 1):
        bus = Bus(rank=rank, run_dir=tmp_path)
        bus.emit(RunStarted("r", "d", 2, rank, 400, "cpu", {"dp_replicate": 2}))
        for number in range(1, 401):
            step = StepFinished(number, 1.0, 10, 10, 1e-3, 1.0, 0.1, 100.0, {}, 0.0, 1)
            bus.emit(replace(step, own_bytes=1000 * MIB + rank * 3 * MIB * number))
        measured = {"peak": (2 + 1200 * rank) * MIB}
        bus.emit(MemoryMeasured({"activations": 1, "peak": 12 * MIB}, measured, MIB))
        bus.close()
    lines = list_end_of_run_lines(collect_run_facts(tmp_path))
    (memory,) = [line for line in lines if line.startswith("memory")]
    assert memory.startswith("memory  peak of rank 1: 12.0 MiB predicted, 1.2 GiB measured")
    (warning,) = [line for line in lines if line.startswith("warning")]
    assert warning.startswith("warning memory of rank 1 grows and grows: 3 MiB a step")


@pytest.mark.parametrize(("phase", "is_of_plan"), [("backward", True), ("evaluate", False)])
def test_a_plan_is_not_wrong_about_what_it_has_not(
    tmp_path: Path, phase: str, is_of_plan: bool
) -> None:
    bus = Bus(rank=0, run_dir=tmp_path)
    predicted, measured = {"activations": 1, "peak": 16 * MIB}, {"peak": 54 * MIB}
    bus.emit(MemoryMeasured(predicted, measured, MIB, 40, phase))
    bus.close()
    lines = list_end_of_run_lines(collect_run_facts(tmp_path))
    (memory,) = [line for line in lines if line.startswith("memory")]
    assert ("too low" in memory) is is_of_plan
    assert ("steps of training alone, and no phase evaluate" in memory) is not is_of_plan
    note = "evaluations and the sample are in the measured peak"
    assert (note in render_memory(collect_run_facts(tmp_path))) is not is_of_plan


def test_the_wall_of_a_run_is_that_of_all_its_commands(tmp_path: Path) -> None:
    """The first was killed and reported no duration; what the last reports is its own."""
    for attempt, seconds in ((0, range(100, 190, 10)), (1, range(300, 330, 10))):
        told: list[Event] = [RunStarted("r", "d", 1, 0, 20, "cpu", {})]
        step = StepFinished(1, 1.0, 10, 10, 1e-3, 1.0, 0.1, 100.0, {}, 0.0, 1)
        told += [replace(step, step=attempt * 10 + each) for each in range(1, len(seconds) - 1)]
        if attempt == 1:
            told.append(RunFinished("finished", 0, 11, 25.0))
        lines = [
            Envelope(event, 0, attempt, 1e9 + at, seq=number, monotonic_s=float(at)).to_line()
            for number, (event, at) in enumerate(zip(told, seconds, strict=False))
        ]
        (tmp_path / "events").mkdir(exist_ok=True)
        path = tmp_path / "events" / f"rank-0000-attempt-{attempt:02d}.jsonl"
        path.write_text("\n".join(lines) + "\n")
    facts = collect_run_facts(tmp_path)
    assert facts.wall_s == facts.ledger.wall_s == pytest.approx(70.0 + 25.0)


def test_skipped_steps_are_no_goodput(tmp_path: Path) -> None:
    bus = Bus(rank=0, run_dir=tmp_path)
    bus.emit(RunStarted("r", "d", 1, 0, 4, "cpu", {}))
    for step in range(1, 5):
        if step > 1:
            bus.emit(StepSkipped(step, "nonfinite_gradients", 0.0, 0, 1))
        bus.emit(StepFinished(step, 1.0, 10, 10, 1e-3, 0.0, 0.5, 20.0, {"data": 0.1}, 0.4, 0))
    bus.close()
    ledger = collect_run_facts(tmp_path).ledger
    assert ledger.good_s == pytest.approx(0.4)
    assert ledger.parts_s["skipped steps"] == pytest.approx(3 * 0.4)
    assert sum(ledger.parts_s.values()) == pytest.approx(ledger.wall_s)
    assert "skipped steps" in write_report(tmp_path).read_text(encoding="utf-8")


def test_the_measured_step_is_that_of_the_newest_attempt_in_the_layout_of_the_plan(
    tmp_path: Path,
) -> None:
    """A run that went on elsewhere, or with fewer ranks, has steps of several kinds."""
    plan = {
        "layout": {"dp_replicate": 2, "tp": 1},
        "step_time": {"terms": {"ideal": 0.1}, "total_s": 0.1, "low_s": 0.05, "high_s": 0.2},
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    for attempt, (degree, step_s) in enumerate(((2, 9.0), (2, 0.1), (1, 0.4))):
        bus = Bus(rank=0, run_dir=tmp_path, attempt=attempt)
        bus.emit(RunStarted("r", "d", degree, 0, 99, "cpu", {"dp_replicate": degree, "tp": 1}))
        for step in range(10 * attempt + 1, 10 * attempt + 11):
            bus.emit(StepFinished(step, 3.0, 1, 1, 1e-3, 0.0, step_s, 1.0, {}, 0.0, 0))
        bus.close()
        lines = list_end_of_run_lines(collect_run_facts(tmp_path))
        measured = [line for line in lines if line.startswith("time ")]
        if degree == 2:
            (line,) = measured
            assert f"{format_seconds(step_s)} measured" in line
        else:
            assert not measured


def test_a_failed_check_of_any_rank_is_in_the_last_lines(tmp_path: Path) -> None:
    """Each rank tells of its own memory, in its own file."""
    for rank in (0, 1):
        bus = Bus(rank=rank, run_dir=tmp_path)
        if rank == 0:
            bus.emit(RunStarted("r", "d", 1, 0, 2, "cpu", {}))
        else:
            bus.emit(InvariantChecked(6, "memory_unchanged", False, num_failed=1, ranks=[rank]))
        bus.close()
    (line,) = list_end_of_run_lines(collect_run_facts(tmp_path))
    assert line.startswith("warning check failed: step 6: ")
    assert line.endswith("on rank 1")
