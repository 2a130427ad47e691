"""The ledger of real runs: known sleeps are where they belong, and a restart leaves no second
unclaimed."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import TINY, events, run, write_text
from phalanx.observe.events import StepFinished
from phalanx.report.event_log import read_event_log
from phalanx.report.ledger import RankLedger
from phalanx.report.reduce import collect_run_facts

NAP_S, LEAST_SHARE_OF_NAP = 1.0, 0.95
# Three times what was measured on a quiet machine, for one that is not.
NAP_SLACK_S, MAX_UNATTRIBUTED_SHARE = 0.3, 0.03
# By so much of its own work one rank may take longer than the other, however slow the machine is.
WORK_SLACK_SHARE = 0.2
NAPS = f"""
import time


def nap():
    time.sleep({NAP_S})
"""
PART_OF_NAP = {
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "ckpt_stage": "checkpoint",
}
JOB = (
    *TINY,
    "data.source=text",
    "parallel.ranks=2",
    "model.dim=128",
    "data.seq_len=64",
    "checkpoint.every_steps=5",
    "checkpoint.asynchronous=false",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ledger")
    write_text(folder / "text")
    (folder / "naps.py").write_text(NAPS)
    return folder


def ledgers_of(run_dir: Path) -> list[RankLedger]:
    ledgers = read_event_log(run_dir).ledger.build_ledgers()
    for ledger in ledgers:
        assert ledger.is_supervised
        assert ledger.counted_twice_s == 0
        # A rank may lose its processor between two phases.
        most_s = MAX_UNATTRIBUTED_SHARE * ledger.wall_s + sum_queued_s(run_dir, ledger.rank)
        assert ledger.unattributed_s <= most_s, ledger
    return ledgers


def sum_queued_s(run_dir: Path, rank: int) -> float:
    """Seconds for which others had the processor that a rank wanted, as the kernel counted them: by
    so much work takes longer, and begins later."""
    steps = events(run_dir, StepFinished)
    return sum(each.event.queued_s for each in steps if each.rank == rank)


def test_each_sleep_lands_in_its_part_and_the_other_rank_waits(folder: Path) -> None:
    """Rank 0 sleeps once in each of five phases of one step or another. Rank 1 does not: what it
    has more of is waiting, of those in a step."""
    naps = ",".join(
        f'"naps:nap:rank=0,step={5 + index},phase={phase}"'
        for index, phase in enumerate(PART_OF_NAP)
        if phase != "ckpt_stage"
    )
    naps += ',"naps:nap:rank=0,step=15,phase=ckpt_stage"'
    done = run("train", *JOB, f"resilience.inject=[{naps}]", "run.dir=naps", cwd=folder)
    assert done.code == 0, done.err
    sleeper, other = ledgers_of(folder / "naps")
    sleeper_queued_s, other_queued_s = (sum_queued_s(folder / "naps", rank) for rank in (0, 1))
    for part in PART_OF_NAP.values():
        # A sleep is never shorter.
        assert sleeper.parts_s[part] >= LEAST_SHARE_OF_NAP * NAP_S, part
        # A save ends on both together, when the disk has it.
        if part != "checkpoint":
            slept_s = sleeper.parts_s[part] - other.parts_s[part]
            slack_s = WORK_SLACK_SHARE * other.parts_s[part]
            assert slept_s >= NAP_S - NAP_SLACK_S - slack_s - other_queued_s, part
            assert slept_s < 2 * NAP_S + slack_s + sleeper_queued_s, part
    waited_s = other.parts_s["communication"] - sleeper.parts_s["communication"]
    assert waited_s >= 3 * NAP_S - other_queued_s
    # In a backward both ranks look alike to whoever adds phases up: the wait tells them apart.
    assert other.communication_s["dp: all_reduce gradients"] >= NAP_S
    # What is waited for in Python is told by its caller, too: rank 0 slept before the sum of a step.
    callers = collect_run_facts(folder / "naps").callers
    step_facts = max(callers, key=lambda each: each.most_wait_s)
    assert (step_facts.operation, step_facts.num_ranks) == ("all_reduce", 2)
    assert step_facts.most_wait_s >= LEAST_SHARE_OF_NAP * NAP_S - other_queued_s
    assert step_facts.num_calls >= 2 * sleeper.num_steps


def test_a_restart_is_in_the_ledger(folder: Path) -> None:
    """Killed in step 13, five steps after a save: three steps were for nothing."""
    killed = 'resilience.inject=["kill:rank=1,step=13"]'
    anew = "resilience.keep_ranks=false"
    done = run("train", *JOB, killed, anew, "run.dir=killed", cwd=folder)
    assert done.code == 0, done.err
    for ledger in ledgers_of(folder / "killed"):
        assert ledger.num_steps == 20
        assert ledger.parts_s["restart"] > 0
        if ledger.rank == 0:
            assert ledger.parts_s["steps done again"] > 0
