"""The pipeline on the page of a run, in its last lines, on the console and for programs: all say
the same numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from test_pipeline_measured import EVEN, measured, pipeline
from test_report import EVIL, Page, Run, page_of, step

from phalanx.observe import events
from phalanx.observe.events import wrap_event_in_envelope
from phalanx.observe.words import describe_event
from phalanx.plan.pipeline.pipeline_plan import Pipeline
from phalanx.plan.pipeline.simulate import StageCosts
from phalanx.report.end_of_run import list_end_of_run_lines
from phalanx.report.reduce import collect_run_facts
from phalanx.report.summary import build_run_json

LAYOUT = {"pp": 4, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "ep": 1}
PLAN_COSTS = [StageCosts(3, 3, 3)] * 4


def piped(
    tmp_path: Path, planned: Pipeline, steps: dict[int, Sequence[StageCosts]] | None = None
) -> Run:
    run = Run(tmp_path)
    run.say(events.RunStarted("r", "d", 4, 0, 50, "cpu", LAYOUT))
    for number in (1, 2):
        for rank in range(4):
            phases_s = {"forward": 0.03, "backward": 0.04, "pipeline": 0.01 * (rank + 1)}
            run.say(replace(step(number), phases_s=phases_s, unaccounted_s=0.0), rank=rank)
    for number, costs in (steps or {}).items():
        run.say(measured(planned, costs, step=number))
    plan = {
        "layout": LAYOUT,
        "pipeline": planned.to_json(),
        "micro_batch_size": 2,
        "num_microbatches": 8,
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    return run


def section(page: Page) -> str:
    found = re.search(r'<section id="pipeline">(.*?)</section>', page.source, re.DOTALL)
    return found[1] if found else ""


def test_planned_above_measured_with_a_verdict(tmp_path: Path) -> None:
    slow = StageCosts(0.020, 0.024, 0.016)
    run = piped(tmp_path, pipeline(costs=PLAN_COSTS), {5: [EVEN] * 4, 50: [EVEN, slow, EVEN, EVEN]})
    page = page_of(run)
    shown = section(page)
    event = collect_run_facts(tmp_path).pipelines[-1]
    share = f"{100 * event.bubble_measured:.1f} %"
    assert f"At step 50 ranks wait {share} of the step" in page.text.replace("\u00a0", " ")
    assert (
        "The plan said 27.3 %. That is more than 20 %. Before: 27.3 % at step 5."
        in page.text.replace("\u00a0", " ")
    )
    slowest = (
        "Stage 1 is the slowest, at 1.60 times the mean of all: cut the model again by what was"
        " measured, "
    )
    assert f"{slowest}phalanx plan JOB.toml --recut {tmp_path}." in page.text
    rows = re.findall(r'aria-label="rank (\d), (\w+): idle', shown)
    assert rows == [(str(rank), name) for rank in range(4) for name in ("planned", "measured")]
    assert "scaled so that their mean is the mean that was measured" in page.text
    # planned on the scale of what was measured: each of the four stages takes the mean of 30, 60,
    # 30 and 30 ms
    boxes = re.findall(r'title="(0F0: [^"]*)"', shown)
    assert boxes == [
        "0F0: forward of microbatch 0 in stage 0, 12.5 ms",
        "0F0: forward of microbatch 0 in stage 0, 10.0 ms",
    ]
    cells = ["1", "1", "2", "20.0 ms", "40.0 ms", "60.0 ms", "1.60", "3", "3"]
    assert "".join(f"<td>{cell}</td>" for cell in cells) in shown


def test_before_a_step_was_measured_the_plan_stands_alone(tmp_path: Path) -> None:
    page = page_of(piped(tmp_path, pipeline(costs=PLAN_COSTS)))
    assert "Planned: ranks wait 27.3 % of the step for other stages" in page.text.replace(
        "\u00a0", " "
    )
    assert re.findall(r'aria-label="rank (\d): idle', section(page)) == ["0", "1", "2", "3"]
    assert "% of the step, from its first action" in page.text, "costs of a plan have no unit"
    assert not re.search(r"\bm?s\b", re.sub("<[^>]*>", " ", section(page)))


def test_without_costs_and_measurement_there_is_nothing_to_draw(tmp_path: Path) -> None:
    page = page_of(piped(tmp_path, pipeline(costs=())))
    assert "How long its stages take was not predicted either" in page.text
    assert "lanes" not in section(page)


def test_without_costs_the_schedule_is_simulated_with_what_was_measured(tmp_path: Path) -> None:
    page = page_of(piped(tmp_path, pipeline(costs=()), {5: [EVEN] * 4}))
    assert "the plan had no costs of its own" in page.text
    assert "The plan said" not in page.text


def test_other_runs_have_no_such_section(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.start()
    run.steps([1])
    page = page_of(run)
    assert section(page) == ""
    assert "#pipeline" not in page.attributes("href")
    assert build_run_json(collect_run_facts(tmp_path))["pipeline"] is None
    assert "stages" not in page.text


@pytest.mark.parametrize("spans", [[], [[["0F0", 1, 0]]], [[[EVIL, 0, 1]]], [[["0F0", 0, 1]]]])
def test_an_event_of_any_shape_leaves_the_plan(
    tmp_path: Path, spans: list[list[list[object]]]
) -> None:
    planned = pipeline(costs=PLAN_COSTS)
    run = piped(tmp_path, planned)
    run.say(replace(measured(planned, [EVEN] * 4), spans=spans))
    page = page_of(run)
    assert re.findall(r'aria-label="rank (\d): idle', section(page)) == ["0", "1", "2", "3"]
    assert EVIL not in page.source


@pytest.mark.parametrize(
    "body", [{}, {"stages": EVIL}, {"num_ranks": 10**9, "num_microbatches": 10**9}]
)
def test_a_pipeline_of_any_shape_is_said_to_be_one(tmp_path: Path, body: dict[str, object]) -> None:
    run = piped(tmp_path, pipeline())
    (tmp_path / "plan.json").write_text(json.dumps({"layout": LAYOUT, "pipeline": body}))
    assert "has a pipeline that cannot be shown" in page_of(run).text


def test_waiting_for_another_stage_is_a_phase_of_its_own(tmp_path: Path) -> None:
    run = piped(tmp_path, pipeline())
    facts = collect_run_facts(tmp_path)
    assert [rank.mean_groups_s["pipeline"] for rank in facts.ranks] == pytest.approx(
        [0.01, 0.02, 0.03, 0.04]
    )
    assert facts.ledger.parts_s["waiting for other stages"] == pytest.approx(2 * 0.01), (
        "of rank 0, whose ledger it is"
    )
    assert sum(facts.ledger.parts_s.values()) == pytest.approx(facts.ledger.wall_s)
    assert (
        "Most of a step of rank 0 is backward 40.0 %, forward 30.0 %, pipeline 10.0 %"
        in page_of(run).text
    )


def test_everybody_says_the_same(tmp_path: Path) -> None:
    """Last lines, console and JSON."""
    planned = pipeline(costs=PLAN_COSTS)
    piped(tmp_path, planned, {5: [EVEN] * 4, 50: [EVEN] * 4})
    lines = [
        line
        for line in list_end_of_run_lines(collect_run_facts(tmp_path))
        if line.startswith(("bubble", "        "))
    ]
    assert (
        lines[0]
        == "bubble  ranks wait 27.3 % of the step for other stages (predicted 27.3 %), at step 50:"
        " more than 20 %"
    )
    assert (
        lines[1]
        == "        16 microbatches instead of 8 (train.micro_batch_size=1) would bring the wait to"
        " about 15.8 %."
    )
    said = describe_event(
        wrap_event_in_envelope(collect_run_facts(tmp_path).pipelines[-1], rank=0, attempt=0)
    )
    assert (
        said
        == "1f1b: ranks wait 27.3 % of step 50 for other stages (predicted 27.3 %, planned 27.3 %)"
    )
    facts = build_run_json(collect_run_facts(tmp_path))["pipeline"]
    assert facts["step"] == 50
    assert facts["bubble_measured"] == pytest.approx(3 / 11)
    assert facts["in_flight"] == [4, 3, 2, 1]


def test_a_short_bubble_is_one_line(tmp_path: Path) -> None:
    planned = pipeline(num_microbatches=16, costs=PLAN_COSTS)
    piped(tmp_path, planned, {5: [EVEN] * 4})
    assert list_end_of_run_lines(collect_run_facts(tmp_path)) == [
        "bubble  ranks wait 15.8 % of the step for other stages (predicted 15.8 %), at step 5",
        "bounds  the evidence does not suffice: 0 steps after the first ones; it takes 10",
    ]
