"""train.deterministic = "layout-free": losses, norms, evaluations and weights have the same bits on
1, 2 and 4 ranks. Reference: one rank; and the usual mode, in which they have not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import newest, restore_state, save_state
from models import CPU, VOCAB, fill
from phalanx.core.errors import LayoutError
from phalanx.job.schema import Job
from phalanx.mesh.mesh import open_mesh
from phalanx.nn.models.decoder import Decoder
from phalanx.nn.objective import IGNORE_INDEX, causal_cross_entropy
from phalanx.optim.build import build_optimizer
from phalanx.parallel.executor import Batch
from phalanx.parallel.parallelize import parallelize
from phalanx.plan.planner import make_plan
from phalanx.train.state import TrainState
from ranks import run_ranks

NUM_STEPS = 8
SEQ_LEN = 24
MICRO = 2
OBJECTIVE = causal_cross_entropy(16)


def job_of(num_ranks: int, batch: int, deterministic: object, **sections: Any) -> Job:
    body: dict[str, dict[str, Any]] = {
        "model": {"dim": 32, "num_layers": 2, "num_heads": 4, "ffn_dim": 41},
        "data": {"seq_len": SEQ_LEN},
        "train": {
            "global_batch_size": batch,
            "micro_batch_size": MICRO,
            "deterministic": deterministic,
        },
        "parallel": {"ranks": num_ranks, "dp_replicate": num_ranks, "bucket_mb": 0.01},
    }
    for name, section in sections.items():
        body[name] = body.get(name, {}) | section
    return Job.model_validate(body)


def _build_batch(step: int, batch_size: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (batch_size, SEQ_LEN + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    # Microbatches have unequal numbers of targets.
    targets[:: 1 + step % 3, : step % SEQ_LEN] = IGNORE_INDEX
    return {"inputs": tokens[:, :-1].contiguous(), "targets": targets}


class Dropping(torch.nn.Module):
    """Drops by sample, and not by rank."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB, 32)
        self.dropout = torch.nn.Dropout(0.2)
        self.body = torch.nn.Linear(32, 33)
        self.head = torch.nn.Linear(33, VOCAB)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.dropout(self.embedding(inputs)))))


def _take_share(batch: Batch, rank: int, num_ranks: int) -> list[Batch]:
    rows = torch.arange(len(batch["inputs"])).view(-1, num_ranks, MICRO)[:, rank]
    return [{name: tensor[part] for name, tensor in batch.items()} for part in rows]


def _train(
    rank: int,
    num_ranks: int,
    batch_size: int,
    deterministic: object,
    kind: str = "decoder",
    steps: range = range(NUM_STEPS),
    folder: Path | None = None,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, norms and an evaluation, and the weights. `folder`: what is saved at the end lies
    there, and what the first step begins from."""
    torch.set_num_threads(1)
    job = job_of(num_ranks, batch_size, deterministic)
    plan = make_plan(job, cluster=CPU, vocab_size=VOCAB)
    facts: list[float] = []
    with open_mesh(plan.layout, device="cpu") as mesh:
        torch.set_num_threads(1)
        module = Decoder(plan.model_shape) if kind == "decoder" else Dropping()
        fill(module)
        model = parallelize(module, plan, mesh, seed=3)
        state = TrainState(model, build_optimizer(model, job.optim), 0)
        if steps.start:
            assert folder is not None
            restore_state(state, newest(folder))
        for step in steps:
            microbatches = _take_share(_build_batch(step, batch_size), rank, num_ranks)
            sums = model.forward_backward(microbatches, OBJECTIVE, step=step + 1)
            # It clips: norms are some tens of this.
            stats = model.reduce_and_clip(sums, max_norm=0.05)
            assert stats.should_apply
            assert stats.grad_norm > 0.05
            facts += [stats.loss, stats.grad_norm]
            model.update(state.optimizer)
            state.optimizer.zero_grad()
        model.train(False)
        held_out = _take_share(_build_batch(NUM_STEPS, batch_size), rank, num_ranks)
        facts.append(model.reduce_sums(model.evaluate(held_out, OBJECTIVE))[0])
        if folder is not None:
            save_state(state, folder)
        weights = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    return facts, weights


def _train_on(num_ranks: int, *args: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    results = run_ranks(num_ranks, _train, num_ranks, *args)
    for facts, weights in results[1:]:
        assert facts == results[0][0]
        assert _find_differing(weights, results[0][1]) == []
    return results[0]


def _find_differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    # As integers: two zeros of different sign are equal numbers, and other bits.
    return [
        name for name in a if not torch.equal(a[name].view(torch.int32), b[name].view(torch.int32))
    ]


@pytest.mark.parametrize(
    ("batch_size", "kind"),
    [
        pytest.param(16, "decoder", marks=pytest.mark.long),
        (24, "decoder"),
        (8, "dropping"),
    ],
)
def test_bits_are_the_same_on_1_2_and_4_ranks(batch_size: int, kind: str) -> None:
    """8 microbatches, 12 (not a power of two), and 4: one for each rank."""
    facts, weights = _train_on(1, batch_size, "layout-free", kind)
    assert len(set(facts)) == len(facts)
    for num_ranks in (2, 4):
        other_facts, other_weights = _train_on(num_ranks, batch_size, "layout-free", kind)
        assert other_facts == facts
        assert _find_differing(other_weights, weights) == []


def test_without_it_they_differ() -> None:
    """Or the tests above would show nothing."""
    facts, weights = _train_on(1, 16, True)
    other_facts, other_weights = _train_on(4, 16, True)
    assert other_facts != facts
    assert len(_find_differing(other_weights, weights)) > 10


def test_a_run_goes_on_with_other_ranks(tmp_path: Path) -> None:
    half = NUM_STEPS // 2
    facts, weights = _train_on(1, 16, "layout-free")
    first, _ = _train_on(2, 16, "layout-free", "decoder", range(half), tmp_path)
    second, resumed = _train_on(4, 16, "layout-free", "decoder", range(half, NUM_STEPS), tmp_path)
    # Without the evaluation in the middle.
    assert first[:-1] + second == facts
    assert _find_differing(resumed, weights) == []


class _Lazy(torch.nn.Module):
    """Half of it has no part in a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB, 8)
        self.head = torch.nn.Linear(8, VOCAB)
        self.idle = torch.nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(inputs))


class _Noisy(_Lazy):
    """It draws by itself."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embedding(inputs)
        return self.head(x + self.idle(x) * torch.randn_like(x))


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (_Lazy, "idle.weight had no part in the loss of a microbatch"),
        (_Noisy, "draws random numbers"),
    ],
)
def test_what_is_not_proven_is_refused_while_training(
    module: type[torch.nn.Module], words: str
) -> None:
    with pytest.raises(LayoutError, match=words):
        _train_steps_of_one_rank(module())


def _train_steps_of_one_rank(module: torch.nn.Module) -> None:
    plan = make_plan(job_of(1, 4, "layout-free"), cluster=CPU, vocab_size=VOCAB)
    with open_mesh(plan.layout, device="cpu") as mesh:
        model = parallelize(module, plan, mesh, seed=3)
        for step in range(3):
            model.forward_backward(_take_share(_build_batch(step, 4), 0, 1), OBJECTIVE)
            module.zero_grad()
