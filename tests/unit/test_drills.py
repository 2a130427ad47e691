"""Drills without a run: trials that a seed draws, what is read from events, bars, and campaigns that
go on."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import phalanx
from browser import open_browser
from phalanx.cli._app import run_command_line
from phalanx.cli._drill import split_faults_from_job
from phalanx.core.digest import digest
from phalanx.core.errors import UsageError
from phalanx.core.registry import list_modules_of_registry
from phalanx.drills.campaign import (
    Circumstances,
    TrialRow,
    append_row,
    build_row,
    build_skipped_row,
    read_campaign,
    select_newest_rows,
)
from phalanx.drills.command import CommandEnd
from phalanx.drills.drive import (
    DrillRequest,
    DrillResult,
    _count_runs_to_come,
    read_job_facts,
    run_drill,
)
from phalanx.drills.fault_code import RECOVERY_FILES, digest_fault_code
from phalanx.drills.fits import find_reason_against_job
from phalanx.drills.job import (
    count_replicas_of_weights,
    has_one_group,
    load_drilled_job,
    measure_job,
)
from phalanx.drills.judge import Bars, Measured, build_bars, judge_trial
from phalanx.drills.load import LoadMeter, average_loads
from phalanx.drills.page import render_drill_page, write_drill_page
from phalanx.drills.record import RunRecord
from phalanx.drills.run_trial import (
    FinishedTrial,
    TrialRunner,
    UndisturbedRun,
    compare_losses,
    measure_trial,
)
from phalanx.drills.shared_run import (
    group_trials,
    list_keys_of_shared_run,
    move_trials,
    run_shared_trials,
)
from phalanx.drills.trials import DrillShape, choose_fault_names, draw_trials, load_fault
from phalanx.drills.verdicts import (
    Verdict,
    count_starved_ranks,
    find_named_ranks,
    find_verdicts,
)
from phalanx.job.load import load_job
from phalanx.job.schema import Checkpoint, Observe
from phalanx.launch.processor_watch import STARVED
from phalanx.observe import events
from phalanx.observe.events import Envelope, Event
from phalanx.plan.layout import Layout
from phalanx.resilience.expectation import EACH_SAMPLE_ONCE, NO_VERDICT, SAMPLES_LEFT_OUT
from phalanx.resilience.fault import FAULTS_PACKAGE, parse_fault
from phalanx.resilience.strikes import Strike

SHAPE = DrillShape(num_ranks=4, num_steps=40, save_every_steps=10)
ALL = tuple(list_modules_of_registry(FAULTS_PACKAGE))


# --- the manifest ---------------------------------------------------------------------------------


def test_a_seed_draws_the_same_trials_whatever_else_is_drilled() -> None:
    alone = draw_trials(["freeze"], SHAPE, seed=3, repeats=2)
    among = [t for t in draw_trials(ALL, SHAPE, seed=3, repeats=2) if t.fault == "freeze"]
    assert alone == among
    assert alone[0].place != alone[1].place or alone[0].key != alone[1].key
    assert draw_trials(ALL, SHAPE, seed=4, repeats=1) != draw_trials(ALL, SHAPE, seed=3, repeats=1)


def test_only_faults_that_meet_no_other_share_a_run() -> None:
    names = ["kill", "preempt", "freeze", "flip_optimizer", "crash", "spin", "kill_two"]
    trials = draw_trials(names, SHAPE, seed=0, repeats=1)
    groups = [[trial.fault for trial in group] for group in group_trials(trials, 3)]
    # One ends the run, and one needs a key of the job.
    assert groups == [
        ["kill", "freeze", "crash"],
        ["preempt"],
        ["flip_optimizer"],
        ["spin", "kill_two"],
    ]
    assert [len(group) for group in group_trials(trials, 1)] == [1] * len(names)


def test_trials_of_a_shared_run_strike_in_parts_of_it() -> None:
    shape = replace(SHAPE, num_steps=38)
    trials = draw_trials(["kill", "freeze", "kill_in_save"], shape, seed=0, repeats=1)
    moved = move_trials(trials, shape)
    for number, (trial, at) in enumerate(zip(trials, moved, strict=True)):
        # Of 40 steps: parts begin after a save.
        assert at.place.step == trial.place.step + 40 * number
        assert at.key == trial.key
        assert parse_fault(at.inject[0]).step == at.place.step
    assert "train.steps=120" in list_keys_of_shared_run(shape, 3)


@pytest.mark.parametrize("name", ALL)
def test_every_fault_strikes_inside_the_run_where_it_says(name: str) -> None:
    expectation = load_fault(name).expectation
    for trial in draw_trials([name], SHAPE, seed=0, repeats=50):
        assert 0 <= trial.place.rank < 4
        assert max(5, expectation.warm_up_steps) < trial.place.step < 40
        assert trial.place.phase in expectation.phases
        if expectation.strikes_at_saves:
            assert trial.place.step % 10 == 0
        first = parse_fault(trial.inject[0])
        assert (first.name, first.rank, first.step) == (name, trial.place.rank, trial.place.step)
        # Each text is one that a job takes.
        assert all(parse_fault(text).inject is not None for text in trial.inject)


def test_a_run_too_short_is_refused() -> None:
    with pytest.raises(UsageError, match="slow needs two ranks and"):
        draw_trials(["slow"], DrillShape(2, 20, 5), seed=0, repeats=1)
    with pytest.raises(UsageError, match="two ranks"):
        draw_trials(["kill"], DrillShape(1, 40, 10), seed=0, repeats=1)


def test_faults_and_the_job_are_told_apart() -> None:
    words = ["kill", "my/job.toml", "train.steps=9", "freze", "all"]
    assert split_faults_from_job(words) == (
        ["kill", "freze", "all"],
        ["my/job.toml", "train.steps=9"],
    )
    assert choose_fault_names(["all", "kill"]) == ALL
    with pytest.raises(UsageError, match=r"no fault 'freze'.*freeze"):
        choose_fault_names(["freze"])


# --- what a run says ------------------------------------------------------------------------------


def said(event: Event, at_s: float, *, rank: int = -1, attempt: int = 0) -> Envelope:
    return Envelope(event, rank, attempt, 1e9 + at_s, 0, at_s)


def finished(step: int, at_s: float, *, rank: int = 0, attempt: int = 0) -> Envelope:
    values: dict[str, Any] = {
        "step": step,
        "loss": 5.0 - step / 100,
        "num_targets": 1,
        "tokens_seen": step,
        "learning_rate": 0.1,
        "grad_norm": 1.0,
        "step_s": 1.0,
        "tokens_per_s": 1.0,
        "phases_s": {},
        "unaccounted_s": 0.0,
        "rss_bytes": 1,
    }
    return said(events.StepFinished(**values), at_s, rank=rank, attempt=attempt)


def failed(rank: int, cause: str, detail: str) -> events.RankFailed:
    return events.RankFailed(rank, 7, "data", cause, detail, 0.01)


SLOW: dict[str, Any] = {
    "slow_rank": 3,
    "step": 7,
    "first_step": 2,
    "factor": 2.0,
    "excess_s": 0.1,
    "phase": "forward",
    "waited_s": 0.5,
    "cpu_share": 0.4,
    "peers_cpu_share": 0.9,
}


@pytest.mark.parametrize(
    ("event", "kind", "ranks"),
    [
        (failed(1, "signal", "killed by SIGKILL"), "killed", (1,)),
        (failed(1, "signal", "killed by SIGSEGV"), "segmentation fault", (1,)),
        (failed(1, "signal", "killed by SIGABRT"), "aborted", (1,)),
        (failed(0, "exception", "ValueError: no"), "exception", (0,)),
        (failed(0, "exception", "MemoryError"), "out of memory", (0,)),
        (failed(1, "exception", "the ranks differ in #40 of world: ..."), "ranks disagree", (1,)),
        (failed(2, "exit", "exited with code 0"), "left early", (2,)),
        (failed(2, "hang", "kept the others waiting"), "hang", (2,)),
        (
            events.HangFound("gil_held", [3], 7, "data", "all_reduce #4", "", 4.2, 4.0),
            "gil held",
            (3,),
        ),
        (events.RolledBack(7, "corruption", "replicas differ", 5, -1, 2), "corrupt", (2,)),
        (
            failed(-1, "signal", "the process that starts the ranks was killed by SIGKILL"),
            "server killed",
            (),
        ),
        (
            failed(-1, "signal", "the process that holds the rendezvous store ended (SIGKILL)"),
            "store killed",
            (),
        ),
        (events.StoreLost(7, "exit status -9", True), "store killed", ()),
        (events.StepSkipped(7, "nonfinite_gradients", math.inf, 0, 8), "not finite", ()),
        (events.InvariantChecked(7, "replicas_equal", ok=False, ranks=[2]), "corrupt", (2,)),
        (events.NonFiniteFound(7, "output", "embed", 1), "not finite", (1,)),
        (events.NonFiniteFound(7, "backward", "embed", 1), "not finite", (1,)),
        (events.NonFiniteFound(7, "unknown", "", -1), "corrupt", ()),
        (events.StepSkipped(7, "loss_spike", 1.0, 0, 8), "loss spike", ()),
        (events.RolledBack(7, "loss_spike", "the loss is 9", 5, 80, -1), "loss spike", ()),
        (
            failed(0, "exception", "a.tokens: bytes 4096 to 8192 are not what was written"),
            "data damaged",
            (0,),
        ),
        (events.RankSlow(**SLOW), "slow", (3,)),
        (events.StopRequested(7, "sigterm"), "preempted", ()),
    ],
)
def test_verdicts_are_read_from_events_alone(
    event: Event, kind: str, ranks: tuple[int, ...]
) -> None:
    (verdict,) = find_verdicts([finished(6, 1.0), said(event, 2.0)])
    assert (verdict.kind, verdict.ranks, verdict.step) == (kind, ranks, 7)


def test_what_was_found_in_a_skipped_step_takes_its_place() -> None:
    skipped = events.StepSkipped(7, "nonfinite_gradients", math.inf, 0, 8)
    found = events.NonFiniteFound(7, "output", "embed", 2)
    (verdict,) = find_verdicts([said(skipped, 1.0), said(found, 1.1)])
    assert (verdict.kind, verdict.ranks, verdict.monotonic_s) == ("not finite", (2,), 1.1)


def test_ranks_may_be_named_later_by_the_same_class() -> None:
    unknown = events.NonFiniteFound(7, "unknown", "", -1)
    back = events.RolledBack(8, "corruption", "replicas differ", 5, -1, 2)
    kill = failed(1, "signal", "killed by SIGKILL")
    found = find_verdicts([said(unknown, 1.0), said(kill, 1.5), said(back, 2.0)])
    assert find_named_ranks(found) == (2,)
    assert find_named_ranks(found[1:]) == (1,)
    assert find_named_ranks([]) == ()


def test_what_holds_is_no_verdict() -> None:
    healthy = [
        events.InvariantChecked(7, "replicas_equal", ok=True),
        events.InvariantChecked(7, "replicas_equal", ok=False, is_summary=True),
        events.InvariantChecked(7, "unchanged_by_evaluation", ok=False, ranks=[0, 1]),
        events.StepSkipped(7, "no_targets", 0.0, 0, 8),
    ]
    assert find_verdicts([said(event, 1.0) for event in healthy]) == []


def test_a_rank_that_other_processes_starve_is_no_false_verdict() -> None:
    starved = said(events.RankSlow(**{**SLOW, "why": STARVED}), 1.0)
    slow, kill = said(events.RankSlow(**SLOW), 2.0), said(failed(1, "signal", "killed"), 3.0)
    of_kill = find_verdicts([starved, slow, kill], "killed")
    assert [each.monotonic_s for each in of_kill] == [2.0, 3.0]
    assert [each.monotonic_s for each in find_verdicts([starved, slow], "slow")] == [1.0, 2.0]
    assert count_starved_ranks([starved, slow, kill]) == 1


STRIKE_AT_4 = Strike("kill", 1, 4, "backward", 4.0)
STRIKE_AT_5 = Strike("kill", 1, 5, "backward", 4.5)


def make_record(strike_s: float, envelopes: list[Envelope]) -> RunRecord:
    strike = replace(STRIKE_AT_4, monotonic_s=strike_s)
    return RunRecord(Path("nowhere"), tuple(envelopes), (strike,))


def test_training_again_is_the_first_step_that_was_never_done() -> None:
    """Rank 1 is struck in step 4, which rank 0 still finishes; then both go back to step 2."""
    before = [finished(s, float(s), rank=r) for s in (1, 2, 3) for r in (0, 1)]
    late = [finished(4, 4.1)]
    after = [finished(s, 10.0 + s, rank=r, attempt=1) for s in (3, 4, 5) for r in (0, 1)]
    record = make_record(4.0, [*before, *late, *after])
    assert record.find_trained_again_s(record.strikes[0]) == pytest.approx(11.0)
    # Rank 0 did steps 3 and 4 twice.
    assert record.count_lost_steps() == 2
    never = make_record(4.0, [*before, *late])
    assert math.isnan(never.find_trained_again_s(never.strikes[0]))
    # Nobody was stopped: both ranks went on.
    went_on = make_record(4.0, [*before, *late, *(finished(5, 5.0 + r, rank=r) for r in (0, 1))])
    assert went_on.find_trained_again_s(went_on.strikes[0]) == pytest.approx(2.0)


def test_ranks_that_go_on_without_a_store_have_trained_again() -> None:
    """They did step 5 in the struck attempt, and started again when they came to need the store."""
    before = [finished(s, float(s), rank=r) for s in (1, 2, 3, 4) for r in (0, 1)]
    both = [finished(5, 5.0 + r, rank=r) for r in (0, 1)]
    again = finished(6, 20.0, attempt=1)
    record = make_record(4.0, [*before, *both, again])
    assert record.find_trained_again_s(STRIKE_AT_4, ranks_go_on=True) == pytest.approx(2.0)
    # A server's death may leave ranks the time for a step, and ends them all the same.
    assert record.find_trained_again_s(STRIKE_AT_4) == pytest.approx(16.0)
    alone = make_record(4.0, [*before, both[0], again])
    assert alone.find_trained_again_s(STRIKE_AT_4, ranks_go_on=True) == pytest.approx(16.0)


def test_a_save_that_was_open_at_the_fault_is_not_there_yet() -> None:
    saved = [said(events.CheckpointSaved(step, "", 1, 0.1), float(step)) for step in (2, 4)]
    assert make_record(4.5, saved).count_steps_of_open_save(STRIKE_AT_5, 2) == 0
    late = make_record(4.5, saved[:1])
    assert late.count_steps_of_open_save(STRIKE_AT_5, 2) == 1
    assert late.count_steps_of_open_save(STRIKE_AT_5, 10) == 0
    # A supervisor is killed in step 5: the ranks do two steps more before they see it.
    steps = [finished(s, 4.0 + s / 10, rank=r) for s in (5, 6, 7) for r in (0, 1)]
    again = [finished(s, 20.0 + s, rank=r, attempt=1) for s in (5, 6, 7, 8) for r in (0, 1)]
    left = make_record(4.5, [*saved[:1], *steps, *again])
    assert left.count_steps_of_open_save(STRIKE_AT_5, 2) == 1
    assert left.count_steps_of_open_save(STRIKE_AT_5, 2, ranks_leave_later=True) == 3
    shape = DrillShape(2, 40, 10)
    wanted = load_fault("kill").expectation
    bars = build_bars(wanted, rank=1, shape=shape, step_p99_s=2.0, open_save_steps=3)
    assert bars.lost_steps == 13


def test_a_verdict_before_the_fault_is_a_false_one() -> None:
    crash = failed(0, "exception", "ValueError")
    kill = failed(1, "signal", "killed by SIGKILL")
    record = make_record(4.0, [said(crash, 2.0), said(kill, 4.25)])
    end = CommandEnd(0, 9.0, False, 9.0, 9.0, 0)
    undisturbed = UndisturbedRun(Path("nowhere"), record, 5.0)
    verdicts, wanted = find_verdicts(record.envelopes), load_fault("kill").expectation
    measured = measure_trial(record, verdicts, [end], undisturbed, wanted)
    assert (measured.verdict, measured.ranks, measured.detected_s) == ("killed", (1,), 0.25)
    assert measured.false_verdicts == ("exception",)
    assert measured.is_bit_equal is None
    assert measured.num_restarts == 0


def test_verdicts_and_restarts_after_a_fault_is_over_are_false_and_needless() -> None:
    kill = said(failed(1, "signal", "killed by SIGKILL"), 4.25)
    before = [finished(s, float(s), rank=r) for s in (1, 2, 3) for r in (0, 1)]
    again = [finished(s, 5.0 + s, rank=r, attempt=1) for s in (4, 5) for r in (0, 1)]
    late = said(failed(0, "exception", "ValueError"), 12.0)
    restarts = [said(events.RestartScheduled(1, 3, 0), at_s) for at_s in (2.0, 4.5, 12.5)]
    record = make_record(4.0, [*before, *again, kill, late, *restarts])

    def measure(fault: str) -> Measured:
        verdicts, end = find_verdicts(record.envelopes), CommandEnd(0, 9.0, False, 9.0, 9.0, 0)
        undisturbed = UndisturbedRun(Path("nowhere"), record, 5.0)
        wanted = load_fault(fault).expectation
        return measure_trial(record, verdicts, [end], undisturbed, wanted)

    measured = measure("kill")
    assert measured.false_verdicts == ("exception",)
    assert (measured.num_restarts, measured.needless_restarts) == (3, 2)
    names = [each.name for each in judge_trial(measured, bars_of("kill")) if not each.ok]
    assert {"false verdicts", "needless restarts"} <= set(names)
    # Where the run should have gone on, and where ranks may come to miss the store later.
    assert measure("slow_link").needless_restarts == 3
    assert measure("kill_store").needless_restarts == 1


@dataclass(frozen=True)
class RecordedRunner(TrialRunner):
    """Has run already, and left this record."""

    record: RunRecord = field(kw_only=True)
    code: int = field(kw_only=True)
    limits_s: list[float] = field(default_factory=list, kw_only=True)

    def train(
        self, name: str, overrides: Sequence[str], limit_s: float
    ) -> tuple[RunRecord, CommandEnd]:
        self.limits_s.append(limit_s)
        return self.record, CommandEnd(self.code, 9.0, False, 9.0, 9.0, 0)


def test_each_trial_of_a_shared_run_is_judged_by_its_own_part(tmp_path: Path) -> None:
    """Of three kills one is answered, one is not answered, after which the run ends, and the third
    never strikes."""
    shape = DrillShape(num_ranks=2, num_steps=40, save_every_steps=10)
    trials = draw_trials(["kill"], shape, seed=0, repeats=3)
    first, second, _ = (trial.place for trial in move_trials(trials, shape))
    strikes = [
        Strike("kill", place.rank, place.step, place.phase, float(place.step))
        for place in (first, second)
    ]
    steps = [
        finished(step, step + 0.5, rank=rank, attempt=int(step > first.step))
        for step in range(1, second.step)
        for rank in range(2)
    ]
    answer = said(failed(first.rank, "signal", "killed by SIGKILL"), first.step + 0.1)
    record = RunRecord(tmp_path, (*steps, answer), tuple(strikes))
    straight = RunRecord(tmp_path, tuple(finished(step, float(step)) for step in range(1, 121)), ())
    runner = RecordedRunner(
        load_drilled_job(None, (), num_steps=40), shape, tmp_path, record=record, code=10
    )
    done = run_shared_trials(runner, trials, UndisturbedRun(tmp_path, straight, 5.0))
    assert [each.trial.key for each in done] == [trial.key for trial in trials[:2]]
    assert [each.measured.verdict for each in done] == ["killed", NO_VERDICT]
    assert done[0].measured.ranks == (first.rank,)
    assert done[0].measured.detected_s == pytest.approx(0.1)
    assert done[1].measured.trained_again_s is None
    # The undisturbed run has as many parts as the disturbed one.
    assert runner.limits_s == [runner.find_limit_s(UndisturbedRun(tmp_path, straight, 5.0))]
    # The end of the run is that of all who struck in it.
    assert [each.measured.exit_codes for each in done] == [(10,), (10,)]
    assert set(done[1].losses) == set(range(41, second.step))
    assert set(done[1].undisturbed_losses) == set(range(41, 81))


def test_runs_to_come_count_what_is_left_of_a_shared_one_and_its_undisturbed_run() -> None:
    shape = DrillShape(num_ranks=2, num_steps=40, save_every_steps=10)
    trials = draw_trials(["kill"], shape, seed=0, repeats=3)
    shared, alone = tuple(trials), (trials[2],)
    assert _count_runs_to_come([shared], {}) == 2
    # One of three did not come to strike: its run, and one undisturbed of its own length.
    assert _count_runs_to_come([alone], {3}) == 2
    assert _count_runs_to_come([alone, alone], {1, 3}) == 2


# --- jobs -----------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
README_JOB = (ROOT / "README.md").read_text().partition("```toml\n")[2].partition("```")[0]
LONG_JOB = """
train = { steps = 10_000, global_batch_size = 8 }
data = { seq_len = 64 }
optim = { schedule = "wsd", warmup_steps = 200, decay_fraction = 0.95 }
eval = { every_steps = 1000, keep_best = true }
resilience = { inject = ["kill:rank=1,step=9000"] }

[checkpoint]
every = "auto"
mtbf_hours = 10
every_minutes = 3
keep_last = 2
keep_every = 1000
url = "s3://bucket/run"

[observe]
trace_steps = ["100:103"]
profile_steps = [900]
alert_webhook = "$HOOK"
alert_command = ["page-me"]
metrics_port = 9090
"""


@pytest.mark.parametrize("num_steps", [1, 2, 40])
@pytest.mark.parametrize(
    "text",
    [
        (ROOT / "examples/digits/job.toml").read_text(),
        (ROOT / "examples/regression/job.toml").read_text(),
        README_JOB,
        LONG_JOB,
    ],
    ids=["digits", "regression", "README", "long"],
)
def test_a_job_whose_keys_follow_from_its_steps_is_drilled_in_a_few(
    tmp_path: Path, text: str, num_steps: int
) -> None:
    """And it saves when the drill wants it to, in its own directory, and alerts nobody."""
    path = tmp_path / "job.toml"
    path.write_text(text)
    job = load_drilled_job(str(path), (), num_steps=num_steps).job
    assert job.train.steps == num_steps
    every_steps = max(num_steps // 4, 1)
    own = load_job(path).checkpoint
    assert job.checkpoint == Checkpoint(
        every_steps=every_steps, keep_last=own.keep_last, keep_every=own.keep_every
    )
    assert job.observe == Observe(sinks=())
    assert job.eval.tokens == 0


def test_what_is_said_beside_a_drilled_job_wins(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(LONG_JOB)
    keys = ["eval.tokens=64", "eval.every_steps=20", "checkpoint.every_steps=5"]
    job = load_drilled_job(str(path), keys, num_steps=40).job
    assert (job.eval.tokens, job.eval.every_steps, job.checkpoint.every_steps) == (64, 20, 5)


# --- bars -----------------------------------------------------------------------------------------


GOOD = Measured(
    has_struck=True,
    verdict="killed",
    verdict_text="killed by SIGKILL",
    ranks=(1,),
    detected_s=0.1,
    detected_steps=0,
    false_verdicts=(),
    trained_again_s=1.0,
    lost_steps=3,
    is_bit_equal=True,
    exit_codes=(0,),
    is_overdue=False,
    num_left=0,
    goodput=0.5,
    wall_s=4.0,
)


def bars_of(name: str, *, num_ranks: int = 4) -> Bars:
    shape = DrillShape(num_ranks, 40, 10)
    return build_bars(load_fault(name).expectation, rank=1, shape=shape, step_p99_s=2.0)


def missed(**changes: Any) -> list[str]:
    body = Measured(**(vars(GOOD) | changes))
    return [check.name for check in judge_trial(body, bars_of("kill")) if not check.ok]


def test_each_bar_is_missed_alone() -> None:
    assert missed() == []
    assert missed(verdict="hang") == ["class"]
    assert missed(ranks=(0,)) == missed(ranks=()) == missed(ranks=(0, 1)) == ["rank"]
    assert missed(detected_s=1.01) == missed(detected_s=None) == ["detected after"]
    assert missed(trained_again_s=5.01) == missed(trained_again_s=None) == ["training again after"]
    assert missed(lost_steps=11) == ["steps lost"]
    assert missed(is_bit_equal=False) == missed(is_bit_equal=None) == ["final bits"]
    assert missed(exit_codes=(10,)) == missed(is_overdue=True) == ["exit code"]
    assert missed(num_left=1) == ["left behind"]
    assert missed(false_verdicts=("hang",)) == ["false verdicts"]
    assert missed(has_struck=False) == ["struck"]
    wants_words = replace(bars_of("kill"), says=r"samples \d+")
    assert [each.name for each in judge_trial(GOOD, wants_words) if not each.ok] == ["message"]
    assert all(each.ok for each in judge_trial(replace(GOOD, said="samples 8"), wants_words))
    wants_more = replace(bars_of("kill"), samples=EACH_SAMPLE_ONCE, loss_difference=1e-4)
    good = replace(GOOD, samples=EACH_SAMPLE_ONCE, loss_difference=1e-4)
    assert all(each.ok for each in judge_trial(good, wants_more))
    for change, name in (
        ({"samples": SAMPLES_LEFT_OUT}, "samples"),
        ({"loss_difference": 2e-4}, "losses"),
        ({"loss_difference": None}, "losses"),
    ):
        checks = judge_trial(Measured(**(vars(good) | change)), wants_more)
        assert [each.name for each in checks if not each.ok] == [name]


def test_losses_differ_by_the_most_of_any_step_and_not_where_steps_are_missing() -> None:
    expected = {1: 4.0, 2: 2.0}
    assert compare_losses({1: 4.0, 2: 2.0}, expected) == 0.0
    assert compare_losses({1: 4.0, 2: 1.999}, expected) == pytest.approx(5e-4)
    assert compare_losses({1: 4.0}, expected) is None
    assert compare_losses({1: 4.0, 2: math.nan}, expected) is None


def test_bars_are_those_of_the_fault() -> None:
    # Ten times the 99th percentile of steps, which is 2 s here, is more than 5 s.
    assert bars_of("freeze").detected_s == 20.0
    assert bars_of("preempt").exit_codes == (75, 0)
    assert bars_of("preempt").lost_steps == 0
    assert bars_of("crash_loop").exit_codes == (10,)
    assert bars_of("crash_loop").says
    # It goes back behind the steps that were trained on wrong weights.
    assert bars_of("flip_parameter").lost_steps == 20
    # Of two replicas that differ nobody knows which one is wrong.
    assert bars_of("flip_parameter").rank == 1
    assert bars_of("flip_parameter", num_ranks=2).rank is None
    # After the reduction the gradients of all ranks are wrong, however many there are.
    assert bars_of("flip_gradient").rank is None


def shape_of(*layout: str) -> DrillShape:
    return measure_job(load_drilled_job(None, layout, num_steps=40).job)


@pytest.mark.parametrize(
    ("layout", "num_replicas", "has_one_group"),
    [
        (["parallel.ranks=2"], 2, True),
        (["parallel.ranks=4"], 4, True),
        (["parallel.ranks=2", "parallel.dp_shard=2"], 1, True),
        (["parallel.ranks=2", "parallel.dp_shard=2", "parallel.zero_stage=1"], 1, True),
        (["parallel.ranks=4", "parallel.dp_shard=2", "parallel.dp_replicate=2"], 2, False),
        (["parallel.ranks=2", "parallel.tp=2"], 1, True),
        (["parallel.ranks=4", "parallel.tp=2", "parallel.dp_replicate=2"], 2, False),
        (["parallel.ranks=2", "parallel.cp=2", "parallel.zero_stage=none"], 2, True),
        (["parallel.ranks=2", "parallel.pp=2"], 1, False),
        (["parallel.ranks=4", "parallel.pp=2"], 2, False),
    ],
)
def test_replicas_that_tell_a_flip_are_those_that_update_the_same_weights(
    layout: list[str], num_replicas: int, has_one_group: bool
) -> None:
    shape = shape_of(*layout)
    assert (shape.num_replicas, shape.has_one_group) == (num_replicas, has_one_group)
    flip, disagree = (
        load_fault(name).expectation for name in ("flip_parameter", "wrong_collective")
    )
    assert bool(find_reason_against_job(flip, shape)) == (num_replicas == 1)
    assert bool(find_reason_against_job(disagree, shape)) == (not has_one_group)
    bars = build_bars(flip, rank=1, shape=shape, step_p99_s=0.1)
    assert bars.rank == (1 if num_replicas >= 3 else None)
    # A link is told by all ranks, whatever they hold.
    link = build_bars(load_fault("cut_link").expectation, rank=1, shape=shape, step_p99_s=0.1)
    assert link.rank == (1 if shape.num_ranks >= 3 else None)


def test_experts_of_two_ranks_are_others_and_the_ranks_beside_them_hold_copies() -> None:
    assert count_replicas_of_weights(Layout(dp_shard=4, ep=2), 0) == 2
    assert count_replicas_of_weights(Layout(dp_replicate=2, dp_shard=2, ep=2), 2) == 2
    assert has_one_group(Layout(dp_shard=2, ep=2))
    assert not has_one_group(Layout(dp_shard=4, ep=2))


def test_a_rank_that_checks_its_own_memory_needs_no_replica() -> None:
    shape = shape_of("parallel.ranks=2", "parallel.dp_shard=2", "resilience.check_memory_every=1")
    flip = load_fault("flip_parameter").expectation
    assert not find_reason_against_job(flip, shape)
    assert build_bars(flip, rank=1, shape=shape, step_p99_s=0.1).rank == 1


def test_a_fault_that_nobody_could_see_is_skipped_before_anything_runs() -> None:
    """As one that is rightly called by another class."""
    keys = ["parallel.ranks=4", "parallel.pp=2", "parallel.dp_shard=2"]
    job = load_drilled_job(None, keys, num_steps=40)
    told: list[TrialRow] = []
    result = run_drill(
        DrillRequest(job, ("flip_parameter", "wrong_collective"), command=("false",)),
        on_row=told.append,
    )
    assert told == result.rows
    flip, disagree = result.rows
    assert "with pp=2 x dp_shard=2: no other one holds them" in flip.skipped
    assert "only resilience.check_memory_every=1 sees it" in flip.skipped
    assert "an absent collective" in disagree.skipped
    assert not result.is_passed


# --- campaigns ------------------------------------------------------------------------------------


def make_row(seed: int, measured: Measured = GOOD) -> TrialRow:
    (trial,) = draw_trials(["kill"], SHAPE, seed=seed, repeats=1)
    now = Circumstances("0.1.0", "abc", "2026-01-01", "a machine", "a job")
    return TrialRow("kill", seed, 0, trial.place, trial.inject, now, bars_of("kill"), measured)


def test_a_campaign_reads_what_it_wrote_and_leaves_out_what_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "campaign.jsonl"
    assert read_campaign(path) == []
    rows = [make_row(0), make_row(1, Measured(**(vars(GOOD) | {"verdict": NO_VERDICT})))]
    for row in rows:
        append_row(path, row)
    assert [json.loads(line)["passed"] for line in path.read_text().splitlines()] == [True, False]
    with open(path, "a") as file:
        file.write('{"schema":"phalanx.drill-trial/1","fault":')
    assert read_campaign(path) == rows
    (tmp_path / "other").write_text("a text\n")
    with pytest.raises(UsageError, match="no campaign"):
        read_campaign(tmp_path / "other")


def test_a_trial_is_not_lost_behind_a_torn_line_nor_among_lines_of_others(tmp_path: Path) -> None:
    path = tmp_path / "campaign.jsonl"
    path.write_bytes(b'[1]\n7\n"x"\nnull\n' + b"[" * 100_000 + b'\n{"schema": "phala')
    append_row(path, make_row(0))
    assert read_campaign(path) == [make_row(0)]


@pytest.mark.parametrize(
    ("key", "value"), [("measured", None), ("bars", None), ("bars", {"detected_s": math.inf})]
)
def test_a_line_that_says_no_result_is_no_trial_that_passed(
    tmp_path: Path, key: str, value: dict[str, float] | None
) -> None:
    path = tmp_path / "campaign.jsonl"
    body = json.loads(make_row(0).to_line())
    body[key] = {**body[key], **value} if value else value
    append_row(path, make_row(1))
    path.write_text(json.dumps(body) + "\n" + path.read_text())
    assert read_campaign(path) == [make_row(1)]


def test_a_campaign_redoes_what_was_of_other_code(tmp_path: Path) -> None:
    path = tmp_path / "campaign.jsonl"
    job = load_drilled_job(None, (), num_steps=40)
    shape = measure_job(job.job)
    now = Circumstances.now(digest(read_job_facts(job.job)))
    rows = []
    for seed, code in ((0, digest_fault_code("kill")), (1, "other"), (2, "")):
        (trial,) = draw_trials(["kill"], shape, seed=seed, repeats=1)
        rows.append(
            TrialRow(
                *trial.key,
                trial.place,
                trial.inject,
                replace(now, code=code),
                bars_of("kill"),
                GOOD,
            )
        )
        append_row(path, rows[-1])
    # As a line of an earlier release, which has no digest.
    assert '"code":""' in path.read_text()
    path.write_text(path.read_text().replace(',"code":""', ""))

    def is_done(seed: int, *, redoes_changed: bool) -> bool:
        # Its runs fail at once: what is not done already ends in an error.
        request = DrillRequest(
            job,
            ("kill",),
            seed,
            campaign=path,
            command=("false",),
            redoes_changed=redoes_changed,
        )
        try:
            return run_drill(request).rows == [rows[seed]]
        except UsageError:
            return False

    assert [is_done(seed, redoes_changed=False) for seed in range(3)] == [True, True, True]
    assert [is_done(seed, redoes_changed=True) for seed in range(3)] == [True, False, False]
    # The newest line of a trial counts.
    rows[1] = replace(rows[1], circumstances=rows[0].circumstances)
    append_row(path, rows[1])
    assert is_done(1, redoes_changed=True)
    newest = select_newest_rows(read_campaign(path))
    assert [row.seed for row in newest] == [0, 1, 2]
    assert newest[1].circumstances.code == digest_fault_code("kill")


def test_the_digest_of_a_fault_is_of_its_own_code_and_that_of_recovery(tmp_path: Path) -> None:
    faults = tmp_path / "resilience" / "faults"
    texts = {
        faults / "kill.py": "KILL = 1",
        faults / "kill_two.py": "from phalanx.resilience.faults.kill import KILL",
        faults / "freeze.py": "FREEZE = 1",
        tmp_path / "launch" / "recovery.py": "RECOVERY = 1",
        tmp_path / "observe" / "rank_waits.py": "WAITS = 1",
        tmp_path / "nn" / "model.py": "MODEL = 1",
        tmp_path / "checkpoint" / "exchange" / "families.py": "FAMILIES = 1",
    }

    def list_changed(path: Path) -> set[str]:
        """The faults whose digests are others once `path` has changed."""
        digests = []
        for number, more in enumerate(("", "\nMORE = 1")):
            # A package of its own each time: files are read once in a process.
            package = tmp_path / f"{path.stem}-{number}"
            for file, text in texts.items():
                copied = package / file.relative_to(tmp_path)
                copied.parent.mkdir(parents=True, exist_ok=True)
                copied.write_text(text + (more if file == path else ""))
            names = ("kill", "kill_two", "freeze")
            digests.append({name: digest_fault_code(name, package) for name in names})
        before, after = digests
        return {name for name in before if before[name] != after[name]}

    assert list_changed(faults / "kill.py") == {"kill", "kill_two"}
    assert list_changed(faults / "freeze.py") == {"freeze"}
    assert list_changed(tmp_path / "launch" / "recovery.py") == {"kill", "kill_two", "freeze"}
    assert list_changed(tmp_path / "observe" / "rank_waits.py") == {"kill", "kill_two", "freeze"}
    assert list_changed(tmp_path / "nn" / "model.py") == set()
    assert list_changed(tmp_path / "checkpoint" / "exchange" / "families.py") == set()
    package = Path(phalanx.__file__).parent
    assert all((package / name).exists() for name in RECOVERY_FILES)
    assert len({digest_fault_code(name) for name in ALL}) == len(ALL)


def test_a_campaign_that_cannot_be_written_is_refused_before_any_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign = tmp_path / "no folder" / "campaign.jsonl"
    out = tmp_path / "out"
    assert run_command_line(["drill", "kill", f"--campaign={campaign}", f"--out={out}"]) == 2
    assert f"{campaign} cannot be written (No such file or directory)" in capsys.readouterr().err
    assert not out.exists()


def test_a_page_that_cannot_be_written_is_refused_before_any_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for more in ([], ["--soak=1"]):
        assert run_command_line(["drill", "kill", f"--out={tmp_path / 'file' / 'out'}", *more]) == 7
        assert "is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize("schema", ["drill", "drill-soak"])
def test_a_disk_that_is_full_at_the_end_leaves_what_was_measured(
    schema: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    soak = SimpleNamespace(to_json=lambda: {"passed": True}, is_passed=True)
    monkeypatch.setattr("phalanx.drills.drive.run_drill", lambda *_, **__: make_result())
    monkeypatch.setattr("phalanx.drills.soak.drive.run_soak", lambda *_, **__: soak)
    monkeypatch.setattr("phalanx.drills.page.write_bytes_atomically", refuse)
    monkeypatch.setattr("phalanx.core.files.write_json_atomically", refuse)
    more = ["--soak=1"] if schema == "drill-soak" else []
    assert run_command_line(["drill", "kill", f"--out={tmp_path}", "--json", *more]) == 7
    out, err = capsys.readouterr()
    assert json.loads(out)["schema"] == f"phalanx.{schema}/1"
    assert "No space left" in err


def test_a_result_counts_classes_and_what_was_skipped() -> None:
    (trial,) = draw_trials(["kill"], SHAPE, seed=9, repeats=1)
    skipped = build_skipped_row(trial, "needs root", make_row(0).circumstances)
    wrong = make_row(1, Measured(**(vars(GOOD) | {"verdict": "hang"})))
    result = DrillResult([make_row(0), wrong, skipped])
    assert not result.is_passed
    assert DrillResult([make_row(0), skipped]).is_passed
    assert not DrillResult([skipped]).is_passed
    body = result.to_json()
    assert body["confusion"] == {"killed": {"hang": 1, "killed": 1}}
    assert (body["num_trials"], body["num_passed"], body["num_skipped"]) == (3, 1, 1)
    assert [row["passed"] for row in body["trials"]] == [True, False, None]


def test_the_list_names_every_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["drill", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines if not line.startswith(" ")} == set(ALL)
    assert run_command_line(["drill", "--list", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["schema"] == "phalanx.drill-faults/1"
    assert {fault["name"] for fault in body["faults"]} == set(ALL)
    assert all(fault["summary"] for fault in body["faults"])


# --- the page -------------------------------------------------------------------------------------


def make_result() -> DrillResult:
    """A kill that a run recovers from, and one after which nothing comes."""
    straight = RunRecord(
        Path("nowhere"), tuple(finished(step, float(step)) for step in range(1, 41)), ()
    )
    trials = draw_trials(["kill"], SHAPE, seed=0, repeats=2)
    verdict = Verdict("killed", (1,), 7, 4.25, "<b>bold</b>")
    strike = Strike("kill", 1, 7, "backward", 4.0)
    runs = [
        FinishedTrial(
            trial,
            measured,
            bars_of("kill"),
            losses,
            straight.losses,
            (strike,),
            (verdict,),
            restarts=(6,),
        )
        for trial, measured, losses in zip(
            trials,
            (GOOD, Measured(**(vars(GOOD) | {"verdict": NO_VERDICT}))),
            (straight.losses, dict.fromkeys(range(1, 8), 5.0)),
            strict=True,
        )
    ]
    rows = [build_row(run, make_row(0).circumstances) for run in runs]
    return DrillResult(rows, runs)


def test_the_page_shows_rows_curves_and_lanes(tmp_path: Path) -> None:
    path = write_drill_page(tmp_path / "out", make_result())
    page = path.read_text()
    assert "1 of 2 trials passed" in page
    assert "class none (bar killed)" in page
    assert "killed, rank 1, 250 ms after the first fault" in page
    assert "went on from step 6" in page
    assert "<b>bold</b>" not in page
    nothing = write_drill_page(tmp_path / "nothing", DrillResult([make_row(0)])).read_text()
    assert "Runs</h2>" not in nothing


def test_a_row_and_the_page_say_the_load_and_lines_of_before_have_none(tmp_path: Path) -> None:
    body = json.loads(make_row(0, replace(GOOD, load=5.25)).to_line())
    assert body["measured"]["load"] == 5.25
    del body["measured"]["load"]
    campaign = tmp_path / "campaign.jsonl"
    campaign.write_text(
        json.dumps(body) + "\n" + make_row(1, replace(GOOD, load=5.25)).to_line() + "\n"
    )
    rows = read_campaign(campaign)
    assert [row.measured and row.measured.load for row in rows] == [None, 5.25]
    page = render_drill_page(DrillResult(rows))
    assert ">load</th>" in page
    assert "5.2</td>" in page
    assert "those of the run among them" in page


def test_the_load_counts_who_wants_to_run(tmp_path: Path) -> None:
    now_s = iter(range(100))
    meter = LoadMeter(lambda: float(next(now_s)))
    assert meter.mean is None
    spinner = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
    )
    try:
        assert spinner.stdout is not None
        spinner.stdout.readline()
        for _ in range(3):
            meter.sample()
    finally:
        spinner.kill()
        spinner.communicate()
    assert meter.mean is not None
    assert meter.mean >= 1.0
    assert average_loads([(1.0, 30.0), (4.0, 10.0)]) == 1.75
    assert average_loads([(1.0, 30.0), (None, 10.0)]) is None


def test_a_browser_shows_the_page_without_a_request_or_an_error(tmp_path: Path) -> None:
    path = write_drill_page(tmp_path, make_result())
    with open_browser() as browser:
        for width in (1280, 400):
            browser.open(path.as_uri(), width=width)
            assert browser.problems == []
            assert {url for url in browser.requests if url != "data:,"} == {path.as_uri()}
            assert browser.evaluate(
                "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
            )
            # What struck stands under the step at which it struck.
            edges = browser.evaluate(
                "['#runs .plot', '#runs .eventlane'].map((each) => {"
                " const box = document.querySelector(each).getBoundingClientRect();"
                " return [Math.round(box.left), Math.round(box.right)]; })"
            )
            assert edges[0] == edges[1]


# --- a drill that is stopped ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["drill", "kill"], "the same command begins again (with --campaign FILE it goes on"),
        (["drill", "kill", "--campaign", "a.jsonl"], "the same command goes on from a.jsonl"),
        (["drill", "--soak", "1"], "the same command begins again (with --out DIR it goes on"),
        (["drill", "--soak", "1", "--out", "d"], "goes on from the undisturbed run, if that had"),
    ],
)
@pytest.mark.parametrize(
    ("number", "code", "stopped"),
    [
        (signal.SIGTERM, 75, "stopped by SIGTERM; the run that went on is ended"),
        (signal.SIGUSR1, 75, "stopped by SIGUSR1; the run that went on is ended"),
        (signal.SIGINT, 130, "stopped; the run that went on is ended"),
    ],
)
def test_a_stop_says_what_goes_on_and_how(
    words: list[str],
    told: str,
    number: signal.Signals,
    code: int,
    stopped: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A drill has no --resume: what `phalanx train` advises after such a signal is not true here."""

    def strike(*arguments: Any, **options: Any) -> None:
        signal.raise_signal(number)

    monkeypatch.setattr("phalanx.drills.drive.run_drill", strike)
    monkeypatch.setattr("phalanx.drills.soak.drive.run_soak", strike)
    before = signal.getsignal(number)
    assert run_command_line(words) == code
    assert signal.getsignal(number) == before
    said_text = capsys.readouterr().err
    assert stopped in said_text
    assert told in said_text
    assert "--resume" not in said_text
    assert "no rank was training" not in said_text


def test_a_stop_is_an_error_for_programs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "phalanx.drills.drive.run_drill", lambda *_, **__: signal.raise_signal(signal.SIGTERM)
    )
    assert run_command_line(["drill", "kill", "--json"]) == 75
    body = json.loads(capsys.readouterr().out)
    assert (body["schema"], body["exit_code"]) == ("phalanx.error/1", 75)
    assert body["what"] == "stopped by SIGTERM"
