"""What a rank writes of its steps: within the bound of a run, and nothing of a step is lost."""

from __future__ import annotations

import itertools
import random
from collections.abc import Set
from pathlib import Path
from typing import cast

import pytest

from phalanx.observe.events import (
    Event,
    StepFinished,
    StepsSummed,
    TimeBetweenSteps,
    wrap_event_in_envelope,
)
from phalanx.plan.layout import Layout
from phalanx.report.bottleneck.step_table import read_step_table
from phalanx.report.event_log import read_event_log
from phalanx.report.reduce import collect_run_facts
from phalanx.train.step_detail import (
    ODD_STEP_RATIO,
    StepDetail,
)

STEP_S, ODD_S = 0.100, 0.400
ALL_AXES = Layout(dp_replicate=63, tp=2, cp=2, ep=1, pp=4)
OPERATIONS = (
    "dp: all_gather parameters",
    "dp: reduce_scatter gradients",
    "tp: all_gather sequence",
    "tp: reduce_scatter sequence",
    "tp: all_reduce activations",
    "cp: all_gather keys and values",
    "ep: all_to_all rows of experts",
    "ep: all_to_all counts of rows",
    "pp: exchange gradients of parameters of several stages",
    "world: all_reduce step facts",
)


def step_of(number: int, *, late_s: float = 0.0, waits_s: float = 0.0) -> StepFinished:
    step_s = STEP_S + late_s + waits_s
    return StepFinished(
        step=number,
        loss=2.0,
        num_targets=2048,
        tokens_seen=2048 * number,
        learning_rate=1e-3,
        grad_norm=1.0,
        step_s=step_s,
        tokens_per_s=2048 / step_s,
        phases_s={
            "data": 0.001,
            "forward": 0.032,
            "backward": 0.060 + late_s,
            "collective": 0.004 + waits_s,
            "optimizer": 0.002,
        },
        unaccounted_s=0.001,
        rss_bytes=10**9 + number,
        peak_bytes=2 * 10**9,
        cpu_s=0.9 * step_s,
        # Every axis at once: the longest line there is.
        communication_s={
            "dp: all_reduce gradients": 0.004 + waits_s,
            **dict.fromkeys(OPERATIONS, 0.000123),
        },
    )


def write_steps(detail: StepDetail, num_steps: int, odd: Set[int] = frozenset()) -> list[Event]:
    written: list[Event] = []
    for number in range(1, num_steps + 1):
        late_s = ODD_S if number in odd else 0.0
        written += detail.list_events(step_of(number, late_s=late_s))
    return written + detail.flush()


def count_bytes(written: list[Event], rank: int) -> int:
    return sum(
        len(wrap_event_in_envelope(event, rank=rank, attempt=0, seq=seq).to_line()) + 1
        for seq, event in enumerate(written, start=100_000)
    )


def test_small_runs_write_each_step_of_each_rank() -> None:
    written = write_steps(StepDetail(7, Layout(dp_replicate=8), 0, 2_000), 2_000)
    assert [type(event) for event in written] == [StepFinished] * 2_000


def test_a_thousand_ranks_and_a_hundred_thousand_steps_stay_below_200_mb() -> None:
    """Rank 0 by the size of its line; the others by what one of them writes, with slow steps
    among them."""
    num_steps = 100_000
    odd = set(random.Random(1).sample(range(1, num_steps + 1), 500))
    written = write_steps(StepDetail(3, ALL_AXES, 0, num_steps), num_steps, odd)
    lead_bytes = num_steps * count_bytes([step_of(num_steps)], 0)
    assert ALL_AXES.world_size >= 1_000
    assert lead_bytes + (ALL_AXES.world_size - 1) * count_bytes(written, 3) < 200e6
    assert len(written) > 30, "and something is said of it"


def test_two_ranks_of_a_long_run_are_told_in_short_windows() -> None:
    """Rank 0 alone writes more than a run of many ranks may have: a window of the other was 20,000
    steps, and a verdict needs ten of them."""
    detail = StepDetail(1, Layout(dp_replicate=2), 0, 1_000_000)
    assert detail.window_steps < 20
    assert detail.num_first_steps > 1_000
    # The bound of a large run is as it was.
    assert StepDetail(1, ALL_AXES, 0, 100_000).window_steps > 1_000


def test_odd_steps_alone_are_no_picture_of_a_run(tmp_path: Path) -> None:
    """Until its first window ends a rank has its first steps and those that took long."""
    (tmp_path / "events").mkdir()
    for rank in range(2):
        detail = StepDetail(rank, Layout(dp_replicate=2_000), 0, 100_000)
        events: list[Event] = []
        for number in range(1, 400):
            late_s = 0.4 if number > 200 and number % 20 == 0 else 0.0
            events += detail.list_events(step_of(number, late_s=late_s))
        lines = [
            wrap_event_in_envelope(event, rank=rank, attempt=0, seq=seq).to_line()
            for seq, event in enumerate(events)
        ]
        path = tmp_path / "events" / f"rank-{rank:04}-attempt-00.jsonl"
        path.write_text("\n".join(lines) + "\n")
    assert len(lines) > 12
    table = read_step_table(tmp_path)
    assert table is not None
    assert table.steps == tuple(range(4, detail.num_first_steps + 1))


def test_sums_and_single_steps_are_all_steps() -> None:
    num_steps = 40_000
    odd = {5, 9_000, 9_001, 39_999}
    detail = StepDetail(2, Layout(dp_replicate=2_000), 0, num_steps)
    written = write_steps(detail, num_steps, odd)
    each = [event for event in written if isinstance(event, StepFinished)]
    windows = [event for event in written if isinstance(event, StepsSummed)]
    assert len(each) + sum(window.num_steps for window in windows) == num_steps
    total_s = sum(event.step_s for event in (*each, *windows))
    assert total_s == pytest.approx(num_steps * STEP_S + len(odd) * ODD_S)
    # Those that took long are there by themselves.
    assert odd <= {event.step for event in each}
    assert STEP_S + ODD_S > ODD_STEP_RATIO * STEP_S
    borders = [(window.first_step, window.last_step) for window in windows]
    assert borders[0][0] == detail.num_first_steps + 1
    assert all(after[0] == before[1] + 1 for before, after in itertools.pairwise(borders))


def test_twenty_attempts_stay_below_200_mb() -> None:
    """Each does the last 100 steps of the one before again, ends with an open window that it still
    writes, and has slow steps; those attempts near the end have few steps left."""
    num_steps, num_attempts = 100_000, 20
    odd = set(random.Random(1).sample(range(1, num_steps + 1), 2_000))
    lasts = [5_000 * number for number in range(1, 15)]
    lasts += [99_500, 99_600, 99_700, 99_800, 99_900, num_steps]
    assert len(lasts) == num_attempts
    written: list[Event] = []
    first = 1
    for attempt, last in enumerate(lasts):
        detail = StepDetail(3, ALL_AXES, attempt, num_steps)
        for number in range(first, last + 1):
            late_s = ODD_S if number in odd else 0.0
            written += detail.list_events(step_of(number, late_s=late_s))
        written += detail.flush()
        first = last - 99
    lead_bytes = (num_steps + 100 * num_attempts) * count_bytes([step_of(num_steps)], 0)
    assert lead_bytes + (ALL_AXES.world_size - 1) * count_bytes(written, 3) < 200e6


def test_windows_are_those_of_the_whole_run_in_each_attempt() -> None:
    details = [StepDetail(1, Layout(dp_replicate=1_000), attempt, 100_000) for attempt in range(20)]
    assert len({detail.window_steps for detail in details}) == 1
    num_first_steps = [detail.num_first_steps for detail in details]
    assert num_first_steps == sorted(num_first_steps, reverse=True)
    assert sum(num_first_steps) <= 2 * num_first_steps[0]
    assert num_first_steps[0] > 0


def test_windows_begin_where_all_ranks_begin_them_though_all_steps_of_one_were_odd() -> None:
    detail = StepDetail(1, Layout(dp_replicate=1_000), 0, 100_000)
    detail.list_events(step_of(1))
    first, length = detail.num_first_steps + 1, detail.window_steps
    odd = set(range(first, first + length))
    detail = StepDetail(1, Layout(dp_replicate=1_000), 0, 100_000)
    written: list[Event] = []
    for number in range(1, first + 2 * length):
        # Each odd one longer than those before: the mean follows.
        late_s = 1.6 ** min(number - first, 200) if number in odd else 0.0
        written += detail.list_events(step_of(number, late_s=late_s))
    windows = [event for event in written if isinstance(event, StepsSummed)]
    assert windows[-1].first_step == first + length


def test_reports_read_windows_as_they_read_steps(tmp_path: Path) -> None:
    """Rank 2 is 50 ms late in each backward; rank 0 wrote each step, the others windows."""
    (tmp_path / "events").mkdir()
    num_steps = 3_000
    for rank in range(3):
        detail = StepDetail(rank, Layout(dp_replicate=100_000), 0, num_steps)
        events: list[Event] = [TimeBetweenSteps(0, "startup", 1.0)]
        for number in range(1, num_steps + 1):
            late_s, waits_s = (0.050, 0.0) if rank == 2 else (0.0, 0.050)
            events += detail.list_events(step_of(number, late_s=late_s, waits_s=waits_s))
        events += [*detail.flush(), TimeBetweenSteps(num_steps, "ending", 0.5)]
        lines = [
            wrap_event_in_envelope(event, rank=rank, attempt=0, seq=seq).to_line()
            for seq, event in enumerate(events)
        ]
        path = tmp_path / "events" / f"rank-{rank:04}-attempt-00.jsonl"
        path.write_text("\n".join(lines) + "\n")
        assert (rank == 0) == (len(lines) > num_steps)
    table = read_step_table(tmp_path)
    assert table is not None
    assert table.ranks == (0, 1, 2)
    assert table.num_steps >= 10
    for rank, rows in table.rows.items():
        own_s = 0.146 if rank == 2 else 0.096
        assert all(row.self_s == pytest.approx(own_s, abs=1e-6) for row in rows)
        assert all(row.step_s == pytest.approx(0.150, abs=1e-6) for row in rows)
    log = read_event_log(tmp_path)
    for ledger in log.ledger.build_ledgers():
        assert ledger.num_steps == num_steps
        assert ledger.parts_s["forward"] == pytest.approx(0.032 * num_steps)
    assert log.clocks[1].num_steps == num_steps
    assert log.num_unreadable == 0


@pytest.mark.parametrize("num_steps", [0, 11, 10**19, 1e19])
def test_a_window_with_steps_that_it_cannot_have_is_an_unreadable_line(
    num_steps: float, tmp_path: Path
) -> None:
    """One such number, of a damaged file, ended every reader of the run."""
    events = [step_of(number) for number in range(1, 20)]
    # Of ten steps.
    damaged = StepsSummed(20, 29, cast(int, num_steps), 1.0, 0.2, 21, {}, {}, 0.0, 0.9, 1, 1)
    (tmp_path / "events").mkdir()
    lines = [
        wrap_event_in_envelope(event, rank=0, attempt=0, seq=seq).to_line()
        for seq, event in enumerate([*events, damaged])
    ]
    (tmp_path / "events" / "rank-0000-attempt-00.jsonl").write_text("\n".join(lines) + "\n")
    facts = collect_run_facts(tmp_path)
    assert facts.num_unreadable == 1
    assert len(facts.steps) == len(events)
