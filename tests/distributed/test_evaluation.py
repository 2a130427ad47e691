"""Evaluation between steps: training does not notice, the best is kept, and a stop or a crash
changes nothing.

The reference of every sameness is the same run without evaluations, or the one that nobody
disturbed.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from models import CPU, LAYOUTS
from phalanx.checkpoint.best import BEST_FILE_NAME, read_best_step
from phalanx.checkpoint.manifest import list_checkpoint_paths_of_run
from phalanx.checkpoint.reading.verify import find_checkpoint_problems
from phalanx.checkpoint.run_storage import RunStorage
from phalanx.job.schema import Job
from phalanx.mesh.mesh import open_mesh
from phalanx.observe import events
from phalanx.observe.bus import Bus
from phalanx.observe.tail import read_recorded_events
from phalanx.optim.build import build_optimizer
from phalanx.parallel.parallelize import parallelize
from phalanx.plan.planner import make_plan
from phalanx.train.state import TrainState
from phalanx.train.stop import StopSignalFlags
from phalanx.train.trainer import Trainer
from phalanx.train.training_data import TrainingData
from ranks import run_ranks

STEPS, ROWS, WIDTH = 6, 8, 6
Batch = Mapping[str, torch.Tensor]


class Moody(nn.Module):
    """All that an evaluation could disturb: dropout, BatchNorm, one BatchNorm that its owner
    froze, blocks to shard."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Tanh()) for _ in range(2)
        )
        self.frozen, self.norm, self.out = (
            nn.BatchNorm1d(WIDTH),
            nn.BatchNorm1d(WIDTH),
            nn.Linear(WIDTH, 1),
        )
        self.frozen.train(False)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = inputs + block(inputs)
        return self.out(self.norm(self.frozen(inputs)))[:, 0]


def squared_tensor_error(outputs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    noise = 0.01 * (
        torch.rand(()) + random.random() + np.random.random()
    )  # an objective may draw, too
    return (outputs - batch["targets"]).square().sum() + noise, torch.tensor(float(len(outputs)))


def batch_of(number: int, rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(rows, WIDTH, generator=generator)
    return {"inputs": inputs, "targets": inputs.sum(1) + 1}


class Steps:
    """One microbatch of this rank per step."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.rows = rank, ROWS // num_ranks

    def step_microbatches(self, step: int) -> Sequence[Batch]:
        whole = batch_of(step, ROWS)
        return [
            {
                key: value[self.rank * self.rows : (self.rank + 1) * self.rows]
                for key, value in whole.items()
            }
        ]


@dataclass
class HeldOut:
    """Batches that can be gone through again and again; `before` sees the number of each
    evaluation and batch."""

    rank: int
    before: Callable[[int, int], None] = lambda evaluation, batch: None
    num_iterated: int = 0

    def __iter__(self) -> Iterator[Batch]:
        self.num_iterated += 1
        for number in range(2):
            self.before(self.num_iterated, number)
            yield batch_of(1000 + 10 * number + self.rank, 3)


@dataclass
class Outcome:
    """What a run did on one rank."""

    ended: str
    losses: list[tuple[float, float]]
    evals: list[events.EvalFinished]
    steps: list[events.StepFinished]
    modes: list[str]
    wall_s: float
    num_iterated: int
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


class Heard(Bus):
    """A bus that keeps what was said."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.events: list[events.Event] = []

    def emit(self, event: events.Event) -> None:
        self.events.append(event)
        super().emit(event)


def train(
    rank: int,
    num_ranks: int,
    run_dir: Path | None,
    eval_keys: Mapping[str, Any] | None,
    *,
    before: Callable[[int, int, StopSignalFlags], None] | None = None,
    objective: Any = squared_tensor_error,
    sources: Mapping[str, Sequence[Batch]] | None = None,
    attempt: int = 0,
    resume: bool = False,
    asynchronous: bool = False,
    **parallel: Any,
) -> Outcome:
    """Train Moody for STEPS steps, with the [eval] section given or without evaluations."""
    sections = {
        "data": {"seq_len": 1},
        "train": {"steps": STEPS, "global_batch_size": ROWS},
        "parallel": {"ranks": num_ranks, "sync_batchnorm": False, **parallel},
        "optim": {"lr": 0.05, "warmup_steps": 0},
        "checkpoint": {"every_steps": 3, "asynchronous": asynchronous},
        "eval": dict(eval_keys or {}),
    }
    job = Job.model_validate(sections)
    plan = make_plan(job, cluster=CPU, num_ranks=num_ranks)
    stop = StopSignalFlags()
    held_out = HeldOut(rank, lambda number, batch: before(number, batch, stop) if before else None)
    with open_mesh(plan.layout, device="cpu") as mesh:
        module = Moody()
        model = parallelize(module, plan, mesh)
        state = TrainState(model, build_optimizer(model, job.optim), seed=7)
        if resume:
            assert run_dir is not None
            state.restore(list_checkpoint_paths_of_run(run_dir)[-1], phases=model.phases)
        bus = Heard(rank=rank, attempt=attempt, run_dir=run_dir)
        data = TrainingData(
            Steps(rank, num_ranks),
            objective,
            None if eval_keys is None else sources or {"": held_out},
        )
        storage = None if run_dir is None else RunStorage.open(run_dir)
        trainer = Trainer(job, plan, state, bus, data, storage=storage, stop=stop)
        began = time.perf_counter()
        ended = trainer.run()
        wall_s = time.perf_counter() - began
        bus.close()
        said = bus.events
        steps = [event for event in said if isinstance(event, events.StepFinished)]
        return Outcome(
            ended=ended,
            losses=[(event.loss, event.grad_norm) for event in steps],
            evals=[event for event in said if isinstance(event, events.EvalFinished)],
            steps=steps,
            modes=[name for name, inner in module.named_modules() if not inner.training],
            wall_s=wall_s,
            num_iterated=held_out.num_iterated,
            weights={name: shard.tensor.detach().clone() for name, shard in state.shards().items()},
        )


def with_and_without(rank: int, num_ranks: int) -> dict[str, list[str]]:
    """What differs between a run with evaluations and one without, by layout."""
    found: dict[str, list[str]] = {}
    for name, layout in LAYOUTS[num_ranks].items():
        plain = train(rank, num_ranks, None, None, **layout)
        judged = train(rank, num_ranks, None, {"every_steps": 2}, **layout)
        wrong = []
        if judged.losses != plain.losses:
            wrong.append(f"losses {judged.losses} {plain.losses}")
        wrong += [
            key
            for key, value in plain.weights.items()
            if not torch.equal(judged.weights[key], value)
        ]
        wrong += (
            []
            if judged.modes == plain.modes == ["frozen"]
            else [f"modes {judged.modes} {plain.modes}"]
        )
        wrong += [
            f"step {s.step} holds the evaluation" for s in judged.steps if "evaluate" in s.phases_s
        ]
        if rank == 0:
            at = [event.step for event in judged.evals]
            wrong += [] if at == [2, 4, 6] else [f"evaluated at {at}"]
            wrong += [] if {e.num_targets for e in judged.evals} == {6 * num_ranks} else ["targets"]
            wrong += [] if len({e.loss for e in judged.evals}) == 3 else ["always the same loss"]
        elif judged.evals:
            wrong.append("said by another rank than 0")
        found[name] = wrong
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_training_does_not_notice_that_it_is_judged(num_ranks: int) -> None:
    """Losses, norms, weights, optimizer state and running statistics are equal to the last bit,
    in every layout."""
    for found in run_ranks(num_ranks, with_and_without, num_ranks):
        assert {layout: wrong for layout, wrong in found.items() if wrong} == {}


def slow_evaluations(rank: int) -> list[Outcome]:
    return [train(rank, 1, None, {"every_steps": 2}, before=lambda *_: time.sleep(0.05))]


def test_the_seconds_of_an_evaluation_belong_to_no_step() -> None:
    """If a step's seconds held them, too, steps and evaluations together would be longer than
    the run."""
    ((outcome,),) = run_ranks(1, slow_evaluations)
    steps_s, evals_s = (
        sum(step.step_s for step in outcome.steps),
        sum(event.wall_s for event in outcome.evals),
    )
    assert evals_s >= 3 * 2 * 0.05
    assert steps_s + evals_s <= outcome.wall_s
    for step in outcome.steps:
        assert sum(step.phases_s.values()) + step.unaccounted_s == pytest.approx(
            step.step_s, abs=1e-4
        )


def exact(outputs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return (outputs - batch["targets"]).square().sum(), torch.tensor(float(len(outputs)))


def with_sources(rank: int) -> dict[str, list[events.EvalFinished]]:
    """The same run judged on each source alone, on both, and on one of them beside a source
    without any target."""
    code, prose = [batch_of(1, 3)], [batch_of(2, 5), batch_of(3, 2)]
    nothing = [{key: value[:0] for key, value in batch_of(4, 3).items()}]
    chosen = {
        "code": {"code": code},
        "prose": {"prose": prose},
        "both": {"code": code, "prose": prose},
        "one": {"code": code, "empty": nothing},
        "none": {"empty": nothing},
    }
    return {
        name: train(rank, 1, None, {"every_steps": 3}, objective=exact, sources=sources).evals
        for name, sources in chosen.items()
    }


def test_sources_have_losses_of_their_own() -> None:
    """Against the evaluation of each alone; together, every target counts the same."""
    (found,) = run_ranks(1, with_sources)
    for code, prose, both, one, none in zip(*found.values(), strict=True):
        assert both.loss_by_source == {"code": code.loss, "prose": prose.loss}
        assert (code.num_targets, prose.num_targets, both.num_targets) == (3, 7, 10)
        assert both.loss == pytest.approx((3 * code.loss + 7 * prose.loss) / 10)
        assert code.loss_by_source == one.loss_by_source == {}
        assert (one.loss, one.num_targets) == (code.loss, 3)
        assert math.isnan(none.loss)
        assert none.num_targets == 0


# The best, and continuing

EVERY = {"every_steps": 1, "keep_best": True}


def kept(rank: int, folder: str) -> dict[str, Outcome]:
    """An undisturbed run; one that is asked to stop inside its fourth evaluation, and its
    continuation."""

    def ask_to_stop(evaluation: int, batch: int, stop: StopSignalFlags) -> None:
        if rank == 1 and (evaluation, batch) == (4, 1):  # one rank only: the others must agree
            stop.sigterm = True

    straight = train(rank, 2, Path(folder) / "straight", EVERY)
    stopped = train(rank, 2, Path(folder) / "stopped", EVERY, before=ask_to_stop)
    continued = train(rank, 2, Path(folder) / "stopped", EVERY, attempt=1, resume=True)
    return {"straight": straight, "stopped": stopped, "continued": continued}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Outcome]:
    return run_ranks(2, kept, str(folder))[0]


def losses_by_step(run_dir: Path) -> dict[int, float]:
    told = [envelope.event for envelope in read_recorded_events(run_dir, events.EvalFinished)]
    assert len({event.step for event in told}) == len(told), "evaluated twice"
    return {event.step: event.loss for event in told}


def test_the_best_is_saved_and_named(runs: dict[str, Outcome], folder: Path) -> None:
    run_dir = folder / "straight"
    losses = losses_by_step(run_dir)
    assert list(losses) == list(range(1, STEPS + 1))
    so_far = [
        step for step in losses if losses[step] == min(losses[s] for s in losses if s <= step)
    ]
    due = {3, 6}  # checkpoint.every_steps, and the end
    assert [path.name for path in list_checkpoint_paths_of_run(run_dir)] == [
        f"step-{n}" for n in sorted({*so_far, *due})
    ]
    best = read_best_step(run_dir)
    assert best is not None
    assert (best.step, best.loss) == (so_far[-1], losses[so_far[-1]])
    assert (run_dir / best.checkpoint / "manifest.json").is_file()
    for event in runs["straight"].evals:
        earlier = {step: loss for step, loss in losses.items() if step <= event.step}
        assert (event.best_loss, event.best_step) == min(
            (loss, step) for step, loss in earlier.items()
        )


def test_a_stop_inside_an_evaluation_saves_and_the_continuation_is_the_same(
    runs: dict[str, Outcome], folder: Path
) -> None:
    assert runs["stopped"].ended == "sigterm"
    assert [event.step for event in runs["stopped"].evals] == [1, 2, 3]
    assert len(runs["stopped"].steps) == 4
    assert [event.step for event in runs["continued"].evals] == [4, 5, 6]
    assert runs["stopped"].losses + runs["continued"].losses == runs["straight"].losses
    assert losses_by_step(folder / "stopped") == losses_by_step(folder / "straight")
    assert (folder / "stopped" / BEST_FILE_NAME).read_bytes() == (
        folder / "straight" / BEST_FILE_NAME
    ).read_bytes()
    saved = [
        {path.name for path in list_checkpoint_paths_of_run(folder / name)}
        for name in ("stopped", "straight")
    ]
    assert saved[0] - {"step-4"} == saved[1] - {"step-4"}  # where it was stopped


def redone(rank: int, folder: str) -> list[Outcome]:
    """A run that dies after its fourth evaluation and goes on from step 3, whose evaluation is
    on record."""

    def die(evaluation: int, batch: int, stop: StopSignalFlags) -> None:
        if evaluation == 5:
            raise KeyboardInterrupt

    run_dir = Path(folder) / "died"
    with pytest.raises(KeyboardInterrupt):
        train(rank, 1, run_dir, {"every_steps": 1}, before=die)
    return [train(rank, 1, run_dir, {"every_steps": 1}, attempt=1, resume=True)]


def test_what_is_done_again_is_judged_again_and_what_stands_is_not(tmp_path: Path) -> None:
    ((again,),) = run_ranks(1, redone, str(tmp_path))
    assert [event.step for event in again.evals] == [4, 5, 6]
    told = [e.event for e in read_recorded_events(tmp_path / "died", events.EvalFinished)]
    assert [event.step for event in told] == [1, 2, 3, 4, 4, 5, 6]
    first, second = (event.loss for event in told if event.step == 4)
    assert first == second


def beside(rank: int, folder: str) -> list[Outcome]:
    """Keeps the best with saves that training waits for, then with saves beside it; then as if the
    second had been killed right after the commit of the best, before it was named.
    """
    keys = {"every_steps": 1, "keep_best": True}
    waited = train(rank, 2, Path(folder) / "waited", keys)
    run_dir = Path(folder) / "beside"
    found = [waited, train(rank, 2, run_dir, keys, asynchronous=True)]
    if rank == 0:
        best = read_best_step(run_dir)
        assert best is not None
        for path in list_checkpoint_paths_of_run(run_dir):
            if int(path.name.removeprefix("step-")) > best.step:
                shutil.rmtree(path)
        os.rename(run_dir / BEST_FILE_NAME, Path(folder) / BEST_FILE_NAME)
    torch.distributed.barrier()
    return [*found, train(rank, 2, run_dir, keys, attempt=1, resume=True, asynchronous=True)]


def test_the_best_is_kept_by_saves_beside_training_too(tmp_path: Path) -> None:
    waited, found, again = run_ranks(2, beside, str(tmp_path))[0]
    assert found.losses == waited.losses
    assert [(e.step, e.loss, e.best_step) for e in found.evals] == [
        (e.step, e.loss, e.best_step) for e in waited.evals
    ]
    named = (tmp_path / BEST_FILE_NAME).read_bytes()
    assert (
        named
        == (tmp_path / "waited" / BEST_FILE_NAME).read_bytes()
        == (tmp_path / "beside" / BEST_FILE_NAME).read_bytes()
    )
    best = read_best_step(tmp_path / "beside")
    assert best is not None
    assert len(again.losses) == STEPS - best.step
    assert find_checkpoint_problems(tmp_path / "beside" / best.checkpoint) == []


def unfit(rank: int, folder: str) -> list[Outcome]:
    """Evaluations whose loss is no number, and a run directory in which best.json cannot be
    written."""
    run_dir = Path(folder)
    (run_dir / BEST_FILE_NAME).mkdir(parents=True)

    def spoil(outputs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        loss, count = squared_tensor_error(outputs, batch)
        return (loss if torch.is_grad_enabled() else loss * math.nan), count

    return [train(rank, 1, run_dir, EVERY), train(rank, 1, None, EVERY, objective=spoil)]


def test_a_loss_that_is_no_number_is_never_the_best_and_a_full_disk_ends_nothing(
    tmp_path: Path,
) -> None:
    ((blocked, spoilt),) = run_ranks(1, unfit, str(tmp_path))
    assert blocked.ended == spoilt.ended == "finished"
    failed = [
        envelope.event for envelope in read_recorded_events(tmp_path, events.CheckpointFailed)
    ]
    assert failed
    assert {event.path for event in failed} == {BEST_FILE_NAME}
    assert all(math.isnan(event.loss) and event.best_step == 0 for event in spoilt.evals)
    assert len(spoilt.evals) == STEPS
