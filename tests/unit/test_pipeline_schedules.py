"""Schedules as data: which sizes are legal, what `find_schedule_problems` finds, files, and the microbatches that
are held."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import ExitCode, LayoutError
from phalanx.plan.pipeline.check import find_schedule_problems, require_runnable_schedule
from phalanx.plan.pipeline.closed_forms import closed_form_peak_in_flight
from phalanx.plan.pipeline.generate import SCHEDULE_NAMES, generate_schedule
from phalanx.plan.pipeline.schedule import (
    Action,
    Schedule,
    load_schedule_csv,
    place_stages_in_loop,
    place_stages_in_v,
    save_schedule_csv,
)
from phalanx.plan.pipeline.simulate import (
    compute_peak_activation_bytes,
    count_peak_in_flight,
)


def legal() -> st.SearchStrategy[Schedule]:
    """Any schedule that `generate_schedule` makes of sizes like these."""

    def made(
        name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int
    ) -> Schedule | None:
        try:
            return generate_schedule(name, num_ranks, num_microbatches, stages_per_rank)
        except LayoutError:
            return None

    sizes = st.tuples(
        st.sampled_from(SCHEDULE_NAMES), st.integers(1, 6), st.integers(1, 20), st.integers(1, 4)
    )
    return sizes.map(lambda size: made(*size)).filter(lambda schedule: schedule is not None)  # type: ignore[return-value]


def own(
    *rows: str, num_microbatches: int = 1, rank_of_stage: tuple[int, ...] | None = None
) -> Schedule:
    actions = tuple(tuple(map(Action.from_text, row.split())) for row in rows)
    return Schedule("own", num_microbatches, rank_of_stage or tuple(range(len(rows))), actions)


def lines(schedule: Schedule, **limits: int) -> list[str]:
    return [str(problem) for problem in find_schedule_problems(schedule, **limits)]


@settings(max_examples=80, deadline=None)
@given(legal())
def test_every_legal_size_runs(schedule: Schedule) -> None:
    assert find_schedule_problems(schedule) == ()
    assert (
        schedule.placement == ("v" if schedule.name in ("zb-v", "dualpipe-v") else "loop")
        or schedule.num_ranks == 1
    )
    assert Schedule.from_json(json.loads(json.dumps(schedule.to_json()))) == schedule


@settings(max_examples=30, deadline=None)
@given(schedule=legal())
def test_a_file_comes_back(schedule: Schedule, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("schedules") / f"{schedule.name}.csv"
    save_schedule_csv(schedule, path)
    assert load_schedule_csv(path) == schedule


@settings(max_examples=50, deadline=None)
@given(legal(), st.data())
def test_whatever_is_taken_away_or_swapped_within_a_microbatch_is_found(
    schedule: Schedule, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    row = list(schedule.actions[rank])
    gone = data.draw(st.integers(0, len(row) - 1))
    less = (
        *schedule.actions[:rank],
        tuple(row[:gone] + row[gone + 1 :]),
        *schedule.actions[rank + 1 :],
    )
    assert find_schedule_problems(replace(schedule, actions=less))
    forward = next(action for action in row if action.kind == "F")
    back = next(
        a
        for a in row
        if a.kind in "BI" and (a.stage, a.microbatch) == (forward.stage, forward.microbatch)
    )
    first, second = row.index(forward), row.index(back)
    row[first], row[second] = row[second], row[first]
    swapped = (*schedule.actions[:rank], tuple(row), *schedule.actions[rank + 1 :])
    assert any("waits for" in line for line in lines(replace(schedule, actions=swapped)))


def test_placements() -> None:
    assert place_stages_in_loop(3, 2) == (0, 1, 2, 0, 1, 2)
    assert place_stages_in_v(3) == (0, 1, 2, 2, 1, 0)
    assert generate_schedule("zb-v", 3, 6).stages_of_rank(1) == (1, 4)
    assert generate_schedule("interleaved", 3, 6).stages_of_rank(1) == (1, 4)
    assert generate_schedule("interleaved", 3, 6, 3).stages_of_rank(0) == (0, 3, 6)
    assert own("0F0 0B0", "1F0 2F0 2B0 1B0", rank_of_stage=(0, 1, 1)).placement == "own"


def test_one_walk_of_1f1b() -> None:
    schedule = generate_schedule("1f1b", 2, 3)
    assert [" ".join(map(str, row)) for row in schedule.actions] == [
        "0F0 0F1 0B0 0F2 0B1 0B2",
        "1F0 1B0 1F1 1B1 1F2 1B2",
    ]


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        (("1fib", 4, 8), "there is no schedule '1fib'; did you mean \"1f1b\"?"),
        (
            ("gpipe", 4, 8, 2),
            "schedule gpipe cannot have 2 stages per rank; nearest: 1, or schedule interleaved",
        ),
        (
            ("interleaved", 4, 8, 1),
            "schedule interleaved cannot have 1 stages per rank; nearest: 2, or schedule 1f1b",
        ),
        (("zb-v", 4, 8, 3), "schedule zb-v cannot have 3 stages per rank; nearest: 2"),
        (
            ("interleaved", 4, 9),
            (
                "schedule interleaved on 4 ranks cannot run 9 microbatches (they do not divide into"
                " 2 equal rounds); nearest: 8 or 10"
            ),
        ),
        (
            ("interleaved-zero-bubble", 4, 17, 1),
            (
                "schedule interleaved-zero-bubble on 4 ranks cannot run 17 microbatches (they do"
                " not divide into 4 equal rounds); nearest: 16 or 20"
            ),
        ),
        (
            ("dualpipe-v", 4, 7),
            (
                "schedule dualpipe-v on 4 ranks cannot run 7 microbatches (it has two stages per"
                " rank and wants a microbatch in each); nearest: 8"
            ),
        ),
        (("gpipe", 4, 0), "a pipeline of 4 ranks and 0 microbatches; use at least 1"),
    ],
)
def test_what_cannot_be_is_refused_with_the_nearest_that_can(
    size: tuple[str, int, int], wanted: str
) -> None:
    with pytest.raises(LayoutError) as caught:
        generate_schedule(*size)
    assert str(caught.value) == wanted
    assert caught.value.exit_code == ExitCode.JOB


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        (own("0F0", "1F0 1B0"), ["0B0: is missing on rank 0, and so are 0I0 and 0W0"]),
        (own("0F0 0B0", "1B0"), ["1F0: is missing on rank 1"]),
        (
            own("0F0 0I0", "1F0 1B0"),
            ["rank 0, position 2: 0W0: is missing on rank 0; 0I0 is half of a backward"],
        ),
        (
            own("0F0 0B0 0W0", "1F0 1B0"),
            ["rank 0, position 3: 0W0: is part of 0B0, which is there too"],
        ),
        (
            own("0F0 0F0 0B0", "1F0 1B0"),
            ["rank 0, position 2: 0F0: comes a second time; the first is at rank 0, position 1"],
        ),
        (
            own("0F0 0B0", "1F0 1B0 0F0"),
            [
                "rank 1, position 3: 0F0: stage 0 is on rank 0",
                "rank 1, position 3: 0F0: comes a second time; the first is at rank 0, position 1",
            ],
        ),
        (own("0F0 0B0", "1F0 1B0 2F0"), ["rank 1, position 3: 2F0: there are 2 stages, from 0"]),
        (
            own("0F0 0B0 0F1", "1F0 1B0"),
            ["rank 0, position 3: 0F1: there are 1 microbatches, from 0"],
        ),
        (own("0F0 0B0", "", rank_of_stage=(0,)), ["rank 1: has nothing to do"]),
        (
            own("0B0 0F0", "1F0 1B0"),
            [
                (
                    "rank 0, position 1: 0B0: waits for 1B0 of rank 1, position 2, and rank 1"
                    " stands at position 1, 1F0"
                ),
                (
                    "rank 1, position 1: 1F0: waits for 0F0 of rank 0, position 2, and rank 0"
                    " stands at position 1, 0B0"
                ),
            ],
        ),
        (
            own("0F0 0W0 0I0"),
            ["rank 0, position 2: 0W0: waits for 0I0, which comes later, at position 3"],
        ),
        (
            own("0F0 0B0", "1F0 1W0 1I0"),
            [
                (
                    "rank 0, position 2: 0B0: waits for 1I0 of rank 1, position 3, and rank 1"
                    " stands at position 2, 1W0"
                ),
                "rank 1, position 2: 1W0: waits for 1I0, which comes later, at position 3",
            ],
        ),
        (
            own("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0", num_microbatches=2),
            [
                (
                    "rank 0, position 2: 0B0: waits for 1B0 of rank 1, position 4, and rank 1"
                    " stands at position 1, 1F1"
                ),
                (
                    "rank 1, position 1: 1F1: waits for 0F1 of rank 0, position 3, and rank 0"
                    " stands at position 2, 0B0"
                ),
            ],
        ),
    ],
)
def test_each_fault_of_a_schedule_is_one_line(schedule: Schedule, wanted: list[str]) -> None:
    assert lines(schedule) == wanted


def test_the_first_fault_refuses() -> None:
    with pytest.raises(
        LayoutError, match=r"own cannot run: 0F0: is missing on rank 0 \(and 1 more\)$"
    ) as caught:
        require_runnable_schedule(own("0B0", "1B0"))
    assert "\n" not in str(caught.value)
    require_runnable_schedule(generate_schedule("zb-v", 4, 8))


def test_memory_in_flight_is_limited_on_demand() -> None:
    assert lines(generate_schedule("1f1b", 4, 8), max_in_flight=4) == []
    assert lines(generate_schedule("1f1b", 4, 8), max_in_flight=3) == [
        "rank 0: holds up to 4 microbatches at once, and 3 may be"
    ]


@settings(max_examples=80, deadline=None)
@given(legal())
def test_peaks_are_those_of_the_literature(schedule: Schedule) -> None:
    held, known = count_peak_in_flight(schedule), 0
    per_rank = schedule.num_stages // schedule.num_ranks
    for rank in range(schedule.num_ranks):
        said = closed_form_peak_in_flight(
            schedule.name, schedule.num_ranks, schedule.num_microbatches, per_rank, rank
        )
        known += said is not None
        assert said in (None, held.per_rank[rank])
    assert known or schedule.name not in ("gpipe", "1f1b")
    for stage, peak in enumerate(held.per_stage):
        assert (
            1
            <= peak
            <= min(schedule.num_microbatches, held.per_rank[schedule.rank_of_stage[stage]])
        )


def test_what_is_only_kept_for_weights_is_counted_apart() -> None:
    """ZB-H1: every rank holds p, of which rank r keeps r for their W alone, and the one whose I
    it has just done."""
    held = count_peak_in_flight(generate_schedule("interleaved-zero-bubble", 4, 12, 1))
    assert held.per_rank == (4, 4, 4, 4)
    assert held.per_stage == (4, 4, 4, 4)
    assert held.only_for_weights_per_rank == (1, 2, 3, 4)
    assert count_peak_in_flight(generate_schedule("1f1b", 4, 12)).only_for_weights_per_rank == (
        0,
        0,
        0,
        0,
    )


def test_bytes_at_the_peak() -> None:
    """Rank 0 holds two whole microbatches; rank 1 one whole and one that waits for its W."""
    schedule = generate_schedule("interleaved-zero-bubble", 2, 4, 1)
    assert compute_peak_activation_bytes(schedule, [10, 100], [3, 30]) == (20, 130)
    assert compute_peak_activation_bytes(generate_schedule("gpipe", 2, 4), [10, 100], [3, 30]) == (
        40,
        400,
    )


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            "0F0,0G0\n",
            (
                "own.csv:1: cell 2: '0G0' is no action; an action is stage, F, B, I or W,"
                " microbatch: 3F0"
            ),
        ),
        ("0F0,0B0\n1F0,1Fx\n", "own.csv:2: cell 2: '1Fx' is no action"),
        ("0F0x\n", "own.csv:1: cell 1: '0F0x' is no action"),
        ("0F\n", "own.csv:1: cell 1: '0F' is no action"),
        ("-1F0\n", "own.csv:1: cell 1: '-1F0' is no action"),
        (
            "0F0,0SEND_F0\n",
            "own.csv:1: cell 2: 0SEND_F0 is no computation (sends, receives and gathers follow",
        ),
        ("(0F1;1F)OVERLAP_F_B\n", "own.csv:1: cell 1: '1F' is no action"),
        ("0F0,0B0\n2F0,2B0\n", "own.csv: no rank has stage 1 (there is a stage 2)"),
        ("0F0,0B0\n999999999F0\n", "own.csv: no rank has stage 1 (there is a stage 999999999)"),
        (
            "0F0,0B0,0F999999999\n",
            "own.csv: no rank has microbatch 1 (there is a microbatch 999999999)",
        ),
        ("0F" + "9" * 5000, "own.csv:1: cell 1: '0F999"),
        ("", "own.csv: the schedule is empty; write one line per rank: 0F0,0F1,0B0,0B1"),
        (",,\n\n", "own.csv: the schedule is empty"),
    ],
)
def test_a_file_that_is_no_schedule(text: str, wanted: str, tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(text)
    with pytest.raises(LayoutError) as caught:
        load_schedule_csv(path)
    assert str(caught.value).removeprefix(f"{tmp_path}/").startswith(wanted)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"the schedule cannot be read \(No such file"):
        load_schedule_csv(tmp_path / "none.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe0F0")
    with pytest.raises(LayoutError, match="the schedule cannot be read"):
        load_schedule_csv(tmp_path / "bytes.csv")


def test_a_hand_written_file_of_any_placement(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,,0F1, 3F0 ,3B0,0B0,3F1,3B1,0B1\r\n,1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1\n\n")
    schedule = load_schedule_csv(path)
    assert (schedule.name, schedule.rank_of_stage, schedule.placement) == (
        "mine",
        (0, 1, 1, 0),
        "v",
    )
    assert find_schedule_problems(schedule) == ()
