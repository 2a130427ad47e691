"""BatchNorm over all ranks computes what plain BatchNorm computes on the concatenated
microbatch, in one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bare_loop import Tensors
from checkpoints import restore_state, save_state
from models import BATCH, LAYOUTS, VOCAB, plan, replace_parallel, share
from phalanx.core.errors import DataError, LayoutError
from phalanx.job.schema import Optim
from phalanx.mesh.mesh import Mesh, open_mesh
from phalanx.optim.build import build_optimizer
from phalanx.parallel.parallelize import parallelize
from phalanx.plan.plan import Plan
from phalanx.train.state import TrainState
from ranks import run_ranks

STEPS, LR, WIDTH = 2, 0.2, 6


class Doubled(nn.BatchNorm2d):
    """A user's own class around torch's forward."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(2 * input).relu()


class OwnStatistics(nn.BatchNorm2d):
    """A user's class that computes everything itself."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)


def eval_norm(**options: Any) -> nn.Module:
    norm = nn.BatchNorm2d(WIDTH, **options)
    with torch.no_grad():
        norm.running_mean.fill_(0.3)
        norm.running_var.fill_(1.7)
    return norm.eval()


def untracked(norm: nn.BatchNorm2d) -> nn.Module:
    norm.track_running_stats = False
    return norm


# name -> (layer, shape of one sample)
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(WIDTH), (WIDTH,)),
    "1d sequence": (lambda: nn.BatchNorm1d(WIDTH), (WIDTH, 5)),
    "2d": (lambda: nn.BatchNorm2d(WIDTH), (WIDTH, 3, 4)),
    "3d": (lambda: nn.BatchNorm3d(WIDTH), (WIDTH, 2, 3, 2)),
    "average of all": (lambda: nn.BatchNorm2d(WIDTH, momentum=None), (WIDTH, 3, 4)),
    "momentum 0.7, eps 0.1": (lambda: nn.BatchNorm2d(WIDTH, momentum=0.7, eps=0.1), (WIDTH, 3, 4)),
    "no weight": (lambda: nn.BatchNorm2d(WIDTH, affine=False), (WIDTH, 3, 4)),
    "no running statistics": (
        lambda: nn.BatchNorm2d(WIDTH, track_running_stats=False),
        (WIDTH, 3, 4),
    ),
    "none, evaluated": (
        lambda: nn.BatchNorm2d(WIDTH, track_running_stats=False).eval(),
        (WIDTH, 3, 4),
    ),
    "evaluated": (eval_norm, (WIDTH, 3, 4)),
    "tracking switched off": (lambda: untracked(nn.BatchNorm2d(WIDTH)), (WIDTH, 3, 4)),
    "own class": (lambda: Doubled(WIDTH), (WIDTH, 3, 4)),
}
SHARES = {2: (5, 2), 4: (1, 6, 0, 3)}  # rows of each rank: uneven, one, none


def filled(build: Callable[[], nn.Module]) -> nn.Module:
    layer = build().double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))
    return layer


def inputs_of(sample: tuple[int, ...], rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with a mean far from zero, and what the output is multiplied with to make a loss."""
    generator = torch.Generator().manual_seed(4)
    x = 3 * torch.randn(rows, *sample, generator=generator, dtype=torch.float64) + 20
    return x, torch.randn(rows, *sample, generator=generator, dtype=torch.float64)


def run_layer(layer: nn.Module, x: torch.Tensor, factor: torch.Tensor) -> Tensors:
    """Two calls of the layer: outputs and input gradients of the second, weight gradients of it,
    buffers at the end."""
    layer(x[torch.arange(len(x) - 1, -1, -1)] * 0.5)
    layer.zero_grad()
    x = x.clone().requires_grad_()
    output = layer(x)
    (output * factor).square().sum().backward()
    assert x.grad is not None
    found = {"output": output.detach(), "input gradient": x.grad}
    found |= {
        f"gradient {name}": p.grad for name, p in layer.named_parameters() if p.grad is not None
    }
    return found | {f"buffer {name}": buffer.clone() for name, buffer in layer.named_buffers()}


def plain_layers(rank: int) -> dict[int, dict[str, Tensors]]:
    return {
        num_ranks: {
            name: run_layer(filled(build), *inputs_of(sample, sum(rows)))
            for name, (build, sample) in LAYERS.items()
        }
        for num_ranks, rows in SHARES.items()
    }


def synchronised_layers(rank: int, num_ranks: int) -> dict[str, Tensors]:
    """The first call sees other rows of each rank than the reference's does, but the same over
    all ranks."""
    found = {}
    a_plan = plan(num_ranks, **LAYOUTS[num_ranks]["ddp"])
    starts = [0, *itertools.accumulate(SHARES[num_ranks])]
    mine = slice(starts[rank], starts[rank + 1])
    with open_mesh(a_plan.layout, device="cpu") as mesh:
        for name, (build, sample) in LAYERS.items():
            layer = filled(build)
            if any(True for _ in layer.parameters()):
                parallelize(layer, a_plan, mesh)
            else:  # nothing that DDP could reduce: beside something that has
                parallelize(nn.Sequential(layer, nn.Linear(2, 2)), a_plan, mesh)
            x, factor = inputs_of(sample, sum(SHARES[num_ranks]))
            found[name] = run_layer(layer, x[mine], factor[mine])
    return found


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).double().norm() / wanted.double().norm().clamp(min=1e-30)).item()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_layer_equals_torchs_on_the_whole_microbatch(num_ranks: int) -> None:
    """Outputs, gradients of input and weights, running statistics: to 1e-12 in fp64, with uneven
    rows per rank."""
    (plain,) = run_ranks(1, plain_layers)
    ranks = run_ranks(num_ranks, synchronised_layers, num_ranks)
    for name, wanted in plain[num_ranks].items():
        assert all(set(found[name]) == set(wanted) for found in ranks)
        for what, whole in wanted.items():
            parts = [found[name][what] for found in ranks]
            if what in ("output", "input gradient"):
                assert error(torch.cat(parts), whole) < 1e-12, (name, what)
            elif what.startswith(
                "gradient"
            ):  # of each rank's own rows; data parallelism adds them up
                assert error(torch.stack(parts).sum(0), whole) < 1e-12, (name, what)
            else:
                assert all(error(part, whole) < 1e-12 for part in parts), (name, what)


class ConvNet(nn.Module):
    """Blocks of convolution and BatchNorm between an embedding and a head; one statistic is
    shared by two places."""

    def __init__(self) -> None:
        super().__init__()
        self.lookup = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
                nn.BatchNorm1d(WIDTH, momentum=0.3),
                nn.SiLU(),
            )
            for _ in range(2)
        )
        self.last = nn.BatchNorm1d(WIDTH, momentum=None)
        self.out = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.lookup(tokens).transpose(1, 2)
        for block in self.blocks:
            x = x + block(x)
        x = self.last(self.last(x) * 1.5)
        return self.out(x.transpose(1, 2))


def conv_net() -> nn.Module:
    torch.manual_seed(8)
    return ConvNet().double()


def conv_batches() -> list[Tensors]:
    generator = torch.Generator().manual_seed(6)
    tokens = torch.randint(VOCAB, (STEPS, BATCH, 9), generator=generator)
    return [{"inputs": step[:, :-1], "targets": step[:, 1:]} for step in tokens]


def objective(outputs: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    total = F.cross_entropy(outputs.flatten(0, -2), batch["targets"].flatten(), reduction="sum")
    return total, torch.tensor(batch["targets"].numel())


def train_plain(rank: int) -> dict[int, Tensors]:
    """By the number of microbatches: weights and buffers after SGD steps of an untouched module
    in a plain loop."""
    found = {}
    for num_microbatches in (1, 3):
        module = conv_net()
        sgd = torch.optim.SGD(module.parameters(), lr=LR)
        for batch in conv_batches():
            sgd.zero_grad()
            for part in range(num_microbatches):  # of the whole batch: what all ranks see at a time
                rows = slice(
                    part * BATCH // num_microbatches, (part + 1) * BATCH // num_microbatches
                )
                logits, targets = module(batch["inputs"][rows]), batch["targets"][rows]
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
                (loss / batch["targets"].numel()).backward()
            sgd.step()
        found[num_microbatches] = {
            name: tensor.clone() for name, tensor in module.state_dict().items()
        }
    return found


Case = tuple[str, int, str]


def list_cases(num_ranks: int) -> list[Case]:
    """(layout, microbatches, recomputation): each with each."""
    modes = ("none", "full", "selective", "sqrt") if num_ranks == 2 else ("none", "full")
    return list(itertools.product(LAYOUTS[num_ranks], (1, 3), modes))


def list_few_cases(num_ranks: int) -> list[Case]:
    """Each layout with and without microbatches, and each way to recompute in two layouts."""
    few = []
    for place, layout in enumerate(LAYOUTS[num_ranks]):
        few += [(layout, 1, ("none", "sqrt")[place % 2])]
        few += [(layout, 3, ("full", "selective")[place % 2])]
    return few


def train_parallel(rank: int, num_ranks: int, cases: list[Case]) -> dict[Case, Tensors]:
    found: dict[Case, Tensors] = {}
    for layout, num_microbatches, recompute in cases:
        a_plan = plan(
            num_ranks, num_microbatches, recompute=recompute, **LAYOUTS[num_ranks][layout]
        )
        with open_mesh(a_plan.layout, device="cpu") as mesh:
            model = parallelize(conv_net(), a_plan, mesh)
            sgd = torch.optim.SGD(model.parameters(), lr=LR)
            for batch in conv_batches():
                sgd.zero_grad()
                mine = share(batch, rank, num_ranks, num_microbatches)
                assert model.reduce_and_clip(model.forward_backward(mine, objective)).should_apply
                model.update(sgd)
            states = {name: tensor.detach() for name, tensor in model.module.state_dict().items()}
            found[layout, num_microbatches, recompute] = {
                name: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone()
                for name, t in states.items()
            }
    return found


@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [
        pytest.param(1, list_few_cases(1), id="1"),
        pytest.param(2, list_few_cases(2), id="2"),
        pytest.param(2, list_cases(2), marks=pytest.mark.long, id="2, all"),
        pytest.param(4, list_cases(4), marks=pytest.mark.long, id="4"),
    ],
)
def test_training_equals_one_process_in_every_layout(num_ranks: int, cases: list[Case]) -> None:
    """Weights and running statistics after SGD steps in fp64, with gradients accumulated and
    blocks recomputed."""
    (plain,) = run_ranks(1, train_plain)
    for found in run_ranks(num_ranks, train_parallel, num_ranks, cases):
        for case, state in found.items():
            wanted = plain[case[1]]
            assert set(state) == set(wanted)
            errors = {name: error(state[name], tensor) for name, tensor in wanted.items()}
            assert {name: size for name, size in errors.items() if not size <= 1e-10} == {}, case


def without_synchronisation(rank: int) -> Tensors:
    a_plan = replace_parallel(plan(2, dp_replicate=2), sync_batchnorm=False)
    with open_mesh(a_plan.layout, device="cpu") as mesh:
        model = parallelize(conv_net(), a_plan, mesh)
        model.forward_backward(share(conv_batches()[0], rank, 2, 1), objective)
        return {name: tensor.detach().clone() for name, tensor in model.module.state_dict().items()}


def test_without_it_each_rank_has_statistics_of_its_own() -> None:
    first, second = run_ranks(2, without_synchronisation)
    assert error(first["last.running_mean"], second["last.running_mean"]) > 1e-3


def in_bf16(rank: int, num_ranks: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for layout, synchronised in itertools.product(LAYOUTS[num_ranks], (True, False)):
        a_plan = plan(num_ranks, precision="bf16", **LAYOUTS[num_ranks][layout])
        a_plan = replace_parallel(a_plan, sync_batchnorm=synchronised)
        with open_mesh(a_plan.layout, device="cpu") as mesh:
            model = parallelize(conv_net().float(), a_plan, mesh)
            losses = []
            sgd = torch.optim.SGD(model.parameters(), lr=LR)
            for batch in conv_batches():
                sgd.zero_grad()
                mine = share(batch, rank, num_ranks, 1)
                losses.append(model.reduce_and_clip(model.forward_backward(mine, objective)).loss)
                model.update(sgd)
            model.train(False)
            sums = model.evaluate(share(conv_batches()[0], rank, num_ranks, 1), objective)
            losses.append(model.reduce_sums(sums)[0])
            found[layout, synchronised] = (
                losses,
                {str(buffer.dtype) for buffer in model.module.buffers()},
            )
    return found


def test_under_bf16_statistics_stay_wide() -> None:
    """Losses of steps and of an evaluation are those of one rank to 2 %, and running statistics are
    fp32.

    Without synchronisation, too: torch's own kernel refuses weights that FSDP has cast beside fp32
    statistics.
    """
    losses, _ = run_ranks(1, in_bf16, 1)[0]["one", True]
    for found in run_ranks(2, in_bf16, 2):
        for case, (theirs, dtypes) in found.items():
            assert theirs == pytest.approx(losses, rel=2e-2), case
            assert dtypes == {"torch.float32", "torch.int64"}


# Checkpoints


def resume_half_way(rank: int, num_ranks: int, root: Path) -> dict[str, tuple[Tensors, Tensors]]:
    """(states of a straight run, those of one that was saved, forgotten and restored after two
    of three steps)."""
    found = {}
    batches = [*conv_batches(), conv_batches()[0]]
    for layout in LAYOUTS[num_ranks]:
        a_plan = plan(num_ranks, **LAYOUTS[num_ranks][layout])
        with open_mesh(a_plan.layout, device="cpu") as mesh:

            def new_state(a_plan: Plan = a_plan, mesh: Mesh = mesh) -> TrainState:
                model = parallelize(conv_net(), a_plan, mesh)
                return TrainState(model, build_optimizer(model, Optim(kind="sgd", lr=LR)), 0)

            def take(state: TrainState, some: list[Tensors]) -> None:
                for batch in some:
                    mine = share(batch, rank, num_ranks, 1)
                    state.model.reduce_and_clip(state.model.forward_backward(mine, objective))
                    state.model.update(state.optimizer)
                    state.optimizer.zero_grad()
                    state.step += 1

            straight, resumed = new_state(), new_state()
            take(straight, batches[:2])
            saved = save_state(straight, root / layout)
            take(straight, batches[2:])
            restore_state(resumed, saved)
            take(resumed, batches[2:])
            found[layout] = tuple(
                {name: shard.tensor.clone() for name, shard in state.shards().items()}
                for state in (straight, resumed)
            )
    return found


def test_running_statistics_are_part_of_a_checkpoint(tmp_path: Path) -> None:
    """Resumed, every bit of weights, momentum and statistics is that of the straight run."""
    for outcome in run_ranks(2, resume_half_way, 2, tmp_path):
        for layout, (straight, resumed) in outcome.items():
            kept = {
                "last.running_var",
                "last.num_batches_tracked",
                "optim/last.weight/momentum_buffer",
            }
            assert kept <= set(straight)
            assert [
                name for name in straight if not torch.equal(straight[name], resumed[name])
            ] == [], layout


# What stays the user's, and what is refused


def look_at_it(rank: int) -> dict[str, Any]:
    a_plan = plan(2, **LAYOUTS[2]["ddp"])
    with open_mesh(a_plan.layout, device="cpu") as mesh:
        module = nn.Sequential(Doubled(WIDTH), nn.SyncBatchNorm(WIDTH), nn.InstanceNorm2d(WIDTH))
        names = list(module.state_dict())
        norm = module[0]
        model = parallelize(module, a_plan, mesh)
        model(torch.randn(2, WIDTH, 3, 3))  # torch's own SyncBatchNorm refuses CPU tensors
        return {
            "names": list(module.state_dict()) == names and set(model.shards()) == set(names),
            "object": module[0] is norm and isinstance(norm, Doubled),
            "instance norm": type(module[2]) is nn.InstanceNorm2d,
        }


def test_names_objects_and_classes_stay_the_users() -> None:
    for found in run_ranks(2, look_at_it):
        assert [what for what, kept in found.items() if not kept] == []


class Counting(nn.Module):
    """A block that changes a buffer of its own in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.linear(x)


def refused(rank: int, what: str) -> str:
    ddp = plan(2, **LAYOUTS[2]["ddp"])
    cases: dict[str, tuple[Plan, Callable[[], nn.Module], tuple[int, ...]]] = {
        "own": (
            ddp,
            lambda: nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 1), OwnStatistics(WIDTH)),
            (2, WIDTH, 3, 3),
        ),
        "lonely": (ddp, lambda: nn.BatchNorm1d(WIDTH), (1 - rank, WIDTH)),
        "buffer": (
            plan(2, recompute="full", dp_replicate=2),
            lambda: nn.Sequential(Counting(), Counting()),
            (2, 4),
        ),
        "compiled": (
            replace(plan(2, recompute="full", dp_replicate=2), compile=True),
            lambda: nn.Sequential(
                *(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))
            ),
            (2, 4),
        ),
    }
    a_plan, build, shape = cases[what]
    torch.manual_seed(0)
    with open_mesh(a_plan.layout, device="cpu") as mesh:
        try:
            parallelize(build(), a_plan, mesh)(torch.randn(shape, requires_grad=True))
        except (LayoutError, DataError) as error:
            return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (
            "own",
            ["1 (OwnStatistics)", "does not call super().forward", "parallel.sync_batchnorm=false"],
        ),
        ("lonely", ["more than 1 value per channel", "all ranks together have 1"]),
        ("buffer", ["Counting", "buffer calls", "train.recompute=none"]),
        ("compiled", ["BatchNorm", "train.compile=false"]),
    ],
)
def test_what_cannot_be_right_is_refused_on_every_rank(what: str, words: list[str]) -> None:
    for said in run_ranks(2, refused, what):
        assert [word for word in words if word not in said] == [], said
