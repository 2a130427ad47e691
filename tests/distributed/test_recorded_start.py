"""Large modules of users start sharded: what building them does is recorded, and each rank fills
its own parts with the very numbers that one process gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from hf_zoo import write_config
from phalanx.core.block_sizes import BlockSizes, use_block_sizes
from phalanx.core.errors import LayoutError
from phalanx.core.phases import PhaseTimer
from phalanx.job.load import load_job
from phalanx.job.schema import Job, Model
from phalanx.mesh.mesh import open_mesh
from phalanx.mesh.recorded_init import get_initial_values_of_module
from phalanx.nn.build import build_large_module, build_objective, build_own_module
from phalanx.plan.cluster import Cluster
from phalanx.plan.planner import make_plan
from phalanx.run.weights import build_training_state
from phalanx.train.state import TrainState
from ranks import run_ranks

LAYOUTS: dict[str, tuple[str, ...]] = {
    "ddp": (),
    "zero1": ("parallel.dp_shard=2", "parallel.zero_stage=1"),
    "zero1, offloaded": (
        "parallel.dp_shard=2",
        "parallel.zero_stage=1",
        "parallel.offload=optimizer",
    ),
    "zero3": ("parallel.dp_shard=2", "parallel.keep_whole_below=40"),
    "zero3 on the host": ("parallel.dp_shard=2", "parallel.offload=parameters"),
    "tp": ("parallel.tp=2",),
    "pp": ("parallel.pp=2",),
}


def compare_starts(rank: int, kind: str, layouts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By layout: what differs between a module whose building was recorded and one that was built
    whole, at the start and after a step."""
    return {layout: compare_start(kind, layout) for layout in layouts}


def compare_start(kind: str, layout: str) -> dict[str, Any]:
    arguments = [f"model.kind={kind}", "parallel.ranks=2", "cluster.device=cpu", "data.seq_len=16"]
    job = load_job(None, [*arguments, *LAYOUTS[layout]])
    plan = make_plan(job, cluster=Cluster("cpu", 2, 2**33))
    started, buffers, trained = [], [], []
    with open_mesh(plan.layout, device="cpu") as mesh:
        for first_bytes in (1, 2**40):
            with use_block_sizes(replace(BlockSizes(), recorded_init_bytes=first_bytes)):
                state = build_training_state(job, plan, mesh, PhaseTimer())
            module = state.model.module
            assert (get_initial_values_of_module(module) is not None) == (first_bytes == 1)
            assert not any(tensor.is_meta for tensor in module.state_dict().values())
            started.append(clone_shards(state))
            buffers.append({name: buffer.clone() for name, buffer in module.named_buffers()})
            train_a_step(state, job)
            trained.append(clone_shards(state))
        mesh.barrier()
    return {
        "started": find_differing(*started),
        "buffers": find_differing(*buffers),
        "trained": find_differing(*trained),
        "moved": len(find_differing(started[0], trained[0])),
    }


def clone_shards(state: TrainState) -> dict[str, torch.Tensor]:
    return {name: shard.tensor.clone() for name, shard in state.model.shards().items()}


def train_a_step(state: TrainState, job: Job) -> None:
    """One update on two sequences, which are the same on each rank of a pipeline or of tp."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 90, (2, 17), generator=generator)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    batch["positions"] = torch.arange(16).expand(2, -1)
    microbatches = [batch] * max(1, 2 * (job.parallel.pp or 1))
    state.optimizer.zero_grad()
    loss = state.model.forward_backward(microbatches, build_objective(job))
    assert state.model.reduce_and_clip(loss, max_norm=1.0).should_apply
    state.model.update(state.optimizer)


def find_differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    names = sorted(found.keys() ^ expected.keys())
    return names + [
        n for n in found.keys() & expected.keys() if not torch.equal(found[n], expected[n])
    ]


class OwnGenerator(nn.Module):
    """What draws from a generator of its own cannot be recorded. Its head is tied."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(int(torch.randint(2**31, ())))
        self.lookup, self.head = nn.Embedding(90, 32), nn.Linear(32, 90, bias=False)
        self.head.weight = self.lookup.weight
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3))
        self.register_buffer("scale", torch.rand(32, generator=generator))
        for parameter in self.parameters():
            parameter.data.normal_(generator=generator, std=0.2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.lookup(inputs) * self.scale
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class OtherEachTime(nn.Module):
    """Its weights are no function of the random state that it finds."""

    count = 0

    def __init__(self) -> None:
        super().__init__()
        OtherEachTime.count += 1
        self.weight = nn.Parameter(torch.full((4,), float(OtherEachTime.count)))
        torch.manual_seed(0)


class KeptBeside(nn.Module):
    """Another object holds its weight."""

    kept: ClassVar[list[torch.Tensor]] = []

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4))
        KeptBeside.kept.append(self.weight.detach())


def test_what_cannot_be_recorded_is_built_in_turn_and_has_the_same_numbers() -> None:
    kind = f"{__name__}:OwnGenerator"
    assert (
        get_initial_values_of_module(build_own_module(Model(kind=kind), 0, is_recorded=True))
        is None
    )
    for found in run_ranks(2, compare_starts, kind, ("ddp", "zero3")):
        for differing in found.values():
            assert differing["moved"] > 5
            assert differing["started"] == differing["buffers"] == differing["trained"] == []


def test_a_module_that_cannot_be_built_twice_is_refused_and_one_that_is_shared_stays_whole() -> (
    None
):
    module = build_large_module(Model(kind=f"{__name__}:OtherEachTime"), 0)
    values = get_initial_values_of_module(module)
    assert module.weight.is_meta
    assert values is not None
    with pytest.raises(LayoutError, match="other weights when it is built again"):
        values.fill_parameter_shards({})
    module = build_large_module(Model(kind=f"{__name__}:KeptBeside"), 0)
    assert get_initial_values_of_module(module) is None
    assert module.weight.untyped_storage().data_ptr() in {
        kept.untyped_storage().data_ptr() for kept in KeptBeside.kept
    }


# The first one ties its head to its embedding. What each rank fills whole under ddp, as its norms
# under tp, is among all layouts.
@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("gpt2", ("zero3", "tp", "pp")),
        pytest.param("gpt2", tuple(LAYOUTS), marks=pytest.mark.long),
        pytest.param("llama", tuple(LAYOUTS), marks=pytest.mark.long),
        pytest.param("qwen3_moe", ("zero3", "tp", "pp"), marks=pytest.mark.long),
    ],
)
def test_each_rank_fills_its_part_with_the_numbers_of_one_process(
    tmp_path: Path, name: str, layouts: Sequence[str]
) -> None:
    pytest.importorskip("transformers")
    kind = f"hf:{write_config(tmp_path, name)}"
    # Imported here once, and not by each rank.
    assert (
        get_initial_values_of_module(build_own_module(Model(kind=kind), 0, is_recorded=True))
        is not None
    )
    for found in run_ranks(2, compare_starts, kind, layouts):
        assert found.keys() == set(layouts)
        for differing in found.values():
            assert differing["moved"] > 5
            assert differing["started"] == differing["buffers"] == differing["trained"] == []
