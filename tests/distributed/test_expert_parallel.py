"""Experts over ranks compute what one process computes, in every way of running data parallelism
around them.

Reference: verify/reference.py, over the untouched decoder. For planted bugs see test_verify_ep.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from models import CPU, VOCAB, fill, replace_parallel, shape
from models import decoder as dense_decoder
from phalanx.core.errors import LayoutError
from phalanx.job.schema import Job
from phalanx.mesh.logical import LogicalShard, full_name, get_local_tensor
from phalanx.mesh.mesh import open_mesh
from phalanx.nn.models.decoder import Decoder, example_batch
from phalanx.nn.objective import causal_cross_entropy
from phalanx.parallel.model import ParallelModel
from phalanx.parallel.parallelize import parallelize
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.run.one_process.plain_loss import compute_textbook_cross_entropy
from phalanx.verify.reference import OneProcessStep, train_in_one_process
from ranks import run_ranks

BATCH, SEQ_LEN, LAYERS, STEPS = 8, 16, 4, 2
KEYS: dict[str, Any] = {
    "num_experts": 8,
    "experts_per_token": 2,
    "expert_ffn_dim": 24,
    "num_shared_experts": 1,
    "router_scores": "sigmoid",
    "expert_capacity": 1.0,
    "balance_loss": 0.5,
    "balance_bias": 0.05,
}
SHAPE = replace(shape(num_kv_heads=4, num_layers=LAYERS), **KEYS)
Case = tuple[dict[str, Any], dict[str, Any]]  # what a job says in [parallel] and in [train]

EP2: dict[str, Any] = {"dp_shard": 2, "ep": 2}
ON_TWO: dict[str, Case] = {
    "no ep, ddp": ({"dp_replicate": 2}, {}),
    "no ep, zero3": ({"dp_shard": 2}, {}),
    "no ep, tp": ({"tp": 2}, {}),
    "no ep, cp": ({"cp": 2}, {}),
    "no ep, pp": ({"pp": 2}, {}),
    "zero3": (EP2, {}),
    "zero2": ({**EP2, "zero_stage": 2}, {}),
    "over cp": ({"cp": 2, "ep": 2}, {}),
    "microbatches": (EP2, {"micro_batch_size": 2}),
    "sharded accumulation": ({**EP2, "accumulate": "sharded"}, {"micro_batch_size": 2}),
    "full recompute": (EP2, {"recompute": "full"}),
    "selective recompute": (EP2, {"recompute": "selective"}),
    "recomputed stretches, units of two blocks": (
        {**EP2, "blocks_per_unit": 2},
        {"recompute": "sqrt"},
    ),
    "parameters on the host": ({**EP2, "offload": "parameters"}, {}),
    "optimizer on the host": ({**EP2, "offload": "optimizer"}, {}),
    "small parameters whole": ({**EP2, "keep_whole_below": 2000}, {}),
    "prefetch": ({**EP2, "prefetch": 1}, {}),
}
ON_FOUR: dict[str, Case] = {
    "half of dp_shard": ({"dp_shard": 4, "ep": 2}, {}),
    "all of dp_shard": ({"dp_shard": 4, "ep": 4}, {}),
    "hsdp": ({"dp_replicate": 2, **EP2}, {}),
    "tp inside": ({"tp": 2, **EP2}, {}),
    "tp inside, whole sequences": ({"tp": 2, "sequence_parallel": False, **EP2}, {}),
    "tp inside, in chunks": ({"tp": 2, "tp_chunks": 2, **EP2}, {}),
    "folded over cp": ({"dp_shard": 2, "cp": 2, "ep": 4}, {}),
    "folded over cp, even runs": ({"dp_shard": 2, "cp": 2, "ep": 4, "cp_load_balance": "none"}, {}),
    "ulysses": ({"dp_shard": 2, "cp": 2, "ep": 2, "cp_attention": "ulysses"}, {}),
    "copies of cp": ({"dp_replicate": 2, "cp": 2, "ep": 2}, {}),
    "pipeline": ({"pp": 2, "schedule": "1f1b", **EP2}, {"micro_batch_size": 2}),
    "pipeline of split backwards": ({"pp": 2, "schedule": "zb-v", **EP2}, {"micro_batch_size": 2}),
}


def batches() -> list[dict[str, torch.Tensor]]:
    """Of each step; some targets are masked, and of one sequence nearly all."""
    found = []
    for step in range(STEPS):
        batch = example_batch(SHAPE, BATCH, SEQ_LEN, seed=step)
        batch["targets"][0, :5] = batch["targets"][3, 2:] = -100
        found.append(batch)
    return found


def decoder(**changed: Any) -> Decoder:
    module = Decoder(replace(SHAPE, **changed))
    fill(module)
    return module.double()


def alone(**changed: Any) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """(what each step gave, weights and biases of routers after all steps)."""
    module = decoder(**changed)
    loads: list[torch.Tensor] = []
    after_step = module.after_step

    def noted() -> None:
        router = module.blocks[0].moe.router
        assert router.load.counts_E is not None
        loads.append(router.load.counts_E.clone())
        after_step()

    module.after_step = noted  # type: ignore[method-assign]

    def loss_sum(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return compute_textbook_cross_entropy(model(batch["inputs"], batch["positions"]), batch)

    steps: list[dict[str, Any]] = []

    class Steps:
        def on_gradients(self, number: int, found: OneProcessStep) -> None:
            gradients = {
                name: None if g is None else g.clone() for name, g in found.gradients.items()
            }
            rate = found.lr * (1.0 if found.max_norm is None else found.max_norm / found.grad_norm)
            steps.append(
                {"loss": found.loss, "norm": found.grad_norm, "gradients": gradients, "rate": rate}
            )

        def on_update(self, number: int) -> None: ...

    train_in_one_process(
        module,
        loss_sum,
        [[batch] for batch in batches()],
        lambda lr: torch.optim.SGD(module.parameters(), lr=lr or 1.0),
        Steps(),
        clip=0.5,
        move=0.02,
    )
    for step, load in zip(steps, loads, strict=True):
        step["load"] = load.tolist()
    return steps, {name: tensor.clone() for name, tensor in module.state_dict().items()}


def plan_of(num_ranks: int, case: Case, **changed: Any) -> Plan:
    parallel, train = case
    body = {
        "model": {
            "dim": 32,
            "num_layers": LAYERS,
            "num_heads": 4,
            "num_kv_heads": 4,
            **KEYS,
            **changed,
        },
        "data": {"seq_len": SEQ_LEN},
        "train": {"global_batch_size": BATCH, **train},
        "parallel": {"ranks": num_ranks, **parallel},
    }
    return make_plan(Job.model_validate(body), cluster=CPU, vocab_size=VOCAB)


def error(shard: LogicalShard, reference: torch.Tensor) -> float:
    """The largest over the blocks of `shard`, relative to the reference's norm."""
    worst = 0.0
    for box in shard.boxes:
        here = shard.tensor[
            tuple(slice(o, o + n) for o, n in zip(box.local_offset, box.size, strict=True))
        ]
        there = reference[
            tuple(slice(o, o + n) for o, n in zip(box.global_offset, box.size, strict=True))
        ]
        worst = max(worst, float((here - there).norm() / reference.norm().clamp(min=1e-3)))
    return worst


def errors_of(
    a_plan: Plan, steps: list[dict[str, Any]], final: dict[str, torch.Tensor], **changed: Any
) -> dict[str, float]:
    """Trains by plain gradient descent, and compares after every step."""
    errors: dict[str, float] = {}

    def note(what: str, value: float) -> None:
        errors[what] = max(errors.get(what, 0.0), value)

    with open_mesh(a_plan.layout, device="cpu") as mesh:
        model = parallelize(decoder(**changed), a_plan, mesh)
        for step, batch in zip(steps, batches(), strict=True):
            mine = {
                k: v[mesh.data_parallel_rank :: a_plan.layout.data_parallel_size]
                for k, v in batch.items()
            }
            size = a_plan.micro_batch_size
            parts = [
                {k: v[i : i + size] for k, v in mine.items()}
                for i in range(0, len(mine["inputs"]), size)
            ]
            facts = model.reduce_and_clip(model.forward_backward(parts, causal_cross_entropy(7)))
            note("loss", abs(facts.loss - step["loss"]))
            note("norm", abs(facts.grad_norm / step["norm"] - 1))
            if "blocks.0.moe.router" in model.expert_load:
                assert list(model.expert_load["blocks.0.moe.router"].counts) == step["load"]
            descend(model, step, note)
        for name, shard in model.shards().items():
            note("weight", error(shard, final[name]))
        torch.distributed.barrier()
    return errors


@torch.no_grad()
def descend(model: ParallelModel, step: dict[str, Any], note: Callable[[str, float], None]) -> None:
    shards = model.trained_shards()
    parameters = {full_name(name): parameter for name, parameter in model.named_parameters()}
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            gradient = get_local_tensor(parameter.grad)
            note("gradient", error(replace(shards[name], tensor=gradient), step["gradients"][name]))
            get_local_tensor(parameter).sub_(step["rate"] * gradient)
            parameter.grad = None
    model.update(torch.optim.SGD(list(parameters.values()), lr=0.0))


def matrix(
    rank: int, num_ranks: int, cases: dict[str, Case], reference: Any
) -> dict[str, dict[str, float]]:
    return {name: errors_of(plan_of(num_ranks, case), *reference) for name, case in cases.items()}


@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [
        (2, dict(list(ON_TWO.items())[1::2])),
        pytest.param(2, ON_TWO, marks=pytest.mark.long),
        pytest.param(4, ON_FOUR, marks=pytest.mark.long),
    ],
    ids=["two ranks, half", "two ranks", "four ranks"],
)
def test_experts_equal_one_process(num_ranks: int, cases: dict[str, Case]) -> None:
    for found in run_ranks(num_ranks, matrix, num_ranks, cases, alone()):
        wrong = {name: errors for name, errors in found.items() if max(errors.values()) > 1e-12}
        assert not wrong
        assert all(
            {"loss", "norm", "gradient", "weight"} <= set(errors) for errors in found.values()
        )


def of_three(rank: int, reference: Any) -> tuple[int, dict[str, float]]:
    """(elements of experts that this rank holds, errors)."""
    a_plan = plan_of(2, ({"dp_shard": 2}, {}), num_experts=3)
    with open_mesh(a_plan.layout, device="cpu") as mesh:
        shards = parallelize(decoder(num_experts=3), a_plan, mesh).shards()
    held = sum(shard.num_local for name, shard in shards.items() if ".experts." in name)
    return held, errors_of(a_plan, *reference, num_experts=3)


def test_shards_of_experts_are_even_where_ranks_do_not_divide_their_number() -> None:
    """A plan says so. With one expert for many ranks all but one would hold nothing."""
    whole = replace(SHAPE, num_experts=3).experts.count_chosen_params()
    for held, errors in run_ranks(2, of_three, alone(num_experts=3)):
        assert held == whole / 2
        assert max(errors.values()) <= 1e-12


def test_biases_move_with_an_update_and_not_with_a_step_that_is_skipped() -> None:
    with open_mesh(Layout(), device="cpu") as mesh:
        model = parallelize(decoder(), plan_of(1, ({}, {})), mesh)
        bias, optimizer = (
            model.module.blocks[0].moe.router.bias,
            torch.optim.SGD(list(model.parameters()), lr=0.0),
        )
        before = bias.clone()
        assert model.reduce_and_clip(
            model.forward_backward(batches()[:1], causal_cross_entropy(7))
        ).should_apply
        assert torch.equal(bias, before)  # a guard may still skip it
        model.update(optimizer)
        assert sorted(set((bias - before).abs().tolist())) == pytest.approx([0.05])
        optimizer.step()
        with pytest.raises(LayoutError, match="biases of routers move after it"):
            model.forward_backward(batches()[:1], causal_cross_entropy(7))


def refused(rank: int) -> list[str]:
    found = []
    plain = plan_of(2, (EP2, {}))
    for a_plan in (replace_parallel(plain, zero_stage=1), replace(plain, compile=True)):
        with open_mesh(a_plan.layout, device="cpu") as mesh:
            try:
                parallelize(decoder(), a_plan, mesh)
            except LayoutError as error:
                found.append(str(error))
    with open_mesh(plain.layout, device="cpu") as mesh:
        try:
            parallelize(dense_decoder(tied=True, dtype=torch.float32), plain, mesh)
        except LayoutError as error:
            found.append(str(error))
    return found


def test_what_does_not_go_together_is_refused_by_name() -> None:
    for found in run_ranks(2, refused):
        assert len(found) == 3
        assert "parallel.zero_stage=1" in found[0]
        assert "train.compile" in found[1]
        assert "Decoder has none" in found[2]
