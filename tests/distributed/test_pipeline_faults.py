"""A stage that fails in the middle of a schedule, as a user sees it: all ranks stop, and the one
that failed speaks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from commands import (
    TINY,
    Done,
    events,
    loss_curve,
    run,
    run_all,
    survivors,
    weights,
    write_text,
)
from phalanx.observe.events import RankFailed

BREAKING = """
import torch
from torch import nn


class Breaks(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Breaks.calls += 1
        if torch.distributed.get_rank() == 3 and Breaks.calls == 3:
            raise ValueError("in the backward of microbatch 2")
        return gradient


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x):
        return x + Breaks.apply(self.down(torch.tanh(self.up(x))))


class Model(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, vocab_size)

    def forward(self, inputs):
        x = self.embed(inputs)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(vocab_size=257):
    return Model(vocab_size)
"""
WITHOUT_MODEL = tuple(override for override in TINY if not override.startswith("model."))


def test_a_stage_that_raises_amid_a_schedule_stops_all_and_is_named(tmp_path: Path) -> None:
    """Rank 3 of 4, in microbatch 2's backward: the others wait for what it never sends."""
    write_text(tmp_path / "text")
    (tmp_path / "breaking.py").write_text(BREAKING)
    job = ("data.source=text", "train.micro_batch_size=1", "parallel.ranks=4", "parallel.pp=4")
    job += ("parallel.stage_blocks=[1,1,1,1]", "run.dir=broken")
    done = run("train", *WITHOUT_MODEL, *job, "model.kind=breaking:build", cwd=tmp_path)
    assert done.code == 10, done.err
    lines = done.err.splitlines()
    assert lines[0].startswith(
        "deterministic failure at step 1: ValueError: in the backward of microbatch 2"
    )
    assert re.match(r"rank 3 failed at step 1 in backward", lines[1]), done.err
    assert lines[2] == "Traceback (most recent call last):"
    assert "breaking.py" in done.err
    failures = events(tmp_path / "broken", RankFailed)
    assert {failure.event.failed_rank for failure in failures} == {3}
    assert not survivors(tmp_path / "broken")


LAYOUT = ("parallel.ranks=2", "parallel.pp=2", "parallel.schedule=zb-v", "model.num_layers=4")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Done]]:
    """A run that nothing happens to, one whose stages are killed, and one that is continued by
    hand."""
    folder = tmp_path_factory.mktemp("killed")
    write_text(folder / "text")
    job = (
        "train",
        *TINY,
        *LAYOUT,
        "data.source=text",
        "train.steps=12",
        "checkpoint.every_steps=4",
    )
    job += ("checkpoint.asynchronous=false", "optim.lr=0.01")
    faults = (
        '"kill:rank=1,step=3,phase=backward", "kill:rank=0,step=7,phase=pipeline",'
        ' "kill:rank=1,step=9,phase=forward"'
    )
    by_hand = '"kill:rank=0,step=6,phase=backward"'
    commands = {
        "straight": [*job, "run.dir=straight"],
        "restarted": [
            *job,
            "run.dir=restarted",
            f"resilience.inject=[{faults}]",
            "resilience.max_restarts=5",
        ],
        "by hand": [
            *job,
            "run.dir=hand",
            f"resilience.inject=[{by_hand}]",
            "resilience.max_restarts=0",
        ],
    }
    found = dict(zip(commands, run_all(list(commands.values()), folder), strict=True))
    found["resumed"] = run("train", "--resume", "hand", cwd=folder)
    return folder, found


@pytest.mark.long
def test_a_killed_stage_starts_again_where_the_run_was(
    killed: tuple[Path, dict[str, Done]],
) -> None:
    """Losses of every step and weights of the last one equal those of the run that nothing
    happened to, bit for bit."""
    folder, done = killed
    assert (done["straight"].code, done["restarted"].code) == (0, 0), done["restarted"].err
    failures = events(folder / "restarted", RankFailed)
    assert [(e.event.failed_rank, e.event.phase) for e in failures] == [
        (1, "backward"),
        (0, "pipeline"),
        (1, "forward"),
    ]
    assert loss_curve(folder / "restarted") == loss_curve(folder / "straight")
    assert list(loss_curve(folder / "straight")) == list(range(1, 13))
    assert weights(folder / "restarted") == weights(folder / "straight")
    assert not survivors(folder / "restarted")


@pytest.mark.long
def test_a_pipeline_that_was_killed_is_continued_by_hand(
    killed: tuple[Path, dict[str, Done]],
) -> None:
    folder, done = killed
    assert done["by hand"].code == 10, done["by hand"].err
    assert "was killed by SIGKILL at step 6 in backward" in done["by hand"].err
    assert done["resumed"].code == 0, done["resumed"].err
    assert loss_curve(folder / "hand") == loss_curve(folder / "straight")
    assert weights(folder / "hand") == weights(folder / "straight")
