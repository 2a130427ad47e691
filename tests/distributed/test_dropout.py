"""Dropout drops the same in every layout.

Reference: torch's own in one process, filled by dropout_masks.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from commands import TINY, events, run, write_text
from models import BATCH, LAYOUTS, VOCAB, global_batches, plan, replace_parallel, share
from phalanx.mesh.mesh import Mesh, open_mesh
from phalanx.nn.objective import causal_cross_entropy
from phalanx.observe.events import Note
from phalanx.parallel.dropout.rng import EqualPartInputSlice, FixedSizeInputSlice
from phalanx.parallel.model import ParallelModel
from phalanx.parallel.parallelize import parallelize
from phalanx.plan.plan import Plan
from phalanx.run.one_process.dropout_masks import DropoutMasks
from phalanx.run.one_process.plain_loss import compute_textbook_cross_entropy
from ranks import run_ranks

STEPS, LR, WIDTH, SEED = 2, 0.5, 12, 7
OBJECTIVE = causal_cross_entropy(5)


class Louder(nn.Dropout):
    """A user's own class around torch's forward."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(2 * input)


class Block(nn.Module):
    """Layers of each kind, one of them called twice, and dropout that is no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.once, self.twice, self.own = nn.Dropout(0.1), nn.Dropout(0.3), Louder(0.2)
        self.channels, self.alpha = nn.Dropout1d(0.25), nn.AlphaDropout(0.2)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.twice(self.once(self.linear(x)))
        hidden = (
            self.own(self.twice(torch.tanh(hidden)))
            + self.attention(x, x, x, need_weights=False)[0]
        )
        return x + F.dropout(self.alpha(self.channels(hidden)), 0.1, self.training)


class Dropped(nn.Module):
    """Blocks, torch's own layers with the batch in dimension 1, a recurrent one, and F.dropout
    over all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.lookup = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1)
        self.recurrent = nn.GRU(WIDTH, WIDTH, 2, dropout=0.2, batch_first=True)
        self.out = nn.Linear(WIDTH, VOCAB)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.lookup(inputs)
        for block in self.blocks:
            x = block(x)
        x = self.encoder(x.transpose(0, 1)).transpose(0, 1)
        x = x + self.recurrent(x)[0]
        return self.out(F.dropout(x.flatten(0, 1), 0.1, self.training)).view(*inputs.shape, -1)


def dropped() -> nn.Module:
    torch.manual_seed(2)
    return Dropped().double()


def batches() -> list[dict[str, torch.Tensor]]:
    return [{key: batch[key] for key in ("inputs", "targets")} for batch in global_batches(STEPS)]


Outcome = tuple[list[float], dict[str, torch.Tensor]]
"""Losses, and the weights at the end."""


def one_process(rank: int) -> Outcome:
    module, losses = dropped(), []
    masks = DropoutMasks(module, SEED)
    for step, batch in enumerate(batches()):
        with masks.dropping_by_masks(step + 1, 0, BATCH):
            total, targets = compute_textbook_cross_entropy(module(batch["inputs"]), batch)
        module.zero_grad()
        (total / targets).backward()
        losses.append(total.item() / int(targets))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= LR * parameter.grad  # type: ignore[operator]
    assert len(masks.dropped) == 2 * 7 + 4 + 2  # of a block, of the encoder, the rest
    return losses, {name: p.detach() for name, p in module.named_parameters()}


def train(model: ParallelModel, steps: range, num_microbatches: int) -> list[float]:
    optimizer = torch.optim.SGD(list(model.parameters()), lr=LR)
    losses = []
    for step in steps:
        mine = share(
            batches()[step], model.mesh.data_parallel_rank, model.mesh.world_size, num_microbatches
        )
        sums = model.forward_backward(mine, OBJECTIVE, step=step + 1)
        losses.append(model.reduce_and_clip(sums).loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def whole(model: ParallelModel) -> dict[str, torch.Tensor]:
    named = model.named_parameters()
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for name, p in named
    }


def in_layouts(rank: int, num_ranks: int, cases: list[tuple[str, int, str]]) -> list[Outcome]:
    found = []
    for layout, num_microbatches, recompute in cases:
        a_plan = plan(
            num_ranks, num_microbatches, recompute=recompute, **LAYOUTS[num_ranks][layout]
        )
        with open_mesh(a_plan.layout, device="cpu") as mesh:
            model = parallelize(dropped(), a_plan, mesh, seed=SEED)
            found.append((train(model, range(STEPS), num_microbatches), whole(model)))
            assert dict(model.left_to_torch) == {}
    return found


CASES = {
    1: [("one", 1, "none"), ("one", 3, "full"), ("one", 12, "none")],
    2: [
        ("ddp", 1, "full"),
        ("ddp", 3, "none"),
        ("zero3", 1, "none"),
        ("zero3", 2, "full"),
        ("zero2", 6, "none"),
    ],
    4: [("ddp", 3, "none"), ("zero3", 1, "full"), ("hsdp", 1, "none")],
}


@pytest.fixture(scope="module")
def reference() -> Outcome:
    """Computed in one process of its own, so that this one stays free to fork."""
    return run_ranks(1, one_process)[0]


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_every_layout_drops_what_one_process_drops(num_ranks: int, reference: Outcome) -> None:
    """Losses and weights to 1e-10 in fp64, whatever the ranks, the microbatches, and with
    recompute."""
    losses, weights = reference
    for outcomes in run_ranks(num_ranks, in_layouts, num_ranks, CASES[num_ranks]):
        for case, (found, after) in zip(CASES[num_ranks], outcomes, strict=True):
            assert found == pytest.approx(losses, rel=1e-10), case
            off = {name: float((after[name] - w).norm() / w.norm()) for name, w in weights.items()}
            assert {name: error for name, error in off.items() if not error < 1e-10} == {}, case


def from_the_middle(rank: int) -> dict[str, bool]:
    """A process that begins at the second step draws what one that came there draws; another
    seed or step does not."""
    a_plan = plan(1)
    mesh = Mesh(a_plan.layout, 0, 0, torch.device("cpu"))

    def loss_of(*, seed: int = SEED, step: int = 1, dropout: str = "global") -> float:
        torch.manual_seed(rank_seed)
        model = parallelize(dropped(), replace_parallel(a_plan, dropout=dropout), mesh, seed=seed)
        mine = share(batches()[1], 0, 1, 1)
        if step == 2:
            model.forward_backward(mine, OBJECTIVE, step=1)
        sums = model.forward_backward(mine, OBJECTIVE, step=step)
        return float(sums.loss_sum)

    rank_seed = 1
    first, came, jumped = loss_of(), loss_of(step=2), None
    model = parallelize(dropped(), a_plan, mesh, seed=SEED)
    jumped = float(model.forward_backward(share(batches()[1], 0, 1, 1), OBJECTIVE, step=2).loss_sum)
    counted = [
        float(model.forward_backward(share(batches()[1], 0, 1, 1), OBJECTIVE).loss_sum)
        for _ in range(2)
    ]
    return {
        "a jump is exact": came == jumped,
        "steps differ": first != came and counted[0] != counted[1] and counted[0] != jumped,
        "seeds differ": first != loss_of(seed=8),
        "local is torch's": loss_of(dropout="local") == loss_of(dropout="local", seed=8) != first,
        "evaluation drops nothing": evaluates_as_plain(mesh, a_plan),
    }


def evaluates_as_plain(mesh: Mesh, a_plan: Plan) -> bool:
    model = parallelize(dropped(), a_plan, mesh)
    inputs = batches()[0]["inputs"]
    model.train(False)
    return bool(torch.equal(model(inputs), dropped().eval()(inputs)))


def test_masks_are_of_the_step_and_the_seed() -> None:
    (found,) = run_ranks(1, from_the_middle)
    assert [what for what, holds in found.items() if not holds] == []


class DropoutRng(nn.Module):
    """Draws that no place says anything of."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.lookup, self.inner, self.out = (
            nn.Embedding(VOCAB, WIDTH),
            nn.Identity(),
            nn.Linear(WIDTH, VOCAB),
        )
        self.drop = nn.Dropout(0.5)
        self.inner.register_forward_hook(lambda module, args, output: self.draw(output))

    def draw(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x) if self.kind == "rand" else x

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.inner(self.lookup(inputs))
        if self.kind == "other rows":
            x = x * self.drop(torch.ones(BATCH + 1, WIDTH))[:1]
        return self.out(x)


def what_is_left(rank: int) -> dict[str, dict[str, str]]:
    found = {}
    for kind in ("rand", "other rows", "none"):
        model = parallelize(
            DropoutRng(kind), plan(1), Mesh(plan(1).layout, 0, 0, torch.device("cpu"))
        )
        model.forward_backward(share(batches()[0], 0, 1, 1), OBJECTIVE)
        found[kind] = dict(model.left_to_torch)
    return found


def test_what_cannot_be_made_by_place_is_named() -> None:
    (found,) = run_ranks(1, what_is_left)
    assert {kind: list(names) for kind, names in found.items()} == {
        "rand": ["inner"],
        "other rows": ["drop"],
        "none": [],
    }


@pytest.mark.long
def test_a_run_on_several_ranks_says_what_depends_on_the_layout(tmp_path: Path) -> None:
    """torch.rand_like in a forward: once, on the console and for the page.

    One rank alone is told nothing.
    """
    write_text(tmp_path / "text")
    shutil.copy(Path(__file__).with_name("user_code.py"), tmp_path)
    job = [
        *(key for key in TINY if not key.startswith("model.")),
        "data.source=text",
        "model.kind=user_code:noisy",
    ]
    for num_ranks, times in ((2, 1), (1, 0)):
        run_dir = tmp_path / f"on-{num_ranks}"
        ways = [
            f"parallel.ranks={num_ranks}",
            f"parallel.dp_replicate={num_ranks}",
            f"run.dir={run_dir}",
        ]
        done = run("train", *job, *ways, "train.steps=4", "checkpoint.at_end=false", cwd=tmp_path)
        assert done.code == 0, done.err
        named = [line for line in done.out.splitlines() if "which depend on the layout" in line]
        assert [line.split(",")[0] for line in named] == times * [
            "warning: noise: Noise draws random numbers"
        ], done.out
        notes = [note.event.facts for note in events(run_dir, Note) if isinstance(note.event, Note)]
        assert [facts.get("warning") for facts in notes].count("draws_depend_on_layout") == times
        assert (
            "draws random numbers" in (run_dir / "report.html").read_text(encoding="utf-8")
        ) == bool(times)


def parts_of_a_layer(rank: int) -> list[bool]:
    """What a rank of tensor parallelism would say of its layers, beside the whole."""
    model = parallelize(dropped(), plan(1), Mesh(plan(1).layout, 0, 0, torch.device("cpu")))
    draws = model._context.dropout_rng

    def mask(
        name: str, shape: tuple[int, ...], *parts: FixedSizeInputSlice | EqualPartInputSlice
    ) -> torch.Tensor:
        draws.parts = {name: parts}
        with draws.drawing_in_microbatch(3, 4, 2):
            found = draws.draw_mask(name, 0.5, shape, torch.device("cpu"))
        assert found is not None
        return found

    everything = mask("a", (6, 10, 7))  # three rows for each of the microbatch's
    return [
        torch.equal(mask("a", (6, 4, 7), FixedSizeInputSlice(1, 6, 10)), everything[:, 6:]),
        torch.equal(mask("a", (6, 5, 7), EqualPartInputSlice(1, 1, 2)), everything[:, 5:]),
        torch.equal(
            mask("a", (6, 5, 3), EqualPartInputSlice(1, 0, 2), FixedSizeInputSlice(2, 3, 7)),
            everything[:, :5, 3:6],
        ),
        not torch.equal(mask("b", (6, 10, 7)), everything),
    ]


def test_a_part_of_a_layers_input_drops_its_part_of_the_mask() -> None:
    assert run_ranks(1, parts_of_a_layer) == [[True] * 4]
