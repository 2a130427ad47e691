"""The simulated step against closed forms, in fractions, so that equal means equal."""

from __future__ import annotations

import json
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import LayoutError
from phalanx.plan.pipeline.closed_forms import closed_form_bubble, closed_form_idle_s
from phalanx.plan.pipeline.cut import StageCut
from phalanx.plan.pipeline.execution import find_execution_order
from phalanx.plan.pipeline.generate import generate_schedule
from phalanx.plan.pipeline.pipeline_plan import build_named_pipeline
from phalanx.plan.pipeline.schedule import Action, Schedule
from phalanx.plan.pipeline.simulate import (
    StageCosts,
    Timeline,
    compute_peak_activation_bytes,
    compute_step_s,
    simulate_timeline,
)

SECONDS = st.fractions(min_value=Fraction(1, 8), max_value=8, max_denominator=8)
COSTS = st.builds(StageCosts, SECONDS, SECONDS, SECONDS)
EQUAL = SECONDS.map(lambda s: StageCosts(s, s, s))
UNIT = StageCosts(Fraction(1), Fraction(1), Fraction(1))


def simulated(
    name: str, ranks: int, microbatches: int, per_rank: int, costs: StageCosts
) -> Timeline:
    schedule = generate_schedule(name, ranks, microbatches, per_rank)
    return simulate_timeline(schedule, [costs] * schedule.num_stages)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
@settings(max_examples=25, deadline=None)
@given(ranks=st.integers(1, 6), rounds=st.integers(1, 4), per_rank=st.integers(2, 3), costs=COSTS)
def test_bubble_is_p_minus_1_over_vm_plus_p_minus_1(
    name: str, ranks: int, rounds: int, per_rank: int, costs: StageCosts
) -> None:
    v, m = (
        (per_rank, rounds * ranks) if name == "interleaved" else (1, rounds * ranks - (ranks > 1))
    )
    expected = Fraction(ranks - 1, v * m + ranks - 1)
    assert simulated(name, ranks, m, v, costs).bubble == expected
    assert closed_form_bubble(name, ranks, m, v, costs) == expected


@pytest.mark.parametrize("per_rank", [1, 2, 3])
@settings(max_examples=25, deadline=None)
@given(ranks=st.integers(1, 6), rounds=st.integers(1, 4), costs=COSTS)
def test_zero_bubble_of_the_paper(
    per_rank: int, ranks: int, rounds: int, costs: StageCosts
) -> None:
    """(p - 1)(F + B - 2W), B the whole backward, as long as W is no longer than F and I."""
    timeline = simulated("interleaved-zero-bubble", ranks, rounds * ranks, per_rank, costs)
    f, i, w = costs.forward_s, costs.backward_input_s, costs.backward_weight_s
    work = rounds * ranks * per_rank * (f + i + w)
    assert timeline.step_s - work == closed_form_idle_s(
        "interleaved-zero-bubble", ranks, rounds * ranks, costs
    )
    if w <= min(f, i):
        assert timeline.step_s - work == (ranks - 1) * (f + (i + w) - 2 * w)


@pytest.mark.parametrize("name", ["zb-v", "dualpipe-v"])
@settings(max_examples=25, deadline=None)
@given(ranks=st.integers(1, 6), more=st.integers(0, 8), costs=EQUAL)
def test_v_schedules_lose_the_offset_between_ranks_alone(
    name: str, ranks: int, more: int, costs: StageCosts
) -> None:
    timeline = simulated(name, ranks, 2 * ranks + more, 2, costs)
    lost = timeline.step_s - (2 * ranks + more) * 6 * costs.forward_s
    assert (
        lost
        == (ranks - 1) * costs.forward_s
        == closed_form_idle_s(name, ranks, 2 * ranks + more, costs)
    )
    for rank, row in enumerate(timeline.spans_s):
        assert row[0][0] == rank * costs.forward_s
        if name == "zb-v":  # no bubble between a rank's first and last action
            assert row[-1][1] - row[0][0] == timeline.busy_s(rank)


def test_where_there_is_no_closed_form() -> None:
    uneven = StageCosts(Fraction(1), Fraction(2), Fraction(1))
    assert closed_form_bubble("zb-v", 4, 8, 2, uneven) is None
    assert closed_form_bubble("zb-v", 4, 6, 2, UNIT) is None
    assert closed_form_bubble("interleaved", 4, 10, 2, UNIT) is None
    assert closed_form_bubble("my-own", 4, 8, 1, UNIT) is None


@settings(max_examples=25, deadline=None)
@given(st.lists(COSTS, min_size=1, max_size=5), st.integers(0, 6), SECONDS)
def test_uneven_stages_of_gpipe_by_hand(costs: list[StageCosts], more: int, send: Fraction) -> None:
    """Forwards are a flow shop in which nobody waits twice: the sum over stages once, and the
    slowest stage again."""
    m = more + 1
    timeline = simulate_timeline(generate_schedule("gpipe", len(costs), m), costs)
    forwards = [cost.forward_s for cost in costs]
    backwards = [cost.backward_input_s + cost.backward_weight_s for cost in costs]
    one_way = sum(forwards) + (m - 1) * max(forwards)
    assert timeline.spans_s[-1][m - 1][1] == one_way
    # The way back of the first microbatch can begin when the last rank is through with all
    # forwards.
    assert timeline.step_s == one_way + sum(backwards) + (m - 1) * max(backwards)
    with_sends = simulate_timeline(generate_schedule("gpipe", len(costs), 1), costs, send)
    assert with_sends.step_s == sum(forwards) + sum(backwards) + 2 * (len(costs) - 1) * send


def test_sends_go_beside_computation_and_one_after_the_other() -> None:
    """Three forwards of 1 s on rank 0; a send takes 2 s, so that the link is what rank 1 waits
    for."""
    costs = [UNIT, UNIT]
    timeline = simulate_timeline(generate_schedule("gpipe", 2, 3), costs, Fraction(2))
    assert timeline.spans_s[0][:3] == ((0, 1), (1, 2), (2, 3))
    assert timeline.spans_s[1][:3] == ((3, 4), (5, 6), (7, 8))
    assert timeline.spans_s[1][3:] == ((8, 10), (10, 12), (12, 14))
    assert timeline.spans_s[0][3:] == ((12, 14), (14, 16), (16, 18))
    assert (timeline.step_s, timeline.bubble) == (18, Fraction(1, 2))


def test_nothing_is_sent_within_a_rank() -> None:
    schedule = generate_schedule("zb-v", 1, 4)
    costs = [UNIT] * 2
    assert simulate_timeline(schedule, costs, Fraction(5)) == simulate_timeline(schedule, costs)


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(["1f1b", "interleaved", "zb-v", "dualpipe-v"]), st.integers(1, 4), st.data())
def test_no_schedule_beats_what_it_must_do(name: str, ranks: int, data: st.DataObject) -> None:
    """Spans of a rank do not overlap, keep the order, are as long as they cost, and begin after
    their inputs."""
    schedule = generate_schedule(name, ranks, 2 * ranks)
    costs = data.draw(st.lists(COSTS, min_size=schedule.num_stages, max_size=schedule.num_stages))
    send = data.draw(SECONDS)
    timeline = simulate_timeline(schedule, costs, send)
    ends: dict[tuple[str, int, int], Fraction] = {}
    for row, spans in zip(schedule.actions, timeline.spans_s, strict=True):
        clock = Fraction(0)
        for action, (begin, end) in zip(row, spans, strict=True):
            assert begin >= clock
            assert end - begin == costs[action.stage].by_kind_s[action.kind]
            clock = end
            ends["I" if action.kind == "B" else action.kind, action.stage, action.microbatch] = end
    for row, spans in zip(schedule.actions, timeline.spans_s, strict=True):
        for action, (begin, _) in zip(row, spans, strict=True):
            came_from = {"F": action.stage - 1, "B": action.stage + 1, "I": action.stage + 1}.get(
                action.kind, -1
            )
            if 0 <= came_from < schedule.num_stages:
                apart = schedule.rank_of_stage[came_from] != schedule.rank_of_stage[action.stage]
                kind = "F" if action.kind == "F" else "I"
                assert begin >= ends[kind, came_from, action.microbatch] + apart * send
    least = max(timeline.busy_s(rank) for rank in range(ranks))
    assert timeline.step_s >= least


@given(st.sampled_from(["1f1b", "zb-v", "interleaved", "gpipe"]), st.data())
@settings(max_examples=30, deadline=None)
def test_a_step_is_as_long_as_its_timeline(name: str, data: st.DataObject) -> None:
    """With an order of actions that other stages, and other sends, share."""
    per_rank = {"zb-v": 2, "interleaved": 2}.get(name, 1)
    schedule = generate_schedule(name, 3, 6, per_rank)
    order = find_execution_order(schedule)
    for send_s in (Fraction(0), Fraction(1, 3)):
        costs = data.draw(
            st.lists(COSTS, min_size=schedule.num_stages, max_size=schedule.num_stages)
        )
        timeline = simulate_timeline(schedule, costs, send_s)
        step_s = compute_step_s(order, [cost.by_kind_s for cost in costs], send_s)
        assert step_s == timeline.step_s


def test_a_schedule_that_never_ends_is_refused() -> None:
    rows = (("0B0", "0F0"), ("1F0", "1B0"))
    schedule = Schedule("mine", 1, (0, 1), tuple(tuple(map(Action.from_text, row)) for row in rows))
    with pytest.raises(LayoutError, match="schedule mine never ends: rank 0 waits for 1I0"):
        simulate_timeline(schedule, [UNIT, UNIT])


def test_json_comes_back() -> None:
    timeline = simulated("dualpipe-v", 2, 4, 2, StageCosts(0.5, 0.75, 0.25))
    assert Timeline.from_json(json.loads(json.dumps(timeline.to_json()))) == timeline


@pytest.mark.parametrize(
    ("name", "per_rank"),
    [
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved", 3),
        ("interleaved-zero-bubble", 2),
        ("zb-v", 2),
        ("dualpipe-v", 2),
    ],
)
def test_fewer_microbatches_have_the_peaks_of_all(name: str, per_rank: int) -> None:
    ranks, microbatches = 8, 1024
    stages = ranks * per_rank
    pipeline = build_named_pipeline(name, ranks, microbatches, StageCut((1,) * stages))
    draw = random.Random(name)
    of_stages = [[draw.randrange(1, 1000) for _ in range(stages)] for _ in range(2)]
    shorter = pipeline.schedule_of_peaks()
    assert (shorter.num_microbatches < microbatches) is (name != "gpipe")
    assert compute_peak_activation_bytes(shorter, *of_stages) == compute_peak_activation_bytes(
        pipeline.schedule(), *of_stages
    )
