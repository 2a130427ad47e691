"""Training that goes back to a checkpoint by itself: where the loss stays high, and where replicas
that were equal are so no longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import (
    TINY,
    events,
    loss_curve,
    run,
    run_all,
    survivors,
    weights,
    write_text,
)
from phalanx.observe.bus import Bus
from phalanx.observe.events import (
    CheckpointFailed,
    CheckpointSaved,
    InvariantChecked,
    RankFailed,
    ReplicasReplayed,
    RolledBack,
    RunStarted,
    SamplesRead,
    StepFinished,
    StepSkipped,
)

STEPS, SAVED_EACH, BATCH = 50, 5, 8
SPIKES = (43, 44, 45)
# Of the first attempt: the loss is 50 times as large in some steps, or rank 2 has another bit in
# one of its weights from step 23 on.
POISON = f"""
import gc
import os
import torch
from phalanx.nn.objective import causal_cross_entropy

exact = causal_cross_entropy(64)
calls = 0


def spiky(outputs, batch):
    global calls
    calls += 1
    loss, num_targets = exact(outputs, batch)
    is_struck = os.environ["PHALANX_ATTEMPT"] == "0" and calls in {SPIKES}
    return loss * (50.0 if is_struck else 1.0), num_targets


def flipping(outputs, batch):
    global calls
    calls += 1
    if os.environ["PHALANX_ATTEMPT"] == "0" and os.environ["RANK"] == "2" and calls == 23:
        for found in gc.get_objects():
            if isinstance(found, torch.nn.Parameter) and found.dim() == 2:
                found.data.view(torch.int32)[0, 0] ^= 1 << 18
                break
    return exact(outputs, batch)


def breaking(outputs, batch):
    global calls
    calls += 1
    if os.environ["PHALANX_ATTEMPT"] == "0" and os.environ["RANK"] == "1" and calls == 22:
        for found in gc.get_objects():
            if isinstance(found, torch.nn.Parameter) and found.dim() == 2:
                found.data[0, 0] = float("nan")
                break
    return exact(outputs, batch)


class Breaks(torch.optim.AdamW):
    def step(self, closure=None):
        super().step(closure)
        for parameter, state in self.state.items():
            if int(state["step"]) == self.at_step:
                parameter.data.fill_(float("nan"))


def breaking_at_step_25(groups, optim, at_step=25):
    optimizer = Breaks(list(groups.parameters()), lr=1.0)
    optimizer.at_step = at_step
    return optimizer


def breaking_at_step_21(groups, optim):
    return breaking_at_step_25(groups, optim, at_step=21)


def otherwise_in_each_attempt(outputs, batch):
    loss, num_targets = exact(outputs, batch)
    return loss * (1.0 + 0.01 * int(os.environ["PHALANX_ATTEMPT"])), num_targets


def flip_moment(place, slot, bit):
    for found in gc.get_objects():
        if isinstance(found, torch.optim.Optimizer):
            moment = list(found.state.values())[place][slot]
            getattr(moment, "_local_tensor", moment).view(torch.int32).view(-1)[3] ^= 1 << bit
            break


def flipping_moment(outputs, batch):
    global calls
    calls += 1
    if os.environ["PHALANX_ATTEMPT"] == "0" and os.environ["RANK"] == "1" and calls == 23:
        flip_moment(0, "exp_avg", 22)
    return exact(outputs, batch)


def flipping_last_bit(outputs, batch):
    global calls
    calls += 1
    if os.environ["PHALANX_ATTEMPT"] == "0" and os.environ["RANK"] == "1" and calls == 25:
        flip_moment(-1, "exp_avg_sq", 0)
    return exact(outputs, batch)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("back")
    write_text(folder / "text")
    (folder / "poison.py").write_text(POISON)
    return folder


def arguments(name: str, *more: str) -> list[str]:
    return [
        "train",
        *TINY,
        "data.source=text",
        f"train.steps={STEPS}",
        f"checkpoint.every_steps={SAVED_EACH}",
        "checkpoint.asynchronous=false",
        "observe.samples=true",
        "observe.invariants_every=5",
        f"run.dir={name}",
        *more,
    ]


TWO = ("parallel.ranks=2", "parallel.dp_replicate=2")
THREE = ("parallel.ranks=3", "parallel.dp_replicate=3", "train.global_batch_size=6")


def test_a_loss_that_stays_high_is_gone_back_from_and_read_past(folder: Path) -> None:
    """Reference: a run that was stopped after step 40 and told to read on at the same sample."""
    spiky = ("model.objective=poison:spiky", *TWO, "resilience.on_loss_spike=rollback")
    first, second = run_all(
        [
            arguments("spikes", *spiky),
            arguments(
                "told",
                "model.objective=poison:spiky",
                *TWO,
                "resilience.max_restarts=0",
                'resilience.inject=["kill:rank=0,step=42,phase=forward"]',
            ),
        ],
        folder,
    )
    assert first.code == 0, first.err
    assert second.code == 10
    run_dir, told = folder / "spikes", folder / "told"
    (back,) = [e.event for e in events(run_dir, RolledBack)]
    assert (back.step, back.cause, back.not_after_step) == (SPIKES[-1], "loss_spike", SPIKES[0] - 1)
    assert back.skip_to_sample == SPIKES[-1] * BATCH
    assert [e.event.step for e in events(run_dir, StepSkipped)] == list(SPIKES[:2])
    assert "loss_spike" in {e.event.reason for e in events(run_dir, StepSkipped)}
    assert [e.event.step for e in events(run_dir, RunStarted)] == [0, 40]
    assert not events(run_dir, RankFailed)
    assert first.out.count(f"going back to a checkpoint not after step {SPIKES[0] - 1}") == 1
    assert "back to a checkpoint" not in first.err
    assert f"and reading on at sample {SPIKES[-1] * BATCH:,}" in first.out
    assert "batch size changed" not in first.out
    bus = Bus(rank=-1, run_dir=told)
    bus.emit(back)
    bus.close()
    done = run("train", "--resume", "told", cwd=folder)
    assert done.code == 0, done.err
    assert weights(run_dir) == weights(told)
    after = {e.event.step: e.event.loss for e in events(run_dir, StepFinished) if e.attempt == 1}
    assert after == {e.event.step: e.event.loss for e in events(told, StepFinished) if e.attempt}
    read = [e.event for e in events(run_dir, SamplesRead) if e.attempt == 1]
    assert min(min(event.ranges) for event in read) == back.skip_to_sample
    proof = run("data", "ledger", "spikes", cwd=folder)
    assert proof.code == 0, proof.out
    assert "40 samples before them were left out" in proof.out
    assert not survivors(run_dir)


def test_spikes_are_skipped_and_a_new_level_is_taken(folder: Path) -> None:
    """Without leave to go back the third spike in a row counts as a level."""
    skips = ("model.objective=poison:spiky", *TWO, "resilience.on_loss_spike=skip")
    done = run(*arguments("skips", *skips), cwd=folder)
    assert done.code == 0, done.err
    assert [e.event.step for e in events(folder / "skips", StepSkipped)] == list(SPIKES[:2])
    assert not events(folder / "skips", RolledBack)


def test_a_replica_with_another_bit_is_named_and_gone_back_from(folder: Path) -> None:
    """Reference: the same without the flip. What was saved since the replicas were equal is not
    used: the odd one has had its part in it."""
    more = (*THREE, "train.steps=30", "checkpoint.every_steps=2")
    first, second = run_all(
        [
            arguments("straight", "model.objective=poison:spiky", *more),
            arguments("flipped", "model.objective=poison:flipping", *more),
        ],
        folder,
    )
    assert first.code == 0, first.err
    assert second.code == 0, second.err
    run_dir = folder / "flipped"
    (back,) = [e.event for e in events(run_dir, RolledBack)]
    assert (back.cause, back.failed_rank, back.not_after_step) == ("corruption", 2, 20)
    assert "rank 2: it holds other bits than the other replicas" in second.out
    assert [e.event.step for e in events(run_dir, RunStarted)] == [0, 20]
    assert max(e.event.step for e in events(run_dir, CheckpointSaved) if e.attempt == 0) > 20
    assert weights(run_dir) == weights(folder / "straight")
    last = {e.event.step: e.event.loss for e in events(run_dir, StepFinished)}
    assert last == loss_curve(folder / "straight")


def test_weights_that_are_not_finite_are_gone_back_from_and_never_saved(folder: Path) -> None:
    """Reference of the first: the same without what broke a weight of rank 1 in step 22. In the
    second the update of step 25 breaks them each time, in the third it is the last one, in the
    fourth the first after a checkpoint."""
    breaks = (*TWO, "optim.kind=poison:breaking_at_step_25", "train.steps=30")
    first, again, last, after, straight = run_all(
        [
            arguments("once", "model.objective=poison:breaking", *TWO, "train.steps=30"),
            arguments("again", *breaks),
            arguments("last", *breaks, "train.steps=25"),
            arguments("after", *breaks, "optim.kind=poison:breaking_at_step_21"),
            arguments("unbroken", "model.objective=poison:spiky", *TWO, "train.steps=30"),
        ],
        folder,
    )
    assert (first.code, straight.code) == (0, 0), first.err
    (back,) = [e.event for e in events(folder / "once", RolledBack)]
    assert (back.step, back.cause, back.not_after_step) == (22, "nonfinite_weights", 20)
    assert (back.failed_rank, back.skip_to_sample) == (1, -1)
    assert "is not finite: no step would be applied any more" in first.out
    assert weights(folder / "once") == weights(folder / "unbroken")

    assert again.code == 8, again.err
    backs = [e.event for e in events(folder / "again", RolledBack)]
    assert {(back.step, back.not_after_step, back.failed_rank) for back in backs} == {(26, 24, -1)}
    # In the end each rank raised it, and none more than the other.
    (failure,) = [e.event for e in events(folder / "again", RankFailed)]
    assert (failure.failed_rank, failure.is_of_all_ranks) == (-1, True)
    # The same batches once more, then others.
    assert [back.skip_to_sample for back in backs] == [-1, 26 * BATCH, 32 * BATCH]
    assert "continue from a checkpoint not after step 24" in again.err
    assert after.code == 8, after.err
    backs = [e.event for e in events(folder / "after", RolledBack)]
    assert [(back.step, back.not_after_step) for back in backs] == [(22, 20)] * 3

    for run_dir in (folder / "again", folder / "last"):
        assert max(e.event.step for e in events(run_dir, CheckpointSaved)) == 20
        assert {e.event.step for e in events(run_dir, CheckpointFailed)} == {25}
    assert last.code != 0
    assert "not finite after step 25: they are not saved" in last.err


TWO_FLIPPED = (
    *TWO,
    "train.steps=30",
    'resilience.inject=["flip_parameter:rank=1,step=23,phase=data"]',
)


def find_replay(run_dir: Path) -> ReplicasReplayed:
    """What the steps done again told of two replicas of which the run went back."""
    (back,) = [e.event for e in events(run_dir, RolledBack)]
    assert (back.cause, back.failed_rank, back.not_after_step) == ("corruption", -1, 20)
    (replay,) = [e.event for e in events(run_dir, ReplicasReplayed)]
    assert replay.step == 25
    return replay


def test_of_two_replicas_the_wrong_one_is_named_by_doing_the_steps_again(folder: Path) -> None:
    done = run(*arguments("one of two", *TWO_FLIPPED), cwd=folder)
    assert done.code == 0, done.err
    replay = find_replay(folder / "one of two")
    assert replay.failed_rank == 1, replay.why
    assert "step 25 done again: rank 1 was wrong" in done.out


@pytest.mark.long
def test_of_two_replicas_that_both_compute_something_else_then_none_is_named(folder: Path) -> None:
    otherwise = "model.objective=poison:otherwise_in_each_attempt"
    done = run(*arguments("otherwise", otherwise, *TWO_FLIPPED), cwd=folder)
    assert done.code == 0, done.err
    replay = find_replay(folder / "otherwise")
    assert replay.failed_rank == -1, replay.why
    assert "step 25 done again does not tell which rank was wrong" in done.out


@pytest.mark.long
def test_of_two_replicas_the_one_whose_second_moment_flips_is_named(folder: Path) -> None:
    """The lowest bit, of which no weight and no loss knows yet. Reference: the same without."""
    first, second = run_all(
        [
            arguments("two straight", "model.objective=poison:spiky", *TWO, "train.steps=30"),
            arguments(
                "last bit", "model.objective=poison:flipping_last_bit", *TWO, "train.steps=30"
            ),
        ],
        folder,
    )
    assert first.code == second.code == 0, first.err + second.err
    replay = find_replay(folder / "last bit")
    assert replay.failed_rank == 1, replay.why
    (odd,) = [e.event for e in events(folder / "last bit", InvariantChecked) if not e.event.ok]
    assert odd.tensors == ["norm.weight (optimizer's state)"]
    assert weights(folder / "last bit") == weights(folder / "two straight")


def test_memory_that_one_rank_alone_holds(folder: Path) -> None:
    """A bit of the optimizer's state under ZeRO-3, which no other rank has. Reference: the same
    without the flip."""
    more = ("parallel.ranks=2", "parallel.dp_shard=2", "train.steps=30")
    checked = ("model.objective=poison:flipping_moment", "resilience.check_memory_every=1")
    stop = "resilience.on_corruption=stop"
    first, second, stopped = run_all(
        [
            arguments("shards", "model.objective=poison:spiky", *more),
            arguments("flipped shard", *checked, *more),
            arguments("stopped", *checked, *more, stop),
        ],
        folder,
    )
    assert first.code == second.code == 0, first.err + second.err
    assert stopped.code == 8, stopped.err
    assert "step 23: rank 1: the state of 1 rank has changed between the updates" in stopped.err
    assert "checkpoint not after step 21" in stopped.err
    assert not events(folder / "stopped", RolledBack)
    assert max(loss_curve(folder / "stopped")) == 23
    run_dir = folder / "flipped shard"
    (back,) = [e.event for e in events(run_dir, RolledBack)]
    assert (back.cause, back.failed_rank, back.step, back.not_after_step) == (
        "corruption",
        1,
        23,
        21,
    )
    (odd,) = [e.event for e in events(run_dir, InvariantChecked) if not e.event.ok]
    assert (odd.name, odd.step, odd.ranks) == ("memory_unchanged", 22, [1])
    assert odd.tensors[0].endswith(" exp_avg")
    assert weights(run_dir) == weights(folder / "shards")


@pytest.mark.long
def test_the_budget_of_going_back_is_kept(folder: Path) -> None:
    flipping = ("model.objective=poison:flipping", *THREE, "train.steps=40")
    done = run(*arguments("never", *flipping, "resilience.max_rollbacks=0"), cwd=folder)
    assert done.code == 0, done.err
    assert not events(folder / "never", RolledBack)
    odd = [e.event for e in events(folder / "never", InvariantChecked) if not e.event.ok]
    assert [(e.name, e.ranks) for e in odd if not e.is_summary] == [("replicas_equal", [2])]
