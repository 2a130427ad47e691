"""What a step waits for on a GPU, counted on a device that is not there (tests/support/second_device.py):
one number, the facts of the step; of mixtures one more for each layer where the host must know how
many rows there are.

The third step of each layout is counted, as the first ones make what later ones keep. On a GPU this
has not run.
"""

from __future__ import annotations

import traceback
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from models import BATCH, fill, global_batches, plan
from phalanx.checkpoint.manifest import list_checkpoint_paths_of_run
from phalanx.checkpoint.stores.local import LocalStore
from phalanx.core.phases import PhaseTimer
from phalanx.job.schema import Optim
from phalanx.mesh.mesh import open_mesh
from phalanx.nn.models.decoder import Decoder
from phalanx.nn.objective import causal_cross_entropy
from phalanx.optim.build import build_optimizer
from phalanx.parallel.model import ParallelModel
from phalanx.parallel.parallelize import parallelize
from phalanx.plan.plan import Plan
from phalanx.train.generate import generate_tokens
from phalanx.train.state import TrainState
from ranks import run_ranks
from second_device import CUDA, second_device

LAYERS, MICROBATCHES = 2, 3
FACTS = "numbers are read (step_reducer.py"
OBJECTIVE = causal_cross_entropy(16)
EXPERTS: dict[str, Any] = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_dim": 24}


@dataclass(frozen=True)
class Case:
    """A layout, and what its steps wait for beside their facts.

    `dtype`: of weights; kernels of cp need fp64.
    """

    parallel: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    more: int = 0
    of_layers: int = 0
    """Of each layer and microbatch."""
    ranks: int = 1
    dtype: torch.dtype = torch.float32
    documents: bool = False
    drops: bool = False
    changed: dict[str, Any] = field(default_factory=dict)


CP: dict[str, Any] = {"ranks": 2, "dtype": torch.float64}
MOE = {"model": EXPERTS}
CASES: dict[str, Case] = {
    "one rank": Case(),
    "documents": Case(documents=True),
    "dropout": Case(drops=True),
    "recompute": Case(changed={"recompute": "full"}),
    "fp16, loss scaling": Case(changed={"precision": "fp16"}),
    "bf16": Case(changed={"precision": "bf16"}),
    "ddp": Case({"dp_replicate": 2}, ranks=2),
    "zero1": Case({"dp_shard": 2, "zero_stage": 1}, ranks=2),
    "zero2": Case({"dp_shard": 2, "zero_stage": 2}, ranks=2),
    "zero3": Case({"dp_shard": 2, "zero_stage": 3}, ranks=2),
    "tp": Case({"tp": 2}, ranks=2),
    "tp, dropout": Case({"tp": 2, "sequence_parallel": False}, drops=True, ranks=2),
    "pp": Case({"pp": 2}, ranks=2),
    "pp, interleaved": Case(
        {"pp": 2, "schedule": "interleaved", "stage_blocks": (0, 1, 1, 0)}, ranks=2
    ),
    "pp, split backwards": Case(
        {"pp": 2, "schedule": "zb-v", "stage_blocks": (0, 1, 1, 0)}, ranks=2
    ),
    "cp, ring": Case({"cp": 2}, **CP),
    "cp, ring, documents": Case({"cp": 2}, documents=True, **CP),
    "cp, ulysses": Case({"cp": 2, "cp_attention": "ulysses"}, **CP),
    "cp, ulysses, documents": Case({"cp": 2, "cp_attention": "ulysses"}, documents=True, **CP),
    "offload of the optimizer": Case({"offload": "optimizer"}, more=1),
    "offload of the optimizer, zero3": Case(
        {"dp_shard": 2, "offload": "optimizer"}, ranks=2, more=1
    ),
    # A kernel for groups is of bf16; without it the host must know how many rows each expert has.
    "experts, bf16": Case(changed={"precision": "bf16"}, **MOE),
    "experts, fp32": Case(of_layers=1, **MOE),
    "experts, biases": Case(model={**EXPERTS, "balance_bias": 0.01}, changed={"precision": "bf16"}),
    "experts, capacity": Case(
        model={**EXPERTS, "expert_capacity": 1.0}, changed={"precision": "bf16"}, of_layers=1
    ),
    "experts, capacity, fp32": Case(model={**EXPERTS, "expert_capacity": 1.0}, of_layers=1),
    "ep over cp": Case({"cp": 2, "ep": 2}, of_layers=1, **{**CP, **MOE}),
}


def plan_of(case: Case) -> Plan:
    return plan(
        case.ranks,
        MICROBATCHES,
        experts=case.model,
        num_experts=case.model.get("num_experts", 0),
        **case.parallel,
        **case.changed,
    )


def module_of(case: Case, a_plan: Plan) -> nn.Module:
    module = Decoder(a_plan.model_shape)
    fill(module)
    if case.drops:
        for block in module.blocks:
            block.ffn_norm = nn.Sequential(block.ffn_norm, nn.Dropout(0.1))
    return module.to(case.dtype)


def own(
    batches: list[dict[str, torch.Tensor]], model: ParallelModel
) -> list[list[dict[str, torch.Tensor]]]:
    """This rank's microbatches of each step."""
    size, at = model.plan.layout.data_parallel_size, model.mesh.data_parallel_rank
    rows = torch.arange(BATCH).view(model.plan.num_microbatches, size, -1)[:, at]
    return [[{key: t[some] for key, t in batch.items()} for some in rows] for batch in batches]


def waits_of(case: Case) -> tuple[Counter[str], Counter[str], int]:
    """Of the third step, of an evaluation of two batches after it, and how many there may be in
    a step."""
    batches, a_plan = global_batches(4, documents=case.documents), plan_of(case)
    with (
        open_mesh(a_plan.layout, device="cpu", collectives="gloo") as here,
        second_device() as waits,
    ):
        model = parallelize(module_of(case, a_plan), a_plan, replace(here, device=CUDA), seed=3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for microbatches in own(batches[:3], model):
            waits.take()
            sums = model.forward_backward(microbatches, OBJECTIVE)
            facts = model.reduce_and_clip(sums, max_norm=1.0, flags=(0.0, 1.0))
            assert facts.should_apply
            model.update(optimizer)
            optimizer.zero_grad(set_to_none=True)
        of_step = waits.take()
        if case.ranks == 1:
            assert model.phases.take()["host_to_device"] > 0, "copies are no part of the forward"
        model.reduce_sums(model.evaluate(own(batches[3:], model)[0][:2], OBJECTIVE))
        of_evaluation = waits.take()
        more = case.of_layers * LAYERS * a_plan.num_microbatches + case.more
        return of_step, of_evaluation, 1 + more


def of_all(rank: int, names: list[str]) -> dict[str, Any]:
    """By name of the case, or why it failed: all cases of as many ranks in one start."""
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = waits_of(CASES[name])
        except Exception:
            found[name] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def counted() -> dict[int, list[dict[str, Any]]]:
    by_ranks: dict[int, list[str]] = {}
    for name, case in CASES.items():
        by_ranks.setdefault(case.ranks, []).append(name)
    return {
        ranks: run_ranks(ranks, of_all, names, deadline_s=600.0)
        for ranks, names in by_ranks.items()
    }


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_a_step_waits_for_its_facts_alone(
    name: str, counted: dict[int, list[dict[str, Any]]]
) -> None:
    require_waits(name, counted[CASES[name].ranks])


def test_a_step_of_one_rank_waits_for_its_facts_alone() -> None:
    require_waits("one rank", run_ranks(1, of_all, ["one rank"]))


def require_waits(name: str, of_ranks: list[dict[str, Any]]) -> None:
    for found in of_ranks:
        if isinstance(found[name], str):
            pytest.fail(found[name], pytrace=False)
        of_step, of_evaluation, allowed = found[name]
        assert sum(of_step.values()) == allowed, of_step
        assert any(what.startswith(FACTS) for what in of_step), of_step
        assert sum(of_evaluation.values()) <= allowed, of_evaluation


def used(
    rank: int, root: Path, parallel: dict[str, Any], place: str
) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Tokens that a trained model writes, and its weights after they were saved and read into
    another one."""
    case = Case(parallel)
    batches, a_plan = (
        global_batches(1),
        plan(dist.get_world_size() if dist.is_initialized() else 1, 2, **parallel),
    )
    with (
        open_mesh(a_plan.layout, device="cpu", collectives="gloo") as here,
        second_device() if place == "device" else nullcontext(),
    ):
        mesh = replace(here, device=CUDA) if place == "device" else here

        def state() -> TrainState:
            model = parallelize(module_of(case, a_plan), a_plan, mesh, seed=3)
            return TrainState(model, build_optimizer(model, Optim(lr=1e-2)), 0)

        one = state()
        one.model.reduce_and_clip(
            one.model.forward_backward(own(batches, one.model)[0], OBJECTIVE), max_norm=1.0
        )
        one.model.update(one.optimizer)
        one.step = 1
        tokens = generate_tokens(one.model, [1, 2, 3], num_tokens=4, context=8, seed=5)
        one.save(LocalStore(root / place / "checkpoints"), job_digest="0", phases=PhaseTimer())
        other = state()  # of the weights before the step
        other.restore(list_checkpoint_paths_of_run(root / place)[-1], phases=PhaseTimer())
        before, after = (
            {n: s.tensor.cpu().clone() for n, s in each.shards().items()} for each in (one, other)
        )
        assert {str(shard.tensor.device) for shard in other.model.shards().values()} == {
            str(mesh.device)
        }
    assert {
        name for name in before.keys() | after.keys() if not torch.equal(before[name], after[name])
    } == set()
    return tokens, after


def used_in_both(rank: int, root: Path, parallel: dict[str, Any]) -> Any:
    return [used(rank, root, parallel, place) for place in ("device", "host")]


@pytest.mark.parametrize(
    "parallel",
    [{}, pytest.param({"dp_shard": 2, "zero_stage": 3}, marks=pytest.mark.long)],
    ids=["one rank", "zero3"],
)
def test_text_and_checkpoints_are_those_of_the_host(
    parallel: dict[str, Any], tmp_path: Path
) -> None:
    """Nothing of them mixes tensors of both places, and a checkpoint of one is read by the
    other."""
    for (tokens, weights), (tokens_of_host, weights_of_host) in run_ranks(
        parallel.get("dp_shard", 1), used_in_both, tmp_path, parallel
    ):
        assert tokens == tokens_of_host
        torch.testing.assert_close(
            weights, weights_of_host, rtol=1e-3, atol=1e-4
        )  # other kernels of the CPU
