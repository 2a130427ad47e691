"""A rank that stays alive and does not get on: the right rank, the right kind, and the weights of a
run that nothing happened to."""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import hanging_code
import pytest
from hanging_code import SLOW_FROM_STEP

from commands import (
    SLACK,
    TINY,
    Done,
    environment,
    events,
    loss_curve,
    run,
    start,
    survivors,
    wait_until,
    watching,
    weights,
    write_text,
)
from phalanx.core.black_box_reader import read_last_position
from phalanx.launch.paths import black_box_path
from phalanx.launch.processor_watch import STOPPED_BY_TURNS
from phalanx.launch.work_signs import WINDOW_S
from phalanx.observe.events import (
    HangFound,
    RankFailed,
    RankSlow,
    RanksStarted,
    StepFinished,
    TextGenerated,
)

HERE = Path(__file__).parent
STEPS = 30
# On a busy machine processes of a run, the one that tells of others among them, may have no
# processor for a second.
LIMIT_S, SHORT_LIMIT_S = 2.0, 1.0


def arguments(name: str, *more: str, ranks: int = 2) -> list[str]:
    return [
        "train",
        *TINY,
        "data.source=text",
        f"train.steps={STEPS}",
        "checkpoint.every_steps=10",
        "checkpoint.asynchronous=false",
        f"run.dir={name}",
        f"parallel.ranks={ranks}",
        f"parallel.dp_replicate={ranks}",
        f"resilience.hang_s={LIMIT_S}",
        *more,
    ]


def train(folder: Path, name: str, *more: str, ranks: int = 2) -> Done:
    path = environment().get("PYTHONPATH", "")
    env = environment(PYTHONPATH=f"{HERE}:{path}")
    return run(*arguments(name, *more, ranks=ranks), cwd=folder, env=env)


def inject(name: str, rank: int, step: int, phase: str) -> str:
    return f'resilience.inject=["{name}:rank={rank},step={step},phase={phase}"]'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hangs")
    write_text(folder / "text")
    return folder


@pytest.fixture(scope="module")
def straight(folder: Path) -> Path:
    """A run of two ranks that nothing happens to."""
    done = train(folder, "straight")
    assert done.code == 0, done.err
    assert not events(folder / "straight", HangFound)
    return folder / "straight"


def require_found(
    straight: Path, run_dir: Path, done: Done, kind: str, rank: int, *, bar_s: float
) -> HangFound:
    """The hang was found and named in time, and the run ended as the straight one."""
    assert done.code == 0, done.err
    (found,) = events(run_dir, HangFound)
    (failed,) = events(run_dir, RankFailed)
    assert (found.event.hang_kind, found.event.culprits) == (kind, [rank]), found.event.report
    assert (failed.event.cause, failed.event.failed_rank) == ("hang", rank)
    assert failed.event.hang_kind == kind
    assert found.event.detected_s <= SLACK * bar_s, found.event
    assert failed.event.detected_s == found.event.detected_s
    assert loss_curve(run_dir) == loss_curve(straight)
    assert weights(run_dir) == weights(straight)
    assert not survivors(run_dir)
    starts = events(run_dir, RanksStarted)
    assert [start.event.kept for start in starts] == [[], [1 - rank]]
    return found.event


def require_whole_report(run_dir: Path, found: HangFound, done: Done, fault: str) -> None:
    """A person reads the culprit, the collective that it kept from ending, its line of Python, and
    the whole stacks of all ranks, the culprit's first."""
    (rank,), other = found.culprits, 1 - found.culprits[0]
    named, silence, *stacks = found.report.splitlines()
    # By its name, number and shape.
    collective = r"all_reduce #\d+ of world \(float\d+ \[\d+\], [\d.]+ (KiB|B)\)"
    assert re.fullmatch(collective, found.collective), found.collective
    awaited = re.escape(found.collective)
    if fault == "enter_another_collective":
        words = r"posted barrier #\d+ of world \(.*\) at hanging_code\.py:\d+, where rank"
        words += rf" {other} posted {awaited} at \w+\.py:\d+"
    else:
        words = rf".* in step {found.step}, {found.phase}(, microbatch 0)?, before {awaited},"
        words += rf" last seen at \w+\.py:\d+; rank {other} waits in it for [\d.]+ s"
    assert re.match(rf"rank {rank} {words}", named), named
    limit = re.escape(f"(limit {LIMIT_S} s: resilience.hang_s)")
    assert re.fullmatch(rf"no rank made progress for [\d.]+ s {limit}", silence)
    begin = stacks.index(f"rank {other}:")
    if fault == "freeze":
        # Who is stopped cannot answer: its line is that of its box.
        assert stacks[:begin] == [f"rank {rank}: did not answer"]
    else:
        assert stacks[0] == f"rank {rank}:"
        pattern = rf'  File ".*/hanging_code\.py", line (\d+) in {fault}'
        (line,) = (match[1] for match in map(re.compile(pattern).fullmatch, stacks) if match)
        assert int(line) in {line for *_, line in getattr(hanging_code, fault).__code__.co_lines()}
        assert named.endswith(f"; the rank is in {fault} at hanging_code.py:{line}")
    for stack in filter(None, (stacks[1:begin], stacks[begin + 1 :])):
        # To the loop over steps, and not to what started the process.
        assert [line.split()[-1] for line in stack[-3:]] == ["step", "_run_steps", "run"]
    assert named in done.out
    assert f"stacks of all ranks: phalanx report {run_dir.name}" in done.out
    assert found.report in html.unescape((run_dir / "report.html").read_text())


KINDS = {
    "freeze": ("frozen", "backward"),
    "hold_lock_asleep": ("gil_held", "forward"),
    "hold_lock_busy": ("gil_held", "backward"),
    "spin": ("spinning", "data"),
    "sleep": ("waiting_elsewhere", "optimizer"),
    "enter_another_collective": ("absent_collective", "forward"),
}


@pytest.mark.parametrize(
    ("fault", "rank"),
    [
        ("freeze", 1),
        pytest.param("hold_lock_asleep", 0, marks=pytest.mark.long),
        pytest.param("hold_lock_busy", 1, marks=pytest.mark.long),
        pytest.param("spin", 1, marks=pytest.mark.long),
        pytest.param("sleep", 0, marks=pytest.mark.long),
        pytest.param("enter_another_collective", 0, marks=pytest.mark.long),
    ],
)
def test_the_rank_and_the_kind_are_named(
    folder: Path, straight: Path, fault: str, rank: int
) -> None:
    kind, phase = KINDS[fault]
    # Ranks that share memory notice another collective by themselves.
    collectives = "gloo" if kind == "absent_collective" else "shared"
    fault_of_rank = inject(f"hanging_code:{fault}", rank, 15, phase)
    done = train(folder, fault, fault_of_rank, f"parallel.collectives={collectives}")
    found = require_found(straight, folder / fault, done, kind, rank, bar_s=LIMIT_S)
    assert (found.step, found.phase) == (15, phase)
    require_whole_report(folder / fault, found, done, fault)


@pytest.mark.parametrize(
    ("fault", "kind", "bar_s"),
    [
        ("freeze_when_done", "frozen", LIMIT_S),
        pytest.param("spin_when_done", "spinning", 60.0, marks=pytest.mark.long),
        pytest.param("sleep_when_done", "waiting_elsewhere", 60.0, marks=pytest.mark.long),
    ],
)
def test_a_rank_that_hangs_after_its_last_step(
    folder: Path, straight: Path, fault: str, kind: str, bar_s: float
) -> None:
    """It is named and killed, and the run, all of which is saved, is finished."""
    name = f"at the end {fault}"
    done = train(folder, name, inject(f"hanging_code:{fault}", 1, STEPS, "forward"))
    assert done.code == 0, done.err
    run_dir = folder / name
    (found,) = events(run_dir, HangFound)
    assert (found.event.hang_kind, found.event.culprits) == (kind, [1]), found.event.report
    assert found.event.detected_s <= SLACK * bar_s
    assert not events(run_dir, RankFailed)
    assert len(events(run_dir, RanksStarted)) == 1
    assert weights(run_dir) == weights(straight)
    assert not survivors(run_dir)


def test_a_connection_that_no_rank_died_of_blames_no_rank(folder: Path, straight: Path) -> None:
    """Both keep their processes and what they hold."""
    fault = inject("hanging_code:shut_connections", 1, 15, "backward")
    done = train(folder, "shut", fault, "parallel.collectives=gloo")
    assert done.code == 0, done.err
    run_dir = folder / "shut"
    (failed,) = events(run_dir, RankFailed)
    assert (failed.event.cause, failed.event.failed_rank) == ("lost_connection", -1)
    assert [start.event.kept for start in events(run_dir, RanksStarted)] == [[], [0, 1]]
    assert weights(run_dir) == weights(straight)


@pytest.mark.long
def test_a_rank_that_closes_its_own_sockets_is_blamed_and_the_other_keeps_its_state(
    folder: Path, straight: Path
) -> None:
    """Before the first checkpoint, whose group needs sockets: all that is saved is step 0."""
    fault = inject("hanging_code:close_sockets", 1, 8, "backward")
    done = train(folder, "closed", fault, "checkpoint.asynchronous=true")
    assert done.code == 0, done.err
    run_dir = folder / "closed"
    (failed,) = events(run_dir, RankFailed)
    assert (failed.event.cause, failed.event.failed_rank) == ("exception", 1)
    assert "Bad file descriptor" in failed.event.detail
    assert [start.event.kept for start in events(run_dir, RanksStarted)] == [[], [0]]
    assert weights(run_dir) == weights(straight)


def test_a_long_text_at_the_end_is_no_hang(folder: Path) -> None:
    """Each rank samples for itself, for longer than a step may take, and notes each token."""
    text_s = 0.0
    num_tokens = 1_800
    # How many tokens take that long is a matter of the machine.
    while text_s <= 2 * SHORT_LIMIT_S:
        name = f"text of {num_tokens}"
        more = ("train.steps=6", f"train.sample_tokens={num_tokens}")
        done = train(folder, name, *more, f"resilience.hang_s={SHORT_LIMIT_S}")
        assert done.code == 0, done.err
        run_dir = folder / name
        assert not events(run_dir, HangFound)
        (text,) = events(run_dir, TextGenerated)
        last_step_s = max(each.monotonic_s for each in events(run_dir, StepFinished))
        # Before, other processes may have taken a processor from a rank.
        slow_s = [each.monotonic_s for each in events(run_dir, RankSlow)]
        assert max(slow_s, default=0.0) <= last_step_s + SHORT_LIMIT_S
        text_s = text.monotonic_s - last_step_s
        for rank in (0, 1):
            box = read_last_position(black_box_path(run_dir, rank))
            assert box is not None
            assert box.header is not None
            assert box.header.work_s > last_step_s
        num_tokens *= 2


def test_the_rank_that_leaves_out_a_collective(folder: Path) -> None:
    """Of two ranks in different collectives, which gloo leaves waiting, the one whose call does not
    follow the one before."""
    objective = ("model.objective=hanging_code:cross_entropy_behind_barrier", "eval.tokens=0")
    done = train(folder, "skips", *objective, "parallel.collectives=gloo")
    assert done.code == 0, done.err
    (found,) = events(folder / "skips", HangFound)
    assert (found.event.hang_kind, found.event.culprits) == ("absent_collective", [1])
    assert found.event.step == 15
    assert found.event.collective.startswith("barrier #")


def test_ranks_that_share_memory_notice_another_collective_at_once(folder: Path) -> None:
    objective = ("model.objective=hanging_code:cross_entropy_behind_barrier", "eval.tokens=0")
    done = train(folder, "differs", *objective, "parallel.collectives=shared")
    assert done.code == 0, done.err
    assert not events(folder / "differs", HangFound)
    (failed,) = events(folder / "differs", RankFailed)
    assert (failed.event.hang_kind, failed.event.failed_rank) == ("absent_collective", 1)
    assert failed.event.step == 15
    assert "where others called another collective" in failed.event.detail


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_gloo_aborts_a_rank_of_two_in_different_collectives(
    folder: Path, straight: Path, rank: int
) -> None:
    """Whichever it aborts, the one that called something unusual is named."""
    name = f"aborted {rank}"
    fault = inject("hanging_code:enter_another_reduction", rank, 15, "forward")
    done = train(folder, name, fault, "parallel.collectives=gloo")
    assert done.code == 0, done.err
    (failed,) = events(folder / name, RankFailed)
    assert (failed.event.hang_kind, failed.event.failed_rank) == ("absent_collective", rank)
    assert "(float32 [1], 4 B) at hanging_code.py:" in failed.event.detail
    assert weights(folder / name) == weights(straight)


@pytest.mark.long
def test_a_rank_that_ends_with_code_0(folder: Path, straight: Path) -> None:
    done = train(folder, "leaves", inject("hanging_code:leave_with_code_0", 1, 15, "backward"))
    assert done.code == 0, done.err
    run_dir = folder / "leaves"
    (failed,) = events(run_dir, RankFailed)
    assert (failed.event.cause, failed.event.hang_kind) == ("exit", "left_early")
    assert failed.event.failed_rank == 1
    assert failed.event.detected_s < SLACK
    assert not events(run_dir, HangFound)
    assert weights(run_dir) == weights(straight)


@pytest.mark.long
@pytest.mark.parametrize(
    "fault", ["freeze", "hold_lock_asleep", "spin", "sleep", "enter_another_collective"]
)
def test_one_of_four_ranks_at_the_usual_limit(folder: Path, fault: str) -> None:
    kind, phase = KINDS[fault]
    name = f"four {fault}"
    done = train(
        folder,
        name,
        inject(f"hanging_code:{fault}", 2, 15, phase),
        "resilience.hang_s=none",
        f"parallel.collectives={'gloo' if kind == 'absent_collective' else 'shared'}",
        ranks=4,
    )
    assert done.code == 0, done.err
    (found,) = events(folder / name, HangFound)
    assert (found.event.hang_kind, found.event.culprits) == (kind, [2]), found.event.report
    assert found.event.detected_s <= SLACK * 5.0
    assert loss_curve(folder / name).keys() == set(range(1, STEPS + 1))


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "place", "kind"),
    [
        ("spin", "phase=ckpt_load,attempt=1", "spinning"),
        ("hold_lock_asleep", "step=10,phase=ckpt_write", "gil_held"),
        ("write_phases_for_ever", "step=15,phase=forward", "endless_step"),
    ],
)
def test_a_rank_that_is_busy_in_longer_work_is_found_in_a_minute(
    folder: Path, straight: Path, fault: str, place: str, kind: str
) -> None:
    name = f"long {fault}"
    faults = [f"hanging_code:{fault}:rank=1,{place}"]
    if "ckpt_load" in place:
        faults.append("kill:rank=0,step=12,phase=data")
    done = train(
        folder,
        name,
        f"resilience.inject={json.dumps(faults)}",
        "resilience.hang_s=none",
        "resilience.keep_ranks=false",
    )
    assert done.code == 0, done.err
    (found,) = events(folder / name, HangFound)
    assert (found.event.hang_kind, found.event.culprits) == (kind, [1]), found.event.report
    assert found.event.detected_s <= SLACK * 60.0
    assert weights(folder / name) == weights(straight)


# A dataset, a model and an objective: of three ranks, rank 1 sleeps in an evaluation, when it is
# started again while it starts, and then while it opens its data.
SLEEPY = """
import os
import time

import numpy as np
import torch


def sleep_in_attempt(number):
    if (os.environ.get("RANK"), os.environ.get("PHALANX_ATTEMPT")) == ("1", number):
        time.sleep(600)


sleep_in_attempt("1")


def numbers(split):
    sleep_in_attempt("2")
    inputs = np.linspace(0, 1, 8, dtype=np.float32)
    return [{"inputs": inputs + n / 60, "targets": np.float32(n / 60)} for n in range(60)]


def linear():
    return torch.nn.Linear(8, 1)


def squared(outputs, batch):
    if not torch.is_grad_enabled():
        sleep_in_attempt("0")
    return (outputs[:, 0] - batch["targets"]).square().sum(), torch.tensor(len(outputs))
"""
# Signs of work are looked at every WINDOW_S.
LONG_LIMIT_S = 3.0


@pytest.mark.long
def test_longer_work_has_a_limit_of_its_own(folder: Path) -> None:
    (folder / "sleepy.py").write_text(SLEEPY)
    done = run(
        *("train", "data.source=sleepy:numbers", "model.kind=sleepy:linear", "data.workers=0"),
        *("model.objective=sleepy:squared", "train.global_batch_size=6", "train.steps=12"),
        *("eval.every_steps=6", "train.sample_tokens=0", "observe.sinks=[]", "run.dir=sleepy"),
        *("parallel.ranks=3", "parallel.dp_replicate=3"),
        f"resilience.hang_s={LIMIT_S}",
        f"resilience.hang_long_s={LONG_LIMIT_S}",
        cwd=folder,
    )
    assert done.code == 0, done.err
    found = [each.event for each in events(folder / "sleepy", HangFound)]
    assert [(each.hang_kind, each.culprits) for each in found] == [("waiting_elsewhere", [1])] * 3
    assert [each.phase for each in found] == ["evaluate", "startup", "startup"]
    callers = ("squared", "<module>", "numbers")
    for hang, phase, caller in zip(found, ("evaluate", "startup", "startup"), callers, strict=True):
        assert hang.limit_s == LONG_LIMIT_S
        assert hang.detected_s <= SLACK * (LONG_LIMIT_S + WINDOW_S), hang
        assert f"(limit 3.0 s: phase {phase})" in hang.report
        assert "; the rank is in sleep_in_attempt at sleepy.py:" in hang.report
        assert re.search(rf'sleepy.py", line \d+ in {caller}\n', hang.report), hang.report
    assert not survivors(folder / "sleepy")


@pytest.mark.parametrize(
    "fault",
    [
        "run_half_of_the_time",
        pytest.param("run_a_tenth_of_the_time", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_is_stopped_by_turns_is_slow_and_not_hung(folder: Path, fault: str) -> None:
    num_steps, first = 140, 50
    done = train(
        folder,
        fault,
        f"train.steps={num_steps}",
        "checkpoint.every_steps=1000",
        inject(f"hanging_code:{fault}", 1, first, "prepare"),
        "resilience.hang_s=none",
    )
    assert done.code == 0, done.err
    run_dir = folder / fault
    assert not events(run_dir, HangFound)
    assert not events(run_dir, RankFailed)
    # Other processes may take a processor from either rank, which is another verdict.
    slow = next(e.event for e in events(run_dir, RankSlow) if e.event.why == STOPPED_BY_TURNS)
    assert slow.slow_rank == 1
    assert first <= slow.step <= first + SLACK * 20
    # How much slower is told of the looks so far, which come late on a busy machine.
    assert slow.factor > 1.05


@pytest.mark.long
def test_a_rank_that_takes_twice_as_long_is_named_by_its_steps(folder: Path) -> None:
    done = train(
        folder,
        "longer",
        "model.objective=hanging_code:cross_entropy_that_slows_down",
        f"train.steps={SLOW_FROM_STEP + 120}",
        "checkpoint.every_steps=1000",
        "resilience.hang_s=none",
    )
    assert done.code == 0, done.err
    # The kernel's word on who had a processor is another one.
    slow = [e.event for e in events(folder / "longer", RankSlow) if not e.event.why]
    assert [event.slow_rank for event in slow] == [1]
    assert slow[0].phase == "forward"
    seconds = [
        e.event.step_s
        for e in events(folder / "longer", StepFinished)
        if e.rank == 1 and SLOW_FROM_STEP <= e.event.step <= slow[0].step
    ]
    assert seconds
    # Within 20 steps, or 7 s if these are more.
    assert len(seconds) <= SLACK * 20 or sum(seconds) <= SLACK * 7.0
    assert slow[0].factor >= 1.2


@pytest.fixture
def quota() -> Iterator[Path]:
    """A cgroup whose processes get a tenth of a core."""
    parent = Path("/sys/fs/cgroup/cpu")
    has_quota = (parent / "cpu.cfs_quota_us").exists()
    # Containers may have all cgroups for reading only.
    if os.geteuid() or not has_quota or not os.access(parent, os.W_OK):
        pytest.skip("a quota takes root and the cpu controller of cgroups (version 1)")
    group = parent / f"phalanx-tests-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpu.cfs_quota_us").write_text("10000")
        yield group
    finally:
        # The kernel takes the last process out when it has been reaped.
        wait_until(lambda: not (group / "tasks").read_text())
        group.rmdir()


@pytest.mark.long
def test_a_throttled_rank_is_slow_and_not_hung(folder: Path, quota: Path) -> None:
    """A step of 30 ms takes 300: longer than ten steps, and no hang."""
    run_dir = folder / "throttled"
    process = start(
        *arguments("throttled", "train.steps=100000", "checkpoint.every_steps=100000"),
        *("resilience.hang_s=none", "data.seq_len=128", "model.dim=64"),
        cwd=folder,
    )
    with watching(process):
        wait_until(lambda: (run_dir / "events" / "rank-0000-attempt-00.jsonl").exists())
        wait_until(lambda: len(loss_curve(run_dir)) > 20)
        box = read_last_position(black_box_path(run_dir, 1))
        assert box is not None
        assert box.header is not None
        (quota / "tasks").write_text(str(box.header.pid))
        wait_until(lambda: "rank_slow" in (run_dir / "events" / "supervisor.jsonl").read_text())
        # Longer than the limit of a hang.
        begun = max(loss_curve(run_dir))
        wait_until(lambda: max(loss_curve(run_dir)) > begun + 20)
        process.terminate()
        assert process.wait(timeout=60) == 75
    assert {e.event.slow_rank for e in events(run_dir, RankSlow)} == {1}
    assert not events(run_dir, HangFound)
    assert not events(run_dir, RankFailed)
