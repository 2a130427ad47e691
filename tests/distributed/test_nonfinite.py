"""A step that is not finite says where that began: module, rank and samples."""

from __future__ import annotations

import functools
import math
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from commands import TINY, events, run_all, write_text
from phalanx.mesh.logical import get_local_tensor
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
from phalanx.train.backward_watch import BackwardWatch, NonFiniteGradient
from phalanx.train.step_repeat import STILL_NOT_FINITE
from phalanx.train.trainer import Trainer
from ranks import run_ranks
from resuming import differing
from selected import list_selected_params
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


def find_samples_read(run_dir: Path) -> list[SamplesRead]:
    """Those of rank 1 in the step that is not finite."""
    return [
        each.event
        for each in events(run_dir, SamplesRead)
        if (each.event.step, each.event.data_parallel_rank) == (STRUCK, 1)
    ]


def test_the_module_and_the_sample_of_a_row(runs: Path) -> None:
    """The innermost module whose output has it is `odd`: what is inside it is finite."""
    found = find_only(runs / "output")
    assert (found.origin, found.found_in, found.failed_rank) == ("output", "odd", 1)
    (read,) = find_samples_read(runs / "output")
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
    assert (found.origin, found.found_in, found.failed_rank) == ("backward", "the objective", 1)
    # All rows of its only microbatch: the loss has none.
    (read,) = find_samples_read(runs / "gradient")
    assert found.samples == list(range(read.ranges[0], read.ranges[0] + len(found.samples)))
    assert "SpoilBackward" in found.why
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


# --- in the backward ------------------------------------------------------------------------------

DDP: dict[str, Any] = {"dp_replicate": 2}
# The sample: of step 3 and microbatch 1 the third row of rank 1, or of all ranks together.
LAYOUTS = {
    "ddp": (Case(2, DDP), 35),
    "zero3": (Case(2, {"dp_shard": 2, "zero_stage": 3}), 35),
    "tp2": (Case(2, {"tp": 2}), 29),
    "pp2": (Case(2, {"pp": 2}), 29),
    "zb-v": (Case(2, {"pp": 2, "schedule": "zb-v"}, {"num_layers": 4}), 29),
    "recomputed": (Case(2, DDP, job={"train": {"recompute": "full"}}), 35),
    "selective": (Case(2, DDP, job={"train": {"recompute": "selective"}}), 35),
}
# Stages are also those of zb-v, whose backward has two halves, and blocks are recomputed selectively.
LONG = ("pp2", "recomputed")
SPOILED_MODULE, SPOILED_ROW, SPOILED_MICROBATCH = "blocks.1.ffn.down", 2, 1


def spoil_backward_on_rank_1(trainer: Trainer) -> None:
    """Under a root that is added to the module's output one row is zero: its value is finite, and
    its gradient is not."""
    if trainer.mesh.rank != 1:
        return

    def add_root(module: object, inputs: object, output: torch.Tensor) -> torch.Tensor | None:
        place = (trainer.phases.step, trainer.phases.microbatch)
        if place != (STRUCK_EARLY, SPOILED_MICROBATCH) or not torch.is_grad_enabled():
            return None
        rows = output.new_ones(len(output), 1, 1)
        rows[SPOILED_ROW] = 0.0
        return output + (output * rows).abs().sqrt()

    names = dict(trainer.state.model.module.named_modules())
    names[SPOILED_MODULE].register_forward_hook(add_root)


def compute_gradients(trainer: Trainer, watch: BackwardWatch | None) -> dict[str, torch.Tensor]:
    """Bits of this rank's gradients of step STRUCK_EARLY."""
    trainer.phases.step = STRUCK_EARLY
    microbatches = trainer.data.batches.step_microbatches(STRUCK_EARLY)
    with nullcontext() if watch is None else watch.watching():
        trainer.state.model.forward_backward(microbatches, trainer.data.objective, step=1)
    bits = {
        name: get_local_tensor(parameter.grad).clone().view(torch.int32)
        for name, parameter in trainer.state.model.named_parameters()
        if parameter.grad is not None
    }
    trainer.state.optimizer.zero_grad(set_to_none=True)
    return bits


def train_layouts(rank: int, layouts: list[str], folder: Path) -> list[tuple[str, bool, list[str]]]:
    """(layout, whether something was found, gradients whose bits the watch changed), before and
    after the backward is spoiled."""
    outcomes = []

    def compare(layout: str, trainer: Trainer) -> None:
        # DDP orders its buckets by the first backward.
        compute_gradients(trainer, None)
        for spoil in (lambda trainer: None, spoil_backward_on_rank_1):
            spoil(trainer)
            watch = BackwardWatch(trainer.state.model)
            plain, watched = (compute_gradients(trainer, each) for each in (None, watch))
            assert plain
            outcomes.append((layout, watch.first is not None, differing(plain, watched)))

    for layout in layouts:
        case, _ = LAYOUTS[layout]
        train_case(rank, case, folder / layout, change=functools.partial(compare, layout))
    return outcomes


@pytest.fixture(scope="module")
def backwards(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Path, list[str], list[Any]]:
    folder = tmp_path_factory.mktemp("backwards")
    selected = {layout for (layout,) in list_selected_params(request, "layout")}
    layouts = [layout for layout in LAYOUTS if layout in selected or layout not in LONG]
    return folder, layouts, run_ranks(2, train_layouts, layouts, folder)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, marks=[pytest.mark.long] * (layout in LONG)) for layout in LAYOUTS],
)
def test_the_module_whose_backward_makes_it(
    layout: str, backwards: tuple[Path, list[str], Any]
) -> None:
    (envelope,) = read_recorded_events(backwards[0] / layout, NonFiniteFound, rank=0)
    found = envelope.event
    assert isinstance(found, NonFiniteFound)
    assert (found.step, found.origin, found.found_in) == (STRUCK_EARLY, "backward", SPOILED_MODULE)
    assert (found.failed_rank, found.microbatch) == (1, SPOILED_MICROBATCH)
    sample = LAYOUTS[layout][1]
    assert found.samples == [sample]
    assert describe_event(envelope) == (
        f"step {STRUCK_EARLY}: the first gradient that is not finite is made in the backward of"
        f" {SPOILED_MODULE} on rank 1, of samples {sample} (by SqrtBackward0, of gradients that are"
        f" finite); the step is left out: {STILL_NOT_FINITE}"
    )


def test_gradients_that_are_watched_have_the_same_bits(
    backwards: tuple[Path, list[str], Any],
) -> None:
    _, layouts, of_ranks = backwards
    for rank, outcomes in enumerate(of_ranks):
        assert {layout for layout, *_ in outcomes} == set(layouts)
        for index, (layout, is_found, changed) in enumerate(outcomes):
            assert changed == [], layout
            if rank == 1:
                assert is_found == (index % 2 == 1), layout


class Overflow(torch.autograd.Function):
    """Has a gradient that is finite, and is not twice."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return torch.full_like(gradient, 3e38)


def find_in_one_process(rank: int) -> list[NonFiniteGradient | None]:
    found = []

    def spoil_and_watch(trainer: Trainer) -> None:
        names = dict(trainer.state.model.module.named_modules())

        def add_root_of_masked_row(module: object, inputs: object, output: Any) -> Any:
            mask = torch.zeros(len(output), 1, 1, dtype=torch.bool)
            mask[SPOILED_ROW] = True
            return output + output.masked_fill(mask, 0.0).abs().sqrt()

        def add_two_that_overflow(module: object, inputs: object, output: Any) -> Any:
            return Overflow.apply(output) + Overflow.apply(output)

        for name, hook in (
            ("blocks.1.ffn.down", add_root_of_masked_row),
            ("blocks.0.ffn.down", add_two_that_overflow),
        ):
            names[name].register_forward_hook(hook)
            watch = BackwardWatch(trainer.state.model)
            compute_gradients(trainer, watch)
            found.append(watch.first)

        # Beside autograd's operations, in the run that follows.
        for name in names:
            names[name]._forward_hooks.clear()
        (weight,) = names["blocks.0.ffn.down"].parameters()
        weight.register_hook(
            lambda gradient: gradient * (math.nan if trainer.state.step == 1 else 1.0)
        )

    with tempfile.TemporaryDirectory() as folder:
        train_case(rank, Case(), Path(folder), change=spoil_and_watch)
        (envelope,) = read_recorded_events(Path(folder), NonFiniteFound, rank=0)
    return [*found, envelope.event]


def test_what_reaches_no_parameter_is_not_named_and_a_sum_is_said_as_one() -> None:
    ((masked, overflow, hooked),) = run_ranks(1, find_in_one_process)
    assert masked is None
    assert (overflow.module, overflow.is_sum, overflow.rows) == (
        "blocks.0.ffn.down",
        True,
        [0, 1, 2],
    )
    assert (hooked.origin, hooked.found_in) == ("gradient", "blocks.0.ffn.down.weight")
    assert hooked.failed_rank == -1
    assert hooked.why.endswith("after reduction, and no module's backward makes one")
