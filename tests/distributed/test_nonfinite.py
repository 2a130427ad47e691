"""A step that is not finite says where that began: module, rank and samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from commands import TINY, events, run_all, write_text
from phalanx.observe.events import (
    NonFiniteFound,
    RunFinished,
    SamplesRead,
    StepSkipped,
    wrap_event_in_envelope,
)
from phalanx.observe.tail import read_recorded_events
from phalanx.observe.words import describe_event
from phalanx.parallel.step_stats import LocalLoss
from phalanx.train.trainer import Trainer
from ranks import run_ranks
from trained import Case, train_case

STRUCK = 5
# On rank 1 in step 5: the loss is not finite, or its gradient, or one row of a module's output.
SPOILED = """
import os
import torch
from phalanx.nn.objective import causal_cross_entropy

exact = causal_cross_entropy(64)
calls = 0


class Spoil(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("nan")


def is_struck():
    return os.environ.get("RANK") == "1" and calls == 5


def in_loss(outputs, batch):
    global calls
    calls += torch.is_grad_enabled()
    loss, num_targets = exact(outputs, batch)
    if is_struck():
        loss = loss * float("inf")
    return loss, num_targets


def in_backward(outputs, batch):
    global calls
    calls += torch.is_grad_enabled()
    loss, num_targets = exact(outputs, batch)
    # Again when the step is repeated: its numbers are at fault, and no processor.
    is_repeated = os.environ.get("RANK") == "1" and calls == 6
    if (is_struck() or is_repeated) and torch.is_grad_enabled():
        loss = Spoil.apply(loss)
    return loss, num_targets

"""
MODEL = """
import os
import torch
from torch import nn

ROW = 2


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.steps = 0

    def forward(self, x):
        self.steps += torch.is_grad_enabled()
        x = self.inner(x)
        if os.environ.get("RANK") == "1" and self.steps == 5:
            x = x.clone()
            x[ROW] = float("nan")
        return x


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(257, 16)
        self.first = nn.Linear(16, 16)
        self.odd = Odd()
        self.head = nn.Linear(16, 257)

    def forward(self, tokens):
        return self.head(self.odd(self.first(self.embed(tokens))))


def build():
    return Small()


class Once(Small):
    def __init__(self, persistent):
        super().__init__()
        self.calls = 0
        self.odd = nn.Identity()
        self.register_buffer("forwards", torch.zeros(()), persistent=persistent)

    def forward(self, tokens):
        if not self.training:
            return super().forward(tokens)
        self.calls += 1
        self.forwards += 1
        logits = super().forward(tokens)
        if os.environ.get("RANK") == "1" and self.calls == 5:
            logits = logits * float("nan")
        return logits


def build_once(persistent):
    return Once(persistent)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nonfinite")
    write_text(folder / "text")
    (folder / "spoiled.py").write_text(SPOILED)
    (folder / "small.py").write_text(MODEL)
    job = (
        *TINY,
        "data.source=text",
        "train.steps=8",
        "observe.samples=true",
        "parallel.ranks=2",
        "parallel.dp_replicate=2",
    )
    own = [setting for setting in job if not setting.startswith("model.")]
    once = [*own, "model.kind=small:build_once", "model.vocab_size=257"]
    commands = [
        ["train", *own, "model.kind=small:build", "model.vocab_size=257", "run.dir=output"],
        ["train", *once, "model.args={persistent=true}", "run.dir=once"],
        ["train", *once, "model.args={persistent=false}", "run.dir=twice"],
        ["train", *job, "model.objective=spoiled:in_loss", "run.dir=loss"],
        ["train", *job, "model.objective=spoiled:in_backward", "run.dir=gradient"],
        [
            "train",
            *(setting for setting in job if "dp_replicate" not in setting),
            "parallel.dp_shard=2",
            "model.objective=spoiled:in_loss",
            "run.dir=sharded",
        ],
    ]
    for done in run_all(commands, folder):
        assert done.code == 0, done.err
        assert "not finite" in done.out
    return folder


def find_only(run_dir: Path) -> NonFiniteFound:
    (found,) = [e.event for e in events(run_dir, NonFiniteFound)]
    assert found.step == STRUCK
    assert [e.event.step for e in events(run_dir, StepSkipped)] == [STRUCK]
    assert [e.event.status for e in events(run_dir, RunFinished)] == ["finished"]
    return found


def test_the_module_and_the_sample_of_a_row(runs: Path) -> None:
    """The innermost module whose output has it is `odd`: what is inside it is finite."""
    found = find_only(runs / "output")
    assert (found.origin, found.found_in, found.failed_rank) == ("output", "odd", 1)
    (read,) = [
        e.event
        for e in events(runs / "output", SamplesRead)
        if (e.event.step, e.event.data_parallel_rank) == (STRUCK, 1)
    ]
    assert found.samples == [read.ranges[0] + 2]


def test_a_module_of_ones_own_is_repeated(runs: Path) -> None:
    """What its forward has written into a buffer is put back before."""
    (found,) = [e.event for e in events(runs / "once", NonFiniteFound)]
    assert (found.step, found.origin, found.failed_rank) == (STRUCK, "unknown", 1)
    assert (found.was_repeated, found.why_not_repeated) == (True, "")
    assert events(runs / "once", StepSkipped) == []
    numbers = []
    for file in (runs / "once" / "checkpoints" / "step-8").glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            if name.startswith("forwards"):
                numbers.append(tensor.item())
    assert numbers == [8.0]


def test_a_buffer_that_cannot_be_put_back_is_the_reason_why_a_step_is_left_out(runs: Path) -> None:
    found = find_only(runs / "twice")
    assert (found.origin, found.failed_rank, found.was_repeated) == ("unknown", 1, False)
    assert found.why_not_repeated == "a forward writes into forwards, a buffer that is not saved"
    assert describe_event(wrap_event_in_envelope(found, rank=0, attempt=0)) == (
        "step 5: the loss of rank 1 was not finite, and no origin was found: forwards are finite"
        " when they are computed again; the step is left out: a forward writes into"
        " forwards, a buffer that is not saved"
    )


@pytest.mark.parametrize("layout", ["loss", "sharded"])
def test_the_objective(runs: Path, layout: str) -> None:
    found = find_only(runs / layout)
    assert (found.origin, found.failed_rank) == ("loss", 1)


def test_the_backward(runs: Path) -> None:
    found = find_only(runs / "gradient")
    assert found.origin == "gradient"
    assert "the forward is finite" in found.why
    assert found.failed_rank == -1
    assert not found.was_repeated
    assert found.why_not_repeated == "computed again it is not finite either"


# --- on some ranks of a layout --------------------------------------------------------------------

STRUCK_EARLY = 3
LAST_OUTPUT_OF_BLOCK_0 = "blocks.0.ffn.down"


def spoil_block_0(trainer: Trainer) -> None:
    """Where the first stage is: the last of many outputs, which the next stage begins with."""
    if trainer.mesh.coordinates["pp"] != 0:
        return

    def spoil(module: object, inputs: object, output: torch.Tensor) -> torch.Tensor | None:
        # In the step, and in the search that follows it.
        return output * float("nan") if trainer.state.step + 1 == STRUCK_EARLY else None

    names = dict(trainer.state.model.module.named_modules())
    names[LAST_OUTPUT_OF_BLOCK_0].register_forward_hook(spoil)


def spoil_loss_of_rank_1_once(trainer: Trainer) -> None:
    """As a fault of the machine does: computed again, the loss is finite."""
    model = trainer.state.model
    compute = model.forward_backward

    def compute_and_spoil(*args: Any, **kwargs: Any) -> LocalLoss:
        sums = compute(*args, **kwargs)
        if trainer.mesh.rank == 1 and trainer.state.step + 1 == STRUCK_EARLY:
            sums.loss_sum.fill_(float("nan"))
        return sums

    model.forward_backward = compute_and_spoil  # type: ignore[method-assign]


def train_spoiled(rank: int, case: Case, folder: Path, spoil: Any) -> None:
    train_case(rank, case, folder, change=spoil)


def find_in_case(case: Case, folder: Path, spoil: Any) -> NonFiniteFound:
    run_ranks(case.ranks, train_spoiled, case, folder, spoil)
    (found,) = [e.event for e in read_recorded_events(folder, NonFiniteFound, rank=0)]
    assert isinstance(found, NonFiniteFound)
    assert found.step == STRUCK_EARLY
    return found


@pytest.mark.parametrize("axis", ["pp", "tp"])
def test_the_first_stage_and_not_those_that_it_feeds(axis: str, tmp_path: Path) -> None:
    found = find_in_case(Case(2, {axis: 2}), tmp_path, spoil_block_0)
    assert (found.origin, found.found_in) == ("output", LAST_OUTPUT_OF_BLOCK_0)
    assert (found.failed_rank, found.microbatch) == (0, 0)


def test_a_loss_that_is_finite_when_it_is_computed_again(tmp_path: Path) -> None:
    found = find_in_case(Case(2, {"dp_replicate": 2}), tmp_path, spoil_loss_of_rank_1_once)
    assert (found.origin, found.failed_rank) == ("unknown", 1)
