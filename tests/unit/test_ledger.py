"""The ledger of seconds over event files that the real writer's envelopes make: each second once,
beside a wall that is measured apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.cli import report
from phalanx.observe.events import (
    RESUMED,
    CollectivesCounted,
    Envelope,
    Event,
    LayoutChanged,
    MonotonicClockReading,
    Note,
    RanksStarted,
    RestartScheduled,
    RunFinished,
    StepFinished,
    StepsSummed,
    TimeBetweenSteps,
    wrap_event_in_envelope,
)
from phalanx.observe.tail import EventTail
from phalanx.observe.time_groups import get_time_group_of_phase
from phalanx.report.event_log import read_event_log
from phalanx.report.ledger import RankLedger, list_ledger_warnings
from phalanx.report.page import render_page
from phalanx.report.prometheus.run_metrics import RunMetrics
from phalanx.report.reduce import collect_run_facts
from phalanx.report.summary import build_run_json

PHASES_S = {"data": 0.1, "forward": 0.3, "backward": 0.5, "collective": 0.05, "pipeline": 0.02}
STEP_S = 1.0
UNACCOUNTED_S = STEP_S - sum(PHASES_S.values())
Timed = tuple[float, Event]
STARTED: Timed = (101.0, RanksStarted([4711], 0.5))


def step_of(number: int, phases_s: dict[str, float] = PHASES_S) -> StepFinished:
    return StepFinished(
        step=number,
        loss=2.0,
        num_targets=8,
        tokens_seen=8,
        learning_rate=1e-3,
        grad_norm=1.0,
        step_s=STEP_S,
        tokens_per_s=8.0,
        phases_s=phases_s,
        unaccounted_s=STEP_S - sum(phases_s.values()),
        rss_bytes=1,
        communication_s={"tp: all_gather sequence": 0.03, "world: all_reduce step facts": 0.02},
    )


def write(
    run_dir: Path, name: str, rank: int, attempt: int, timed: Sequence[Timed], clock: str = "one"
) -> None:
    """A file of one process, whose events are written at the given moments."""
    (run_dir / "events").mkdir(parents=True, exist_ok=True)
    lines = []
    for seq, (at_s, event) in enumerate(timed):
        envelope: Envelope = wrap_event_in_envelope(event, rank=rank, attempt=attempt, seq=seq)
        reading = MonotonicClockReading(clock, timed[0][0])
        envelope = replace(envelope, monotonic_s=at_s, clock=reading)
        lines.append(envelope.to_line())
    (run_dir / "events" / name).write_text("\n".join(lines) + "\n")


def steps_from(first: int, last: int, began_s: float) -> list[Timed]:
    return [
        (began_s + STEP_S * (number - first + 1), step_of(number))
        for number in range(first, last + 1)
    ]


def ledgers_of(run_dir: Path) -> list[RankLedger]:
    return read_event_log(run_dir).ledger.build_ledgers()


def test_a_batchs_copy_to_the_device_is_a_part_of_its_own(tmp_path: Path) -> None:
    step = step_of(1, {**PHASES_S, "forward": 0.2, "host_to_device": 0.1})
    events: list[Timed] = [(105.0, TimeBetweenSteps(0, "startup", 5.0)), (106.0, step)]
    write(tmp_path, "rank-0000-attempt-00.jsonl", 0, 0, events)
    write(
        tmp_path,
        "supervisor.jsonl",
        -1,
        0,
        [STARTED, (106.0, RunFinished("finished", 0, 1, 6.0))],
    )
    (ledger,) = ledgers_of(tmp_path)
    assert ledger.parts_s["host to device"] == pytest.approx(0.1)
    assert ledger.parts_s["data"] == pytest.approx(0.1)
    assert get_time_group_of_phase("host_to_device") == "data"


def test_every_second_of_an_undisturbed_run_has_its_part(tmp_path: Path) -> None:
    """Start-up 5 s, ten steps, an evaluation of 2 s, an ending of 1.5 s, half a second until the
    supervisor has seen it."""
    events: list[Timed] = [(105.0, TimeBetweenSteps(0, "startup", 5.0)), *steps_from(1, 10, 105.0)]
    events += [
        (117.0, TimeBetweenSteps(10, "evaluate", 2.0)),
        (118.5, TimeBetweenSteps(10, "ending", 1.5)),
    ]
    write(tmp_path, "rank-0000-attempt-00.jsonl", 0, 0, events)
    write(
        tmp_path,
        "supervisor.jsonl",
        -1,
        0,
        [STARTED, (119.0, RunFinished("finished", 0, 10, 19.0))],
    )
    (ledger,) = ledgers_of(tmp_path)
    assert ledger.is_supervised
    assert ledger.num_steps == 10
    expected = {
        "start-up": 5.0,
        "data": 1.0,
        "forward": 3.0,
        "backward": 5.0,
        "communication": 0.5,
        "pipeline waiting": 0.2,
        "evaluation": 2.0,
        "ending": 2.0,
    }
    parts = {name: seconds for name, seconds in ledger.parts_s.items() if seconds}
    assert parts == pytest.approx(expected)
    assert ledger.unattributed_s == pytest.approx(10 * UNACCOUNTED_S)
    assert ledger.counted_twice_s == 0
    assert sum(ledger.communication_s.values()) == pytest.approx(parts["communication"])
    of_page = collect_run_facts(tmp_path).ledger.parts_s
    assert of_page["ending"] == pytest.approx(2.0)
    # Rank 0's event on the start is not there, and nobody evaluated by its word.
    assert of_page["everything else"] == pytest.approx(5.0 + 2.0)


def test_steps_that_a_restart_undid_are_one_part(tmp_path: Path) -> None:
    """Dies after step 6, goes on from step 5: two seconds were for nothing, and 3 s passed before
    there was a process again."""
    write(
        tmp_path,
        "rank-0000-attempt-00.jsonl",
        0,
        0,
        [
            (105.0, TimeBetweenSteps(0, "startup", 5.0)),
            *steps_from(1, 6, 105.0),
            # It has lost the other rank, and says what it sent.
            (112.5, CollectivesCounted(6, {}, {}, {})),
        ],
    )
    write(
        tmp_path,
        "rank-0000-attempt-01.jsonl",
        0,
        1,
        [
            (118.0, TimeBetweenSteps(4, "startup", 4.0)),
            *steps_from(5, 8, 118.0),
            (122.0, TimeBetweenSteps(8, "ending", 0.0)),
        ],
    )
    write(
        tmp_path,
        "supervisor.jsonl",
        -1,
        0,
        [
            STARTED,
            (112.0, RestartScheduled(1, 3, 4)),
            (122.0, RunFinished("finished", 0, 8, 22.0)),
        ],
    )
    (ledger,) = ledgers_of(tmp_path)
    assert ledger.parts_s["steps done again"] == pytest.approx(2.0)
    assert ledger.parts_s["restart"] == pytest.approx(3.0)
    assert ledger.parts_s["start-up"] == pytest.approx(9.0)
    assert ledger.num_steps == 8
    assert ledger.unattributed_s == pytest.approx(8 * UNACCOUNTED_S)
    assert collect_run_facts(tmp_path).ledger.parts_s["restart"] == pytest.approx(3.0)


def test_seconds_that_two_parts_claim_are_said(tmp_path: Path) -> None:
    twice = {**PHASES_S, "backward": 0.5 + 2 * UNACCOUNTED_S}
    events: list[Timed] = [(105.0, TimeBetweenSteps(0, "startup", 5.0))]
    events += [(105.0 + number, step_of(number, twice)) for number in range(1, 11)]
    events.append((115.0, TimeBetweenSteps(10, "ending", 0.0)))
    write(tmp_path, "rank-0000-attempt-00.jsonl", 0, 0, events)
    write(
        tmp_path,
        "supervisor.jsonl",
        -1,
        0,
        [STARTED, (115.0, RunFinished("finished", 0, 10, 15.0))],
    )
    (ledger,) = ledgers_of(tmp_path)
    assert ledger.counted_twice_s == pytest.approx(10 * UNACCOUNTED_S)
    assert ledger.unattributed_s == 0


def test_a_pause_that_nobody_claims_is_unattributed(tmp_path: Path) -> None:
    events: list[Timed] = [(105.0, TimeBetweenSteps(0, "startup", 5.0)), *steps_from(1, 10, 112.0)]
    events.append((122.0, TimeBetweenSteps(10, "ending", 0.0)))
    write(tmp_path, "rank-0000-attempt-00.jsonl", 0, 0, events)
    write(
        tmp_path,
        "supervisor.jsonl",
        -1,
        0,
        [STARTED, (122.0, RunFinished("finished", 0, 10, 22.0))],
    )
    (ledger,) = ledgers_of(tmp_path)
    assert ledger.unattributed_s == pytest.approx(7.0 + 10 * UNACCOUNTED_S)


def write_pause_of_seven_seconds(run_dir: Path) -> None:
    events: list[Timed] = [(105.0, TimeBetweenSteps(0, "startup", 5.0)), *steps_from(1, 10, 112.0)]
    events.append((122.0, TimeBetweenSteps(10, "ending", 0.0)))
    write(run_dir, "rank-0000-attempt-00.jsonl", 0, 0, events)
    end = (122.0, RunFinished("finished", 0, 10, 22.0))
    write(run_dir, "supervisor.jsonl", -1, 0, [STARTED, end])


def test_a_gap_is_a_warning_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pause_of_seven_seconds(tmp_path)
    warning = "7.3 s of rank 0 (33.2 % of the wall) are in no part of the ledger"
    (text,) = list_ledger_warnings(ledgers_of(tmp_path))
    assert text.startswith(warning)
    assert text in build_run_json(collect_run_facts(tmp_path))["warnings"]
    assert report.command(str(tmp_path), other=None, out=None, as_json=False) == 0
    assert f"warn    {warning}" in capsys.readouterr().err


def test_a_small_gap_is_no_warning(tmp_path: Path) -> None:
    """0.3 s of 15: 2 % and less than a second."""
    events: list[Timed] = [(105.0, TimeBetweenSteps(0, "startup", 5.0)), *steps_from(1, 10, 105.0)]
    events.append((115.0, TimeBetweenSteps(10, "ending", 0.0)))
    write(tmp_path, "rank-0000-attempt-00.jsonl", 0, 0, events)
    end = (115.0, RunFinished("finished", 0, 10, 15.0))
    write(tmp_path, "supervisor.jsonl", -1, 0, [STARTED, end])
    assert list_ledger_warnings(ledgers_of(tmp_path)) == []


def test_a_gap_of_one_command_hides_no_second_that_another_counts_twice(tmp_path: Path) -> None:
    """Five steps of the second command have 0.4 s twice; the first has a pause of 7 s."""
    write_pause_of_seven_seconds(tmp_path)
    path = tmp_path / "events" / "supervisor.jsonl"
    first = path.read_text()
    twice = {**PHASES_S, "backward": 0.9 + UNACCOUNTED_S}
    events: list[Timed] = [(202.0, TimeBetweenSteps(10, "startup", 2.0))]
    events += [(202.0 + number, step_of(10 + number, twice)) for number in range(1, 6)]
    write(tmp_path, "rank-0000-attempt-01.jsonl", 0, 1, events)
    end = (207.0, RunFinished("finished", 0, 15, 7.0))
    write(tmp_path, "supervisor.jsonl", -1, 1, [(200.5, RanksStarted([2], 0.2)), end])
    path.write_text(first + path.read_text())
    (ledger,) = ledgers_of(tmp_path)
    assert ledger.unattributed_s == pytest.approx(7.0 + 10 * UNACCOUNTED_S)
    assert ledger.counted_twice_s == pytest.approx(5 * 0.4)
    assert len(list_ledger_warnings([ledger])) == 2


def test_without_a_supervisor_the_wall_is_the_ranks_own(tmp_path: Path) -> None:
    """As under another launcher, or while the run goes on; a clock of another machine is not
    compared."""
    events: list[Timed] = [(105.0, TimeBetweenSteps(0, "startup", 5.0)), *steps_from(1, 10, 105.0)]
    write(tmp_path, "rank-0000-attempt-00.jsonl", 0, 0, events)
    (ledger,) = ledgers_of(tmp_path)
    assert not ledger.is_supervised
    assert ledger.wall_s == pytest.approx(15.0)
    write(
        tmp_path,
        "supervisor.jsonl",
        -1,
        0,
        [(8_990.0, RanksStarted([1], 1.0)), (9_000.0, RunFinished("finished", 0, 10, 16.0))],
        clock="another",
    )
    (ledger,) = ledgers_of(tmp_path)
    assert ledger.parts_s["ending"] == 0
    assert ledger.unattributed_s == pytest.approx(1.0 + 10 * UNACCOUNTED_S)


def test_runs_of_earlier_releases_have_no_ledger(tmp_path: Path) -> None:
    write(tmp_path, "rank-0000-attempt-00.jsonl", 0, 0, steps_from(1, 10, 105.0))
    assert ledgers_of(tmp_path) == []


def test_an_end_that_no_supervisor_said_is_not_its_wall(tmp_path: Path) -> None:
    """Under torchrun rank 0 says how long it took, in the supervisor's place."""
    events: list[Timed] = [(105.0, TimeBetweenSteps(0, "startup", 5.0)), *steps_from(1, 10, 105.0)]
    write(tmp_path, "rank-0000-attempt-00.jsonl", 0, 0, events)
    write(tmp_path, "supervisor.jsonl", -1, 0, [(115.2, RunFinished("finished", 0, 10, 13.0))])
    (ledger,) = ledgers_of(tmp_path)
    assert not ledger.is_supervised
    assert ledger.wall_s == pytest.approx(15.0)
    assert ledger.counted_twice_s == 0


def test_two_commands_are_summed_and_the_pause_between_them_is_not(tmp_path: Path) -> None:
    """Stopped after five steps, resumed an hour later; the attempt between died before a word."""
    first = [(105.0, TimeBetweenSteps(0, "startup", 5.0)), *steps_from(1, 5, 105.0)]
    write(tmp_path, "rank-0000-attempt-00.jsonl", 0, 0, first)
    second = [(4_002.0, TimeBetweenSteps(5, "startup", 2.0)), *steps_from(6, 8, 4_002.0)]
    write(tmp_path, "rank-0000-attempt-02.jsonl", 0, 2, second)
    path = tmp_path / "events" / "supervisor.jsonl"
    lines = []
    for attempt, timed in (
        (0, [STARTED, (112.0, RestartScheduled(1, 3, 5))]),
        (1, [(113.0, RanksStarted([1], 0.5)), (120.0, RunFinished("failed", 10, 5, 20.0))]),
        (2, [(4_000.5, RanksStarted([1], 0.2)), (4_005.0, RunFinished("finished", 0, 8, 5.0))]),
    ):
        write(tmp_path, "supervisor.jsonl", -1, attempt, timed)
        lines.append(path.read_text())
    path.write_text("".join(lines))
    (ledger,) = ledgers_of(tmp_path)
    assert ledger.is_supervised
    assert ledger.wall_s == pytest.approx(25.0)
    # From the last step of the first command until it had failed, and of the second until its end.
    assert ledger.parts_s["failure"] == pytest.approx(10.0)
    assert ledger.parts_s["restart"] == 0
    assert ledger.counted_twice_s == 0
    assert ledger.unattributed_s == pytest.approx(8 * UNACCOUNTED_S)


def write_supervisor(run_dir: Path, *by_attempt: Sequence[Timed]) -> None:
    """The supervisor's file, by attempt what it said."""
    lines = []
    for attempt, timed in enumerate(by_attempt):
        write(run_dir, "supervisor.jsonl", -1, attempt, timed)
        lines.append((run_dir / "events" / "supervisor.jsonl").read_text())
    (run_dir / "events" / "supervisor.jsonl").write_text("".join(lines))


def write_attempt(run_dir: Path, rank: int, attempt: int, began_s: float, first: int) -> None:
    """Start-up of 2 s and five steps, until the last of them."""
    start = (began_s + 2.0, TimeBetweenSteps(first - 1, "startup", 2.0))
    timed = [start, *steps_from(first, first + 4, began_s + 2.0)]
    write(run_dir, f"rank-{rank:04d}-attempt-{attempt:02d}.jsonl", rank, attempt, timed)


def test_a_rank_has_no_second_of_a_command_with_fewer_ranks(tmp_path: Path) -> None:
    """Three ranks are stopped after 8 s; two go on for 9 s, a minute later."""
    for rank in range(3):
        write_attempt(tmp_path, rank, 0, 100.0, 1)
    for rank in range(2):
        write_attempt(tmp_path, rank, 1, 168.0, 6)
    stopped = (108.0, RunFinished("preempted", 75, 5, 8.0))
    finished = (177.0, RunFinished("finished", 0, 10, 9.0))
    write_supervisor(
        tmp_path,
        [(100.5, RanksStarted([1, 2, 3], 0.5)), stopped],
        [(168.5, RanksStarted([4, 5], 0.5)), finished],
    )
    ledgers = ledgers_of(tmp_path)
    assert [each.wall_s for each in ledgers] == pytest.approx([17.0, 17.0, 8.0])
    assert [each.counted_twice_s for each in ledgers] == [0, 0, 0]
    assert ledgers[2].parts_s["ending"] == pytest.approx(1.0)
    assert list_ledger_warnings(ledgers) == []


HOURS_S = 36_000.0


@pytest.mark.parametrize(
    ("ending", "wall_s", "num_cut_off"),
    [
        pytest.param([(112.0, RunFinished("preempted", 75, 5, 12.0))], 12.0, 0, id="stopped"),
        pytest.param([], math.nan, 1, id="killed"),
    ],
)
@pytest.mark.parametrize("num_unstarted", [0, 2])
def test_hours_after_a_restart_that_did_not_come_are_nobodys(
    ending: list[Timed], wall_s: float, num_cut_off: int, num_unstarted: int, tmp_path: Path
) -> None:
    """A run waits for a file server, with or without attempts that leave no file, and ends in the
    pause; the first attempt of the command that goes on with it has the number that was announced.
    """
    write_attempt(tmp_path, 0, 0, 100.0, 1)
    write_attempt(tmp_path, 0, 1, HOURS_S, 6)
    first: list[Timed] = [(100.5, RanksStarted([1], 0.5)), (108.0, RestartScheduled(1, 3, 5))]
    second: list[Timed] = [
        (HOURS_S, Note(RESUMED, {"step": 5})),
        (HOURS_S + 0.5, RanksStarted([2], 0.5)),
        (HOURS_S + 9.0, RunFinished("finished", 0, 10, 9.0)),
    ]
    path = tmp_path / "events" / "supervisor.jsonl"
    lines = []
    unstarted = [
        (number, [(108.0 + number, RestartScheduled(1 + number, 3, 5))])
        for number in range(1, 1 + num_unstarted)
    ]
    for attempt, timed in ((0, first), *unstarted, (num_unstarted, ending), (1, second)):
        if timed:
            write(tmp_path, "supervisor.jsonl", -1, attempt, timed)
            lines.append(path.read_text())
    path.write_text("".join(lines))
    facts = collect_run_facts(tmp_path)
    (ledger,) = facts.rank_ledgers
    first_s = wall_s if ending else 7.0
    assert ledger.wall_s == pytest.approx(first_s + 9.0)
    assert ledger.parts_s["restart"] == 0
    assert ledger.counted_twice_s == 0
    assert list_ledger_warnings(facts.rank_ledgers) == []
    # Nobody but its end says that it began half a second before its ranks.
    alive_s = 9.0 + (12.0 if ending else 7.5 + num_unstarted)
    assert facts.timeline.num_commands == 2
    assert facts.timeline.alive_s == pytest.approx(alive_s)
    assert facts.wall_s == pytest.approx(alive_s)
    assert facts.reliability.num_cut_off == num_cut_off
    metrics = RunMetrics("run", {})
    for envelope in EventTail(tmp_path, all_ranks=True).iterate_past_events():
        metrics.add_event(envelope)
    productive_s = 10 * (STEP_S - PHASES_S["data"])
    goodput = metrics.build_snapshot().find_value("phalanx_goodput_ratio")
    assert goodput == pytest.approx(productive_s / alive_s)


# What the layout of three attempts of 10 s is, and the seconds of rank 1.
@pytest.mark.parametrize(
    ("num_ranks", "restart_s", "ending_s"),
    [
        pytest.param((2, 1, 2), 3.0, 3.0, id="in-the-middle"),
        pytest.param((2, 2, 1), 3.0, 3.0, id="at-the-end"),
        pytest.param((1, 2, 2), 3.0, 3.0, id="at-the-start"),
        pytest.param((2, 1, 1), 0.0, 3.0, id="twice"),
    ],
)
def test_a_rank_has_no_second_of_an_attempt_whose_layout_is_without_it(
    num_ranks: tuple[int, ...], restart_s: float, ending_s: float, tmp_path: Path
) -> None:
    supervisor: list[list[Timed]] = []
    for number, size in enumerate(num_ranks):
        began_s = 100.0 + 10.0 * number
        for rank in range(size):
            write_attempt(tmp_path, rank, number, began_s, 1 + 5 * number)
        supervisor.append([(began_s + 0.5, RanksStarted([1, 2][:size], 0.5))])
        if number < 2:
            changed = LayoutChanged(5, size, num_ranks[number + 1], "before -> after", "why")
            supervisor[-1].append((began_s + 10.0, changed))
    supervisor[-1].append((130.0, RunFinished("finished", 0, 15, 30.0)))
    write_supervisor(tmp_path, *supervisor)
    always, sometimes = ledgers_of(tmp_path)
    assert always.wall_s == pytest.approx(30.0)
    assert sometimes.wall_s == pytest.approx(10.0 * num_ranks.count(2))
    assert sometimes.parts_s["restart"] == pytest.approx(restart_s)
    assert sometimes.parts_s["ending"] == pytest.approx(ending_s)
    assert sometimes.unattributed_s == pytest.approx(sometimes.num_steps * UNACCOUNTED_S)
    assert sometimes.counted_twice_s == 0


def test_the_page_says_a_warning_of_the_ledger_once(tmp_path: Path) -> None:
    write_pause_of_seven_seconds(tmp_path)
    facts = collect_run_facts(tmp_path)
    (text,) = list_ledger_warnings(facts.rank_ledgers)
    assert render_page(facts).count(text) == 1


def test_a_first_attempt_that_died_without_a_word_is_in_the_restart(tmp_path: Path) -> None:
    events: list[Timed] = [(165.0, TimeBetweenSteps(0, "startup", 5.0)), *steps_from(1, 5, 165.0)]
    events.append((170.0, TimeBetweenSteps(5, "ending", 0.0)))
    write(tmp_path, "rank-0000-attempt-01.jsonl", 0, 1, events)
    supervisor = [
        STARTED,
        (159.0, RestartScheduled(1, 3, 0)),
        (160.0, RanksStarted([4712], 0.5)),
        (170.0, RunFinished("finished", 0, 5, 70.0)),
    ]
    write(tmp_path, "supervisor.jsonl", -1, 0, supervisor)
    (ledger,) = ledgers_of(tmp_path)
    assert ledger.parts_s["restart"] == pytest.approx(60.0)
    assert ledger.unattributed_s == pytest.approx(5 * UNACCOUNTED_S)


def test_a_window_that_a_restart_undid_in_part_is_divided(tmp_path: Path) -> None:
    summed = StepsSummed(
        first_step=1,
        last_step=10,
        num_steps=10,
        step_s=10.0,
        longest_s=1.0,
        longest_step=3,
        phases_s={"forward": 9.0},
        communication_s={},
        unaccounted_s=1.0,
        cpu_s=9.0,
        rss_bytes=1,
        peak_bytes=1,
    )
    start = (101.0, TimeBetweenSteps(0, "startup", 1.0))
    write(tmp_path, "rank-0000-attempt-00.jsonl", 0, 0, [start, *steps_from(1, 10, 101.0)])
    write(tmp_path, "rank-0001-attempt-00.jsonl", 1, 0, [start, (111.0, summed)])
    for rank in (0, 1):
        again = [(114.0, TimeBetweenSteps(6, "startup", 1.0)), *steps_from(7, 10, 114.0)]
        write(tmp_path, f"rank-000{rank}-attempt-01.jsonl", rank, 1, again)
    _, ledger = ledgers_of(tmp_path)
    assert ledger.num_steps == 10
    assert ledger.parts_s["steps done again"] == pytest.approx(4.0)
    assert ledger.parts_s["forward"] == pytest.approx(9.0 * 0.6 + 4 * 0.3)


def test_numbers_that_no_clock_has_are_clipped(tmp_path: Path) -> None:
    huge = replace(step_of(1), phases_s={"forward": 1e300, "backward": -5.0, "data": 0.5})
    events: list[Timed] = [
        (105.0, TimeBetweenSteps(0, "startup", 1e308)),
        (106.0, huge),
        (107.0, TimeBetweenSteps(1, "startup", 1e308)),
    ]
    write(tmp_path, "rank-0000-attempt-00.jsonl", 0, 0, events)
    (ledger,) = ledgers_of(tmp_path)
    assert ledger.parts_s["backward"] == 0
    assert 0 < ledger.counted_twice_s < 1e14
