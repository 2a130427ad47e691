"""Killed at any moment, continued by itself or by hand: the loss curve and the final weights are
those of a run that nothing happened to, to the last bit.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from bisect import bisect
from dataclasses import dataclass
from pathlib import Path

import pytest

from commands import (
    SLACK,
    TINY,
    Done,
    events,
    finish,
    loss_curve,
    run,
    run_all,
    start,
    survivors,
    wait_until,
    watching,
    weights,
    write_text,
)
from counted import show
from holds import holding
from phalanx.checkpoint.best import read_best_step
from phalanx.checkpoint.manifest import list_checkpoint_paths_of_run
from phalanx.observe.events import EvalFinished, RankFailed, RanksStarted, RestartScheduled
from phalanx.resilience.strikes import read_strikes

STEPS, EVERY, EVALUATED = 40, 5, 10
NOISY = """
import random
import numpy
import torch
from phalanx.nn.objective import causal_cross_entropy

exact = causal_cross_entropy(64)


def noisy(outputs, batch):
    noise = random.random() + numpy.random.random() + torch.rand(())
    loss, num_targets = exact(outputs, batch)
    return loss * (1 + 0.01 * noise), num_targets
"""
LAYOUTS = {"ddp": "parallel.dp_replicate=2", "zero3": "parallel.dp_shard=2"}
WAITED = (
    "checkpoint.asynchronous=false"  # saves come at exactly the steps that are a multiple of EVERY
)
BESIDE = (
    "checkpoint.asynchronous=true",
    "checkpoint.every_steps=1",
    "checkpoint.keep_last=2",
)  # one after the other
STEP_PHASES = ("data", "forward", "backward", "collective", "optimizer")
SAVE_PHASES = ("ckpt_stage", "ckpt_write", "before_commit", "after_commit")


@dataclass(frozen=True)
class Drill:
    """A folder with an uninterrupted run of each layout.

    Their loss has noise of three generators in it.
    """

    folder: Path

    def arguments(self, layout: str, name: str, *more: str) -> list[str]:
        job = (
            *TINY,
            "data.source=text",
            f"train.steps={STEPS}",
            f"checkpoint.every_steps={EVERY}",
            "optim.lr=0.01",
        )
        return [
            "train",
            *job,
            "model.objective=noise:noisy",
            "parallel.ranks=2",
            LAYOUTS[layout],
            f"run.dir={name}",
            WAITED,
            *more,
        ]

    def injured(self, layout: str, name: str, faults: list[str], *more: str) -> Done:
        return run(*self.arguments(layout, name, _inject(faults), *more), cwd=self.folder)

    def resume(self, name: str, *more: str) -> Done:
        return run("train", "--resume", name, *more, cwd=self.folder)

    def require_same(self, layout: str, name: str) -> None:
        """Every step, also those done again, and every byte of the last checkpoint."""
        straight, found = self.folder / layout, self.folder / name
        assert loss_curve(found) == loss_curve(straight)
        assert list(loss_curve(straight)) == list(range(1, STEPS + 1))
        assert weights(found) == weights(straight)
        assert not survivors(found)
        assert not (found / "lock").exists()


@pytest.fixture(scope="module")
def drill(tmp_path_factory: pytest.TempPathFactory) -> Drill:
    folder = tmp_path_factory.mktemp("drill")
    write_text(folder / "text")
    (folder / "noise.py").write_text(NOISY)
    drill = Drill(folder)
    for done in run_all([drill.arguments(layout, layout) for layout in LAYOUTS], folder):
        assert done.code == 0, done.err
    return drill


def _inject(faults: list[str]) -> str:
    return "resilience.inject=[" + ", ".join(f'"{fault}"' for fault in faults) + "]"


def draw_faults(seed: int, phases: tuple[str, ...]) -> list[str]:
    """One kill for each of `phases`, at a drawn rank and at steps far enough apart to be met one
    after the other."""
    draw = random.Random(seed)
    order = draw.sample(phases, len(phases))
    faults = []
    for phase in order:
        rank, step = draw.randrange(2), draw.randrange(2, STEPS)
        if phase in SAVE_PHASES:
            step = draw.randrange(EVERY, STEPS + 1, EVERY)
        if phase == "evaluate":
            step = draw.randrange(EVALUATED, STEPS + 1, EVALUATED)
        at = "" if phase in ("ckpt_load", "startup") else f"step={step},"
        faults.append(f"kill:rank={rank},{at}phase={phase}")
    return faults


@pytest.mark.parametrize(
    ("layout", "seed", "phases"),
    [
        pytest.param(
            "ddp",
            4,
            ("data", "forward", "optimizer", "evaluate", "ckpt_write", "after_commit", "ckpt_load"),
            marks=pytest.mark.long,
        ),
        (
            "zero3",
            2,
            ("backward", "collective", "ckpt_stage", "before_commit", "optimizer", "ckpt_load"),
        ),
    ],
)
def test_killed_ranks_start_again(
    drill: Drill,
    layout: str,
    seed: int,
    phases: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Six or seven kills in one run, each met once; the supervisor names rank and phase and starts
    again.

    Ranks that live are kept under zero3, whose state is that of the checkpoint all the same; under
    ddp all start anew. It is evaluated on the way, and the run that nothing happened to is not: that changes nothing,
    either.
    """
    faults = draw_faults(seed, phases)
    show(capsys, f"{layout}: {len(faults)} kills, seed {seed}")
    print(faults)
    judged = ("eval.tokens=512", f"eval.every_steps={EVALUATED}", "eval.keep_best=true")
    keeps = "resilience.keep_ranks=false"
    if layout == "zero3":
        keeps = "resilience.keep_ranks=true"
    done = drill.injured(
        layout, f"{layout} killed", faults, "resilience.max_restarts=10", keeps, *judged
    )
    assert done.code == 0, done.err
    run_dir = drill.folder / f"{layout} killed"
    failures = events(run_dir, RankFailed)
    struck = sorted(f"kill:rank={e.event.failed_rank},phase={e.event.phase}" for e in failures)
    assert struck == sorted(re.sub(r"step=\d+,", "", fault) for fault in faults)
    assert len(os.listdir(run_dir / "faults")) == len(phases)
    assert len(
        re.findall(r"was killed by SIGKILL .*; starting (it )?again .*\(restart", done.out)
    ) == len(phases)
    drill.require_same(layout, run_dir.name)
    told = {e.event.step: e.event.loss for e in events(run_dir, EvalFinished)}
    assert list(told) == list(range(EVALUATED, STEPS + 1, EVALUATED))
    best = read_best_step(run_dir)
    assert best is not None
    assert (best.loss, best.step) == min((loss, step) for step, loss in told.items())
    # Seen within a second, the ranks there again within ten: none of that is an import of torch.
    assert max(e.event.detected_s for e in failures) < SLACK * 1.0
    restarts = [e for e in events(run_dir, RanksStarted) if e.attempt]
    assert [e.attempt for e in events(run_dir, RestartScheduled)] == [
        e.attempt - 1 for e in restarts
    ]
    for failure, restart in zip(failures, restarts, strict=True):
        assert restart.time_unix_s - failure.time_unix_s < SLACK * 10.0


@pytest.mark.long
@pytest.mark.parametrize(("layout", "seed"), [("zero3", 3)])
def test_a_killed_run_is_continued_by_hand(
    drill: Drill, layout: str, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """No restarts: the run ends with exit 10 at each kill, and each time `--resume` takes it on."""
    name = f"{layout} by hand"
    faults = draw_faults(seed, ("before_commit",))
    show(capsys, f"{name}: {len(faults)} kills, seed {seed}")
    done = drill.injured(layout, name, faults, "resilience.max_restarts=0")
    for _ in faults:
        assert done.code == 10, done.err
        assert "the restart budget is spent: 0 in" in done.err
        assert "was killed by SIGKILL" in done.err
        done = drill.resume(name)
    assert done.code == 0, done.err
    drill.require_same(layout, name)


@pytest.mark.parametrize(
    ("layout", "seed"), [("ddp", 5), pytest.param("zero3", 6, marks=pytest.mark.long)]
)
def test_killed_while_saves_are_in_flight(
    drill: Drill, layout: str, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Saves beside training, one after the other: kills in each phase of the thread that writes, at
    its first save and at a drawn step, which it may be saving or not, and in phases of the steps
    that training does meanwhile.
    """
    name = f"{layout} beside"
    draw = random.Random(seed)
    # The first save is killed three times before a checkpoint stands, and the same end three times at
    # one step ends a run.
    first = [
        f"{'abort' if phase == 'before_commit' else 'kill'}:rank={draw.randrange(2)},phase={phase}"
        for phase in (*SAVE_PHASES, "ckpt_load")
    ]
    steps = draw_faults(seed, ("forward", "optimizer"))
    perhaps = [
        f"kill:rank={draw.randrange(2)},step={draw.randrange(2, STEPS)},phase={phase}"
        for phase in SAVE_PHASES
    ]
    show(
        capsys,
        f"{name}: {len(first) + len(steps)} kills and at most {len(perhaps)} more, seed {seed}",
    )
    print(first, steps, perhaps)
    # From memory training would go on at the very step of the kill, and three kills at one step end a
    # run.
    anew = "resilience.keep_ranks=false"
    done = drill.injured(
        layout, name, [*first, *steps, *perhaps], "resilience.max_restarts=20", anew, *BESIDE
    )
    assert done.code == 0, done.err
    run_dir = drill.folder / name
    strikes = read_strikes(run_dir)
    assert len(first) + len(steps) <= len(strikes) <= len(first) + len(steps) + len(perhaps)
    # Each failure is of a strike; those that meet at one moment end one attempt.
    failed_s = [failure.monotonic_s for failure in events(run_dir, RankFailed)]
    ended = {bisect(failed_s, strike.monotonic_s) for strike in strikes}
    assert ended == set(range(len(failed_s)))
    drill.require_same(layout, name)
    kept = {path.name for path in list_checkpoint_paths_of_run(run_dir)}
    assert f"step-{STEPS}" in kept
    assert len(kept) == 2


@pytest.mark.parametrize("whole_group", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_killed_supervisor_takes_its_ranks_along(drill: Drill, whole_group: bool) -> None:
    """kill -9 of the supervisor, alone or with its process group; nothing is left and the run
    continues."""
    name = f"supervisor killed {whole_group}"
    held = holding(drill.folder, "until_killed", STEPS - 2)
    process = start(*drill.arguments("ddp", name, *held), cwd=drill.folder)
    with watching(process) as watched:
        wait_until((drill.folder / name / "checkpoints" / "step-5").exists)
        if whole_group:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        assert watched.finish().code == -signal.SIGKILL
    wait_until(lambda: not survivors(drill.folder / name))
    done = drill.resume(name)
    assert done.code == 0, done.err
    assert re.search(r"continues at step (\d+) from step-\1\b", done.out)
    drill.require_same("ddp", name)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 120))
def test_campaign(drill: Drill, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Twenty seeds, both layouts, every phase; half of them with a kill of the supervisor at a
    drawn moment."""
    draw = random.Random(seed)
    layout = draw.choice(list(LAYOUTS))
    phases = tuple(draw.sample((*STEP_PHASES, *SAVE_PHASES, "ckpt_load", "startup"), 5))
    faults = draw_faults(seed, phases)
    name = f"campaign {seed}"
    show(capsys, f"{name}: {layout}, {len(faults)} kills, seed {seed}")
    print(faults)
    how = BESIDE if seed % 4 < 2 else ()
    arguments = drill.arguments(layout, name, _inject(faults), "resilience.max_restarts=20", *how)
    process = start(*arguments, cwd=drill.folder)
    if seed % 2:
        deadline = time.monotonic() + draw.uniform(2.0, 8.0)
        wait_until(lambda: process.poll() is not None or time.monotonic() > deadline)
        process.kill()
    done = finish(process)
    wait_until(lambda: not survivors(drill.folder / name))
    if seed % 2 and (drill.folder / name / "job.json").exists():
        done = drill.resume(name)
    elif seed % 2:
        done = run(*arguments, cwd=drill.folder)
    assert done.code == 0, done.err
    drill.require_same(layout, name)
