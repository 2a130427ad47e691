"""`phalanx drill` on real runs: what it says of a kill and a preemption is so, trials that are in a
campaign are not run again, and a stop leaves nothing behind.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from commands import (
    PHALANX,
    SLACK,
    TINY,
    environment,
    finish,
    start,
    survivors,
    wait_until,
    write_text,
)
from phalanx.drills.command import find_run_processes
from phalanx.drills.drive import DrillRequest, DrillResult, run_drill
from phalanx.drills.job import load_drilled_job
from phalanx.drills.record import read_run_record
from phalanx.drills.trials import ALL_FAULTS, choose_fault_names

STEPS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drills")
    write_text(folder / "text")
    return folder


@pytest.fixture(autouse=True)
def warm_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)


def drill(
    folder: Path, *faults: str, out: str, campaign: str | None = None, share: int = 1
) -> DrillResult:
    keys = [*TINY, f"data.source={folder / 'text'}", "parallel.ranks=2"]
    # Steps of a few hundredths of a second: a preemption is heard of in time.
    keys += ["train.global_batch_size=32", f"train.steps={STEPS}"]
    return run_drill(
        DrillRequest(
            load_drilled_job(None, keys, num_steps=STEPS),
            choose_fault_names(faults),
            seed=1,
            campaign=folder / campaign if campaign else None,
            out=folder / out,
            command=PHALANX,
            share=share,
        )
    )


def require_passed(result: DrillResult) -> None:
    """Every bar is met, those of seconds with the room that a busy machine needs; steps are steps
    there, too."""
    for row in result.rows:
        # What cannot run here was not drilled.
        if row.skipped:
            continue
        assert row.measured is not None
        assert row.bars is not None
        missed = {check.name for check in row.checks if not check.ok}
        assert missed <= {"detected after", "training again after"}, row.checks
        measured, bars = row.measured, row.bars
        for seconds, bar_s in (
            (measured.detected_s, bars.detected_s),
            (measured.trained_again_s, bars.trained_again_s),
        ):
            if bar_s is not None:
                assert seconds is not None, row.checks
                assert seconds <= SLACK * bar_s, row.checks
        if bars.detected_steps is not None:
            assert measured.detected_steps is not None, row.checks
            assert measured.detected_steps <= bars.detected_steps, row.checks


def test_a_kill_and_a_preemption_pass_and_are_not_run_again(folder: Path) -> None:
    result = drill(folder, "kill", "preempt", out="first", campaign="campaign.jsonl")
    require_passed(result)
    kill, preempt = result.rows
    assert kill.measured is not None
    assert preempt.measured is not None
    assert kill.measured.ranks == (kill.place.rank,)
    assert preempt.measured.exit_codes == (75, 0)
    assert preempt.measured.lost_steps == 0
    # The truth is on record where the manifest says it.
    record = read_run_record(folder / "first" / "runs" / "kill-1-0" / "run")
    (strike,) = record.strikes
    assert (strike.rank, strike.step, strike.phase) == (
        kill.place.rank,
        kill.place.step,
        kill.place.phase,
    )
    assert list(record.losses) == list(range(1, STEPS + 1))
    assert not survivors(folder / "first")
    # Again: nothing runs, and the same is said.
    again = drill(folder, "kill", "preempt", out="second", campaign="campaign.jsonl")
    assert again.rows == result.rows
    assert not again.finished
    assert not (folder / "second").exists()


@pytest.mark.long
def test_faults_that_share_a_run_are_judged_one_by_one(folder: Path) -> None:
    result = drill(folder, "kill", "crash", "preempt", "kill_two", out="shared", share=3)
    require_passed(result)
    rows = {row.fault: row for row in result.rows}
    assert {name: row.sharing for name, row in rows.items()} == {
        "kill": 3,
        "crash": 3,
        "kill_two": 3,
        # Its run ends: it has one of its own.
        "preempt": 1,
    }
    # One run of three parts, each with its own fault, verdict and steps.
    runs = {path.name for path in (folder / "shared" / "runs").iterdir()}
    assert runs == {"undisturbed-3", "shared-kill-1-0", "undisturbed", "preempt-1-0"}
    record = read_run_record(folder / "shared" / "runs" / "shared-kill-1-0" / "run")
    assert list(record.losses) == list(range(1, 3 * STEPS + 1))
    for number, name in enumerate(("kill", "crash", "kill_two")):
        place = rows[name].place
        assert number * STEPS < place.step <= (number + 1) * STEPS
        assert (place.rank, place.step) in {(each.rank, each.step) for each in record.strikes}
    assert not survivors(folder / "shared")


@pytest.mark.long
def test_a_stop_ends_the_run_that_goes_on(folder: Path) -> None:
    keys = [*TINY, "data.source=text", "parallel.ranks=2", "train.steps=1000000"]
    process = start("drill", "kill", *keys, "--out", "stopped", cwd=folder)
    run_dir = folder / "stopped" / "runs" / "undisturbed" / "run"
    wait_until(lambda: (run_dir / "events").is_dir() and find_run_processes(run_dir))
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.code == 130
    assert "nothing is left of it" in done.err
    wait_until(lambda: not find_run_processes(run_dir))


@pytest.mark.long
def test_every_fault_strikes_and_leaves_nothing_behind(folder: Path) -> None:
    """It is answered as its bars want it, what it left was cleaned up, and the row says so."""
    result = drill(folder, ALL_FAULTS, out="all", campaign="all.jsonl")
    require_passed(result)
    assert not survivors(folder / "all")
    lines = (folder / "all.jsonl").read_text().splitlines()
    assert len(lines) == sum(not row.skipped for row in result.rows)
    assert all(json.loads(line)["checks"] for line in lines)
