"""What is read out of the spans of a pipeline: the reference is the simulation that the spans
were made with."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.recorded_steps import write_run

from phalanx.core.errors import LayoutError
from phalanx.job.schema import Job
from phalanx.observe.events import PipelineMeasured, wrap_event_in_envelope
from phalanx.observe.tail import parse_valid_event_line
from phalanx.plan.cluster import Cluster
from phalanx.plan.pipeline.bubble import MAX_BUBBLE_WITHOUT_WARNING
from phalanx.plan.pipeline.cut import StageCut
from phalanx.plan.pipeline.generate import SCHEDULE_NAMES, get_default_stages_per_rank
from phalanx.plan.pipeline.pipeline_plan import Pipeline, build_named_pipeline
from phalanx.plan.pipeline.simulate import StageCosts, Timeline, simulate_timeline
from phalanx.plan.pipeline.trace import (
    build_measured_timeline,
    compute_mean_stage_costs,
    has_split_backward,
    scale_timeline_to_measurement,
    sum_forward_backward_s,
)
from phalanx.plan.planner import make_plan
from phalanx.report.bottleneck.of_run import judge_run
from phalanx.report.bubble import MeasuredPipeline, parse_pipeline_of_plan
from phalanx.train.pipeline_record import (
    align_rank_clocks,
    build_pipeline_event,
    should_record_pipeline,
)

Spans = list[list[tuple[str, float, float]]]
EVEN = StageCosts(0.010, 0.012, 0.008)


def spans_of(timeline: Timeline, zero_s: float = 0.0) -> Spans:
    return [
        [
            (str(action), zero_s + float(begin), zero_s + float(end))
            for action, (begin, end) in zip(*row, strict=True)
        ]
        for row in zip(timeline.schedule.actions, timeline.spans_s, strict=True)
    ]


def pipeline(
    name: str = "1f1b",
    num_ranks: int = 4,
    num_microbatches: int = 8,
    costs: Sequence[StageCosts] | None = None,
) -> Pipeline:
    num_stages = num_ranks * get_default_stages_per_rank(name)
    given = tuple(costs if costs is not None else [EVEN] * num_stages)
    return build_named_pipeline(
        name, num_ranks, num_microbatches, StageCut((2,) * num_stages), costs=given
    )


def measured(
    planned: Pipeline, costs: Sequence[StageCosts], send_s: float = 0.0, step: int = 5
) -> PipelineMeasured:
    return build_pipeline_event(
        step, planned, spans_of(simulate_timeline(planned.schedule(), costs, send_s), 17.0)
    )


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_what_was_simulated_is_measured(name: str) -> None:
    """Stages of uneven costs: the same bubble, measured and predicted; whole backwards have no
    second half."""
    planned = pipeline(name)
    draw = random.Random(name)
    costs = [
        StageCosts(draw.uniform(1, 2), draw.uniform(1, 2), draw.uniform(1, 2))
        for _ in planned.costs
    ]
    timeline = simulate_timeline(planned.schedule(), costs)
    event = measured(planned, costs)
    assert event.bubble_measured == pytest.approx(float(timeline.bubble), abs=1e-9)
    assert event.bubble_predicted == pytest.approx(float(timeline.bubble), abs=1e-9)
    assert event.bubble_planned == pytest.approx(float(planned.timeline().bubble))  # type: ignore[union-attr]
    assert event.splits_backward == (name in ("interleaved-zero-bubble", "zb-v", "dualpipe-v"))
    for (forward_s, input_s, weight_s), cost in zip(event.stage_seconds, costs, strict=True):
        assert forward_s == pytest.approx(cost.forward_s)
        if event.splits_backward:
            assert (input_s, weight_s) == pytest.approx(
                (cost.backward_input_s, cost.backward_weight_s)
            )
        else:
            assert (input_s, weight_s) == pytest.approx(
                (cost.backward_input_s + cost.backward_weight_s, 0.0)
            )


def test_sending_is_measured_and_not_predicted() -> None:
    planned = pipeline()
    slow, fast = measured(planned, planned.costs, send_s=0.004), measured(planned, planned.costs)
    assert slow.bubble_measured > fast.bubble_measured + 0.05
    assert slow.bubble_predicted == pytest.approx(fast.bubble_predicted)
    assert fast.bubble_predicted == pytest.approx(3 / 11)  # (p - 1) / (m + p - 1)


def test_a_stage_that_splits_some_backwards_keeps_all_their_seconds() -> None:
    """Whole ones that are faster than two halves: DualPipe-V has both."""
    spans = [
        [
            ("0F0", 0.0, 1.0),
            ("0B0", 1.0, 2.0),
            ("0F1", 2.0, 3.0),
            ("0I1", 3.0, 4.0),
            ("0W1", 4.0, 7.0),
        ]
    ]
    timeline = build_measured_timeline("own", spans)
    assert has_split_backward(timeline.schedule)
    (cost,) = compute_mean_stage_costs(timeline)
    assert (cost.forward_s, cost.backward_input_s, cost.backward_weight_s) == pytest.approx(
        (1.0, 0.625, 1.875)
    )
    assert sum_forward_backward_s(cost) * 2 == pytest.approx(7.0)


def test_zero_is_the_first_action_of_any_rank() -> None:
    spans: Spans = [[("0F0", 105.0, 106.0)], [("1F0", 104.0, 107.5)]]
    assert build_measured_timeline("own", spans).spans_s == (((1.0, 2.0),), ((0.0, 3.5),))


@pytest.mark.parametrize(
    "spans",
    [
        [], [[]], [[("0F0", 2.0, 1.0)]], [[("0F0", math.nan, 1.0)]], [[("1F0", 0.0, 1.0)]], [[("F", 0.0, 1.0)]],
        [["0F0"]],
        [[(3, 0.0, 1.0)]], [[("0F0", "a", 1.0)]], [3], [[("0F0", None, 1.0)]],
    ],
)  # fmt: skip
def test_what_is_no_step_is_refused(spans: Any) -> None:
    with pytest.raises(LayoutError):
        build_measured_timeline("own", spans)


def test_the_plan_is_shown_at_the_speed_that_was_measured() -> None:
    """Its costs are on any scale; the mean of the stages is then the measured one, and the
    bubble stays the plan's."""
    costs = [StageCosts(1, 1, 1), StageCosts(2, 2, 2), StageCosts(1, 1, 1), StageCosts(1, 1, 1)]
    planned = pipeline(costs=costs)
    found = scale_timeline_to_measurement(planned, [StageCosts(0.01, 0.02, 0.0)] * 4)
    assert found is not None
    assert sum(map(sum_forward_backward_s, compute_mean_stage_costs(found))) == pytest.approx(
        4 * 0.03
    )
    assert float(found.bubble) == pytest.approx(float(planned.timeline().bubble))  # type: ignore[union-attr]
    assert scale_timeline_to_measurement(pipeline(costs=()), [EVEN] * 4) is None
    with pytest.raises(LayoutError, match="3 stages were measured"):
        scale_timeline_to_measurement(planned, [EVEN] * 3)


def test_steps_that_are_recorded() -> None:
    assert [step for step in range(1, 6001) if should_record_pipeline(step, 6000)] == [
        5,
        50,
        500,
        5000,
        6000,
    ]
    assert [step for step in range(1, 4) if should_record_pipeline(step, 3)] == [3]


def test_clocks_of_several_machines_start_when_ranks_left_a_reduction() -> None:
    """One machine: as they are.

    Two machines: their clocks have nothing in common, and the reduction has.
    """
    here = {"clock": "a", "zero_s": 10.0, "spans": [["0F0", 7.0, 8.0]]}
    there = {"clock": "b", "zero_s": 1010.0, "spans": [["1F0", 1008.0, 1009.0]]}
    assert align_rank_clocks([here, there]) == [[("0F0", -3.0, -2.0)], [("1F0", -2.0, -1.0)]]
    assert align_rank_clocks([here, {**there, "clock": "a"}]) == [
        [("0F0", 7.0, 8.0)],
        [("1F0", 1008.0, 1009.0)],
    ]


def test_the_event_survives_its_file() -> None:
    event = measured(pipeline("zb-v", 2, 4, costs=()), [EVEN] * 4)
    back = parse_valid_event_line(
        wrap_event_in_envelope(event, rank=0, attempt=0).to_line().encode()
    )
    assert back is not None
    assert isinstance(back.event, PipelineMeasured)
    assert math.isnan(back.event.bubble_planned), "a plan without costs said nothing"
    assert build_measured_timeline("zb-v", back.event.spans) == build_measured_timeline(
        "zb-v", event.spans
    )
    assert back.event.stage_seconds == event.stage_seconds
    assert back.event.in_flight == event.in_flight


# --- what to do -----------------------------------------------------------------------------------


def judged(
    planned: Pipeline,
    costs: Sequence[StageCosts],
    *,
    micro_batch_size: int = 4,
    send_s: float = 0.0,
) -> MeasuredPipeline:
    plan = {"pipeline": planned.to_json(), "micro_batch_size": micro_batch_size}
    plan["num_microbatches"] = planned.num_microbatches
    found = MeasuredPipeline.from_event(measured(planned, costs, send_s), plan, Path("runs/a"))
    assert found is not None
    return found


def test_a_short_bubble_of_even_stages_asks_for_nothing() -> None:
    found = judged(pipeline(num_microbatches=16), [EVEN] * 4)  # 3 / 19
    assert (
        found.describe_wait() == "ranks wait 15.8 % of the step for other stages (predicted 15.8 %)"
    )
    assert not found.has_long_bubble
    assert found.suggest_remedies() == []


def test_a_long_bubble_asks_for_the_least_number_of_microbatches_that_mends_it() -> None:
    """(p - 1) / (m + p - 1): 3/11 with 8, and 3/19 with 16, which is the next number that
    divides 32 samples."""
    found = judged(pipeline(), [EVEN] * 4)
    assert found.event.bubble_measured == pytest.approx(3 / 11)
    assert found.event.bubble_measured > MAX_BUBBLE_WITHOUT_WARNING
    first, second = found.suggest_remedies()
    assert (
        first
        == "16 microbatches instead of 8 (train.micro_batch_size=2) would bring the wait to about"
        " 15.8 %."
    )
    assert second.startswith('parallel.schedule="interleaved"')
    assert second.endswith("about 15.8 %.")  # (p - 1) / (v m + p - 1)
    of_one_sample, _ = judged(pipeline(), [EVEN] * 4, micro_batch_size=1).suggest_remedies()
    assert of_one_sample.startswith(
        "16 microbatches instead of 8 (a train.global_batch_size 2 times as large)"
    )


def test_the_gain_of_more_microbatches_is_that_of_the_steps_with_less_waiting(
    tmp_path: Path,
) -> None:
    """With 16 microbatches for 8 ranks wait half as long for a second of work: 3/16 for 3/8."""
    planned, waited_s = pipeline(), 0.060
    found = judged(planned, [EVEN] * 4)
    assert found.more_microbatches is not None
    assert found.shrink_wait(found.more_microbatches) == pytest.approx(0.5)
    event = measured(planned, [EVEN] * 4)
    run = write_run(tmp_path / "run", {-1: {"pipeline": waited_s}}, more=(event,))
    plan: dict[str, Any] = {
        "pipeline": planned.to_json(), "layout": {"pp": 4}, "device": "cpu", "world_size": 4,
        "micro_batch_size": 4, "num_microbatches": 8, "global_batch_size": 32,
    }  # fmt: skip
    verdict = judge_run(run, plan)
    assert verdict is not None
    cause = verdict.main
    assert cause is not None
    assert cause.kind == "bubble"
    step_s = verdict.mean_step_s
    (gain,) = cause.gains
    assert (gain.setting, gain.limit) == ("train.micro_batch_size=2", "at most")
    assert gain.speedup == pytest.approx(step_s / (step_s - waited_s / 2), abs=0.01)
    assert f"train.micro_batch_size=2: at most {gain.speedup:.2f} x" in cause.action
    # Of one sample: only a larger batch has more of them.
    verdict = judge_run(run, plan | {"micro_batch_size": 1, "global_batch_size": 8})
    assert verdict is not None
    assert verdict.main is not None
    assert verdict.main.gains[0].setting == "train.global_batch_size=16"


def test_a_slow_stage_is_named_and_the_rest_is_said_of_even_ones() -> None:
    slow = StageCosts(0.02, 0.024, 0.016)
    found = judged(pipeline(), [EVEN, EVEN, slow, EVEN])
    assert found.slowest_stage == (2, pytest.approx(1.6))
    recut, more, _ = found.suggest_remedies()
    assert recut.startswith("Stage 2 is the slowest, at 1.60 times the mean of all")
    assert recut.endswith("phalanx plan JOB.toml --recut runs/a.")
    assert "the wait of even stages to about 15.8 %" in more
    few = judged(pipeline(num_microbatches=64), [EVEN, EVEN, StageCosts(0.012, 0.014, 0.010), EVEN])
    assert not few.has_long_bubble
    (only,) = few.suggest_remedies()
    assert only.startswith("Stage 2 is the slowest"), "worth a cut even where ranks wait little"


def test_what_neither_schedule_nor_stages_explain_is_said() -> None:
    found = judged(pipeline(), [EVEN] * 4, send_s=0.004)
    assert "follows from neither schedule nor stages" in found.suggest_remedies()[-1]
    assert not any("neither" in line for line in judged(pipeline(), [EVEN] * 4).suggest_remedies())


def test_a_schedule_of_ones_own_gets_no_numbers_it_cannot_have() -> None:
    named = pipeline()
    rows = tuple(",".join(map(str, row)) for row in named.schedule().actions)
    own = Pipeline("file", 4, 8, named.stages, named.rank_of_stage, rows, named.costs)
    assert judged(own, [EVEN] * 4).suggest_remedies() == [
        "More microbatches, or fewer pipeline ranks (parallel.pp), make it shorter."
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"num_microbatches": 10**9}, {"rank_of_stage": [0, 1]}, {"stages": {}}, {"stages": {"num_blocks": [2]}},
        {"rows": ["x"]},
        {"costs": [[1]]}, {"costs": [[1, 1, 1]]}, {"schedule_name": "none"}, {"num_ranks": 0}, {"num_ranks": "4"},
        {"rank_of_stage": None}, {"costs": [["a", 1, 1]] * 4}, {"num_microbatches": -1},
    ],
)  # fmt: skip
def test_a_plan_of_any_shape_is_no_crash(change: dict[str, Any]) -> None:
    assert parse_pipeline_of_plan({"pipeline": pipeline().to_json()}) is not None
    assert parse_pipeline_of_plan({"pipeline": pipeline().to_json() | change}) is None
    assert parse_pipeline_of_plan({"pipeline": [1]}) is None


def test_an_event_of_other_stages_is_not_judged() -> None:
    event = measured(pipeline(), [EVEN] * 4)
    assert (
        MeasuredPipeline.from_event(event, {"pipeline": pipeline(num_ranks=2).to_json()}, Path("a"))
        is None
    )
    assert MeasuredPipeline.from_event(None, {"pipeline": pipeline().to_json()}, Path("a")) is None
    assert MeasuredPipeline.from_event(event, {}, Path("a")) is None


@pytest.mark.parametrize(("layers", "wanted"), [(8, "parallel.stage_blocks=[5, 3]"), (2, None)])
def test_another_cut_is_advised_where_it_is_better(
    layers: int, wanted: str | None, tmp_path: Path
) -> None:
    """A second stage that takes twice as long: of four blocks one can move, of a single one
    none."""
    train = {"global_batch_size": 32}
    job = Job.model_validate(
        {"model": {"num_layers": layers}, "train": train, "parallel": {"pp": 2, "ranks": 2}}
    )
    found = make_plan(job, cluster=Cluster("cpu", 8, 2**36), vocab_size=300)
    (tmp_path / "job.json").write_text(json.dumps(job.to_json()))
    assert found.pipeline is not None
    slow = StageCosts(0.020, 0.024, 0.016)
    event = measured(found.pipeline, [EVEN, slow])
    read = MeasuredPipeline.from_event(event, json.loads(json.dumps(found.to_json())), tmp_path)
    assert read is not None
    advice = " ".join(read.suggest_remedies())
    assert ("slowest" in advice) == (wanted is not None)
    if wanted is not None:
        assert wanted in advice
