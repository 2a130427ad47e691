"""Soaks without a run: which faults can be mixed, where a seed lets them strike, and what counts as
the answer to each of many in one record.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli._app import run_command_line
from phalanx.core.errors import UsageError
from phalanx.core.registry import list_modules_of_registry
from phalanx.drills.command import CommandEnd
from phalanx.drills.record import RunRecord
from phalanx.drills.soak.kept import BEGUN_FILE_NAME, SOAK_RESULT_FILE_NAME, BegunSoak, claim_folder
from phalanx.drills.soak.measure import (
    AnsweredStrike,
    count_steps_done_again,
    find_early_verdicts,
    list_false_verdicts,
    measure_strikes,
    sum_charges_s,
)
from phalanx.drills.soak.mix import PlannedStrike, choose_mix, draw_strikes
from phalanx.drills.soak.totals import compute_soak_goodput, judge_checkpoints, judge_samples
from phalanx.drills.trials import DrillShape, TrialPlace, load_fault, write_inject_texts
from phalanx.observe import events
from phalanx.observe.events import Envelope, Event
from phalanx.resilience.fault import FAULTS_PACKAGE, parse_fault
from phalanx.resilience.strikes import Strike

SHAPE = DrillShape(num_ranks=2, num_steps=4000, save_every_steps=20)
GAP = 100


# --- the mix --------------------------------------------------------------------------------------


def test_each_fault_is_in_the_mix_or_left_out_with_a_reason() -> None:
    mix = choose_mix([], fault_every_s=60.0)
    left_out = {each.fault: each.why for each in mix.left_out}
    assert sorted([*mix.faults, *left_out]) == list_modules_of_registry(FAULTS_PACKAGE)
    assert {"kill", "freeze", "flip_gradient", "kill_in_save", "slow"} <= set(mix.faults)
    assert "--resume" in left_out["preempt"]
    assert "the run ends" in left_out["crash_loop"]
    assert "weights differ" in left_out["nan"]
    assert "damaged checkpoint" in left_out["lose_shard"]
    assert "stage" in left_out["disk_full"]
    assert "at a save" in left_out["no_descriptors"]
    assert "one attempt" in left_out["kill_recovering"]
    assert "resilience.check_memory_every=1" in left_out["flip_optimizer"]
    # Twenty seconds of it, and the next one may come after half of thirty.
    assert "slow" not in choose_mix([], fault_every_s=30.0).faults


def test_named_faults_are_mixed_or_refused() -> None:
    mix = choose_mix(["flip_optimizer", "kill", "flip_parameter"], fault_every_s=30.0)
    assert mix.faults == ("flip_optimizer", "kill", "flip_parameter")
    assert mix.left_out == ()
    assert mix.list_overrides() == [
        "resilience.check_memory_every=1",
        "observe.invariants_every=5",
    ]
    more = choose_mix(["all", "flip_parameter"], fault_every_s=30.0)
    assert "flip_parameter" in more.faults
    assert "flip_parameter" not in [each.fault for each in more.left_out]
    for name in ("kill_supervisor", "tear_manifest", "clock_back", "slow"):
        with pytest.raises(UsageError, match=f"{name} cannot be one of many"):
            choose_mix(["kill", name], fault_every_s=30.0)


def test_no_two_faults_of_a_mix_need_a_key_with_different_values() -> None:
    names = [name for name in list_modules_of_registry(FAULTS_PACKAGE) if _is_mixable(name)]
    texts = choose_mix(names, fault_every_s=60.0).list_overrides()
    assert texts
    assert len({text.split("=")[0] for text in texts}) == len(texts)


def _is_mixable(name: str) -> bool:
    try:
        choose_mix([name], fault_every_s=60.0)
    except UsageError:
        return False
    return True


def test_strikes_are_those_of_the_seed_apart_and_each_fault_as_often_as_another() -> None:
    faults = choose_mix([], fault_every_s=60.0).faults
    drawn = [draw_strikes(faults, SHAPE, gap_steps=GAP, seed=seed) for seed in range(20)]
    assert drawn[0] == draw_strikes(faults, SHAPE, gap_steps=GAP, seed=0)
    for strikes, others in zip(drawn, drawn[1:] + drawn[:1], strict=True):
        assert strikes != others
        assert len(strikes) == 40
        steps = [each.place.step for each in strikes]
        gaps = [after - before for before, after in pairwise(steps)]
        # Half of the gap, less what it is from a step to the nearest save.
        assert min(gaps) >= GAP // 2 - SHAPE.save_every_steps
        assert steps[0] > 5
        assert steps[-1] <= SHAPE.num_steps - 10
        names = [each.fault for each in strikes]
        assert {names.count(name) for name in faults} == {len(strikes) // len(faults)} | {
            len(strikes) // len(faults) + 1
        }
        for each in strikes:
            assert each.place.phase in load_fault(each.fault).expectation.phases
            if each.fault == "kill_in_save":
                assert each.place.step % SHAPE.save_every_steps == 0
            main, *_ = [parse_fault(text) for text in each.inject]
            assert (main.name, main.rank, main.step, main.phase) == (
                each.fault,
                each.place.rank,
                each.place.step,
                each.place.phase,
            )
        # Strikes are kept by their texts: two that are equal would be one.
        texts = [text for each in strikes for text in each.inject]
        assert len(set(texts)) == len(texts)


# --- what each was answered with ------------------------------------------------------------------


def said(event: Event, at_s: float, *, rank: int = -1, attempt: int = 0) -> Envelope:
    return Envelope(event, rank, attempt, 1e9 + at_s, 0, at_s)


def finished(step: int, at_s: float, rank: int, attempt: int) -> Envelope:
    values: dict[str, Any] = {
        "step": step,
        "loss": 5.0,
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


def train(first: int, last: int, began_s: float, attempt: int) -> list[Envelope]:
    """Both ranks train steps of one second; step `first` ends a second after `began_s`."""
    steps = range(first, last + 1)
    return [
        finished(step, began_s + 1 + step - first, rank, attempt)
        for step in steps
        for rank in (0, 1)
    ]


def failed(rank: int, detail: str) -> events.RankFailed:
    return events.RankFailed(rank, 7, "data", "signal", detail, 0.01)


def plan(fault: str, rank: int, step: int, phase: str = "data") -> PlannedStrike:
    place = TrialPlace(rank, step, phase)
    return PlannedStrike(fault, place, write_inject_texts(fault, place, SHAPE))


def strike(fault: str, rank: int, step: int, at_s: float) -> Strike:
    return Strike(fault, rank, step, "data", at_s)


PLANNED = [plan("kill", 1, 30), plan("freeze", 0, 60), plan("segfault", 1, 90)]
STRIKES = [strike("kill", 1, 30, 30.5), strike("freeze", 0, 60, 63.5)]
# Rank 1 dies in step 30; from step 28 both do two steps again. Rank 0 freezes in step 60.
STEPS = [
    *train(1, 29, 1.0, 0),
    *train(28, 59, 31.0, 1),
    *train(60, 80, 70.0, 2),
]
KILLED = said(failed(1, "killed by SIGKILL"), 30.7)
FROZEN = said(events.HangFound("frozen", [0], 60, "data", "", "", 4.2, 4.0), 67.7)


def measure(*more: Envelope, strikes: list[Strike] = STRIKES) -> list[AnsweredStrike]:
    record = RunRecord(Path("nowhere"), (*STEPS, KILLED, FROZEN, *more), tuple(strikes))
    return measure_strikes(record, PLANNED, SHAPE, step_p99_s=1.0)


def test_each_strike_is_measured_until_the_next() -> None:
    kill, freeze, segfault = measure()
    assert kill.struck_s == pytest.approx(28.5)
    assert (kill.measured.verdict, kill.measured.ranks) == ("killed", (1,))
    assert kill.measured.detected_s == pytest.approx(0.2)
    # Step 30 ends at 34.
    assert kill.measured.trained_again_s == pytest.approx(3.5)
    assert kill.measured.lost_steps == 2
    assert kill.is_passed
    assert (freeze.measured.verdict, freeze.measured.ranks) == ("frozen", (0,))
    assert freeze.measured.trained_again_s == pytest.approx(7.5)
    assert freeze.measured.lost_steps == 0
    assert freeze.is_passed
    assert [check.name for check in segfault.checks] == ["struck"]
    assert not segfault.is_passed


def test_a_verdict_that_comes_after_the_next_strike_is_missed_by_one_and_wrong_for_the_other() -> (
    None
):
    record = RunRecord(
        Path("nowhere"),
        (*STEPS, said(failed(1, "killed by SIGKILL"), 64.0), FROZEN),
        tuple(STRIKES),
    )
    kill, freeze, _ = measure_strikes(record, PLANNED, SHAPE, step_p99_s=1.0)
    assert kill.measured.verdict == "none"
    assert freeze.measured.verdict == "killed"
    assert not kill.is_passed
    assert not freeze.is_passed


def test_verdicts_on_nothing_are_false_ones() -> None:
    late = said(failed(0, "killed by SIGSEGV"), 50.0)
    kill, freeze, _ = measure(late)
    assert kill.measured.verdict == "killed"
    assert kill.measured.false_verdicts == ("segmentation fault",)
    assert not kill.is_passed
    assert freeze.measured.false_verdicts == ()
    # Before the run trains again a second verdict belongs to the fault.
    (kill, *_) = measure(said(failed(0, "killed by SIGSEGV"), 31.0))
    assert kill.measured.false_verdicts == ()
    early = RunRecord(Path("nowhere"), (said(failed(0, "killed by SIGKILL"), 3.0),), STRIKES_TUPLE)
    assert [each.kind for each in find_early_verdicts(early)] == ["killed"]
    # In the run that nothing strikes every verdict is false.
    healthy = RunRecord(Path("nowhere"), (*STEPS, FROZEN), ())
    assert list_false_verdicts(healthy, early, measure(late)) == [
        "frozen (undisturbed run)",
        "killed",
        "segmentation fault",
    ]


STRIKES_TUPLE = tuple(STRIKES)


def test_ranks_that_miss_the_store_later_give_no_false_verdict() -> None:
    planned = [plan("kill_store", 0, 30)]
    lost = said(events.StoreLost(30, "exit status -9", True), 30.6)
    missed = said(
        failed(-1, "the process that holds the rendezvous store ended (exit status -9)"), 50.0
    )
    steps = [*train(1, 50, 1.0, 0), *train(51, 60, 53.0, 1)]
    record = RunRecord(
        Path("nowhere"), (*steps, lost, missed), (strike("kill_store", 0, 30, 30.5),)
    )
    (answered,) = measure_strikes(record, planned, SHAPE, step_p99_s=1.0)
    assert answered.measured.verdict == "store killed"
    assert answered.measured.trained_again_s == pytest.approx(1.5)
    assert answered.measured.false_verdicts == ()
    assert answered.is_passed


def test_a_strike_counts_only_with_all_that_come_with_it() -> None:
    both = [plan("kill_two", 1, 30)]
    record = RunRecord(Path("nowhere"), (*STEPS, KILLED), (strike("kill_two", 1, 30, 30.5),))
    (alone,) = measure_strikes(record, both, SHAPE, step_p99_s=1.0)
    assert not alone.measured.has_struck
    together = RunRecord(
        Path("nowhere"), record.envelopes, (*record.strikes, strike("kill", 0, 30, 30.6))
    )
    (answered,) = measure_strikes(together, both, SHAPE, step_p99_s=1.0)
    assert answered.measured.has_struck
    assert answered.measured.verdict == "killed"


def test_steps_are_done_again_before_and_after_the_newest() -> None:
    record = RunRecord(Path("nowhere"), tuple(STEPS), ())
    assert count_steps_done_again(record, 30.5) == 2
    assert count_steps_done_again(record, 40.0) == 0
    twice = RunRecord(Path("nowhere"), (*STEPS, *train(70, 74, 100.0, 3)), ())
    assert count_steps_done_again(twice, 95.0) == 5


# --- the run as a whole ---------------------------------------------------------------------------


def test_the_ceiling_charges_each_fault_its_bar() -> None:
    # A step that is computed again costs none; of flipped weights an interval is lost, and ten steps.
    flips = [plan("flip_gradient", 0, 9), plan("flip_parameter", 0, 19)]
    assert sum_charges_s(flips, SHAPE, 0.1) == pytest.approx(3.0)
    charged_s = sum_charges_s(PLANNED, SHAPE, 0.1)
    assert charged_s == 5.0 + 20.0 + 5.0
    goodput = compute_soak_goodput(0.9, 0.72, 90.0, charged_s)
    assert goodput.ceiling == pytest.approx(0.675)
    assert goodput.share_of_ceiling == pytest.approx(0.72 / 0.675)
    assert compute_soak_goodput(None, 0.7, 90.0, 30.0).share_of_ceiling is None
    assert compute_soak_goodput(0.9, None, 90.0, 30.0).share_of_ceiling is None


def test_a_torn_checkpoint_and_one_that_is_gone_are_found(tmp_path: Path) -> None:
    nothing = RunRecord(tmp_path, (), ())
    assert not judge_checkpoints(nothing, keeps_all=False).ok
    torn = tmp_path / "checkpoints" / "step-20"
    torn.mkdir(parents=True)
    found = judge_checkpoints(nothing, keeps_all=False)
    assert not found.ok
    assert "manifest.json is missing" in found.found
    saved = said(events.CheckpointSaved(40, "", 1, 0.1), 40.0)
    gone = judge_checkpoints(RunRecord(tmp_path, (saved,), ()), keeps_all=True)
    assert "that of step 40 was saved and is gone" in gone.found
    kept = judge_checkpoints(RunRecord(tmp_path, (saved,), ()), keeps_all=False)
    assert "step 40" not in kept.found


def test_a_run_without_records_of_samples_proves_nothing(tmp_path: Path) -> None:
    check = judge_samples(tmp_path, 10)
    assert not check.ok
    assert "no record of its samples" in check.found


# --- the command line -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--campaign=c.jsonl"], "--campaign of trials"),
        (["--repeat=2", "--steps=50"], "--repeat and --steps of trials"),
        (["preempt"], "preempt cannot be one of many faults in a run"),
        (["train.steps=9"], "train.steps = 9 was given"),
        (["flip_parameter", "parallel.dp_shard=2"], "flip_parameter does not fit this job"),
    ],
)
def test_what_a_soak_cannot_do_is_refused_before_any_run(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    assert run_command_line(["drill", "--soak=1", f"--out={out}", *arguments, "--json"]) == 2
    body = json.loads(capsys.readouterr().out)
    assert body["schema"] == "phalanx.error/1"
    assert words in str(body)
    assert not out.exists()


# --- a soak that was stopped ----------------------------------------------------------------------

ENDED = CommandEnd(0, 12.5, False, 100.0, 101.0, 0)


def test_a_soak_that_was_stopped_goes_on_with_what_had_ended(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert claim_folder(out, "key") == BegunSoak("key")
    (out / "runs" / "probe").mkdir(parents=True)
    # Stopped before anything had ended: it is still the same soak.
    assert claim_folder(out, "key") == BegunSoak("key")
    # And another may begin, as none of its runs has.
    assert claim_folder(out, "other") == BegunSoak("other")
    BegunSoak("key", 0.25, ENDED).write(out)
    assert claim_folder(out, "key") == BegunSoak("key", 0.25, ENDED)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (BEGUN_FILE_NAME, None, "another job, mix, length, seed, code or machine"),
        (SOAK_RESULT_FILE_NAME, "{}", "this soak has ended"),
        (BEGUN_FILE_NAME, "[]", "it is not phalanx.drill-soak-begun/1"),
        (BEGUN_FILE_NAME, '{"schema": "phalanx.drill-soak-begun/1"}', "key"),
        (BEGUN_FILE_NAME, "torn {", BEGUN_FILE_NAME),
    ],
)
def test_the_runs_of_another_soak_are_left_alone(
    name: str, text: str | None, words: str, tmp_path: Path
) -> None:
    BegunSoak("key", 0.25, ENDED).write(tmp_path)
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=words):
        claim_folder(tmp_path, "other" if text is None else "key")


def test_runs_that_no_soak_began_are_left_alone(tmp_path: Path) -> None:
    kept = tmp_path / "runs" / "undisturbed" / "weights"
    kept.parent.mkdir(parents=True)
    kept.write_text("mine")
    with pytest.raises(UsageError, match="has runs already"):
        claim_folder(tmp_path, "key")
    assert kept.read_text() == "mine"
