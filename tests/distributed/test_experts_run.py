"""A run of a model with experts: what the trainer tells of their load, and how many parameters
ranks hold, per layout.

Counts are of the whole batch: the reference is one process, in fp64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from models import BATCH, CPU, SEQ_LEN, VOCAB, fill, global_batches, shape, share
from phalanx.job.schema import Job
from phalanx.mesh.logical import get_local_tensor
from phalanx.mesh.mesh import open_mesh
from phalanx.nn.models.decoder import Decoder
from phalanx.nn.objective import causal_cross_entropy
from phalanx.observe.bus import Bus
from phalanx.observe.events import ExpertsLoaded
from phalanx.observe.tail import read_recorded_events
from phalanx.optim.build import build_optimizer
from phalanx.parallel.parallelize import parallelize
from phalanx.plan.memory import count_rank_params
from phalanx.plan.planner import make_plan
from phalanx.train.state import TrainState
from phalanx.train.trainer import Trainer
from phalanx.train.training_data import TrainingData
from ranks import run_ranks

STEPS = 3
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "experts_per_token": 2,
    "expert_ffn_dim": 24,
    "num_dense_layers": 1,
    "expert_capacity": 1.0,
}
SHAPE = replace(shape(num_layers=3), **EXPERTS)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ep": (2, {"ep": 2}),
    "ep-zero3": (2, {"ep": 2, "dp_shard": 2}),
    "pp": (2, {"pp": 2, "stage_blocks": (2, 1)}),
}


@dataclass(frozen=True)
class Steps:
    rank: int
    num_ranks: int
    num_microbatches: int

    def step_microbatches(self, step: int) -> Sequence[Mapping[str, torch.Tensor]]:
        return share(
            global_batches(STEPS)[step - 1], self.rank, self.num_ranks, self.num_microbatches
        )


def trained(rank: int, name: str, folder: str) -> int:
    """Returns how many parameters the rank holds."""
    num_ranks, layout = LAYOUTS[name]
    job = Job.model_validate(
        {
            "model": {
                "dim": 32,
                "num_layers": 3,
                "num_heads": 4,
                "num_kv_heads": 2,
                "ffn_dim": 40,
                **EXPERTS,
            },
            "data": {"seq_len": SEQ_LEN},
            "train": {"global_batch_size": BATCH, "micro_batch_size": 3, "steps": STEPS},
            "checkpoint": {"at_end": False},
            "observe": {"log_every": 2},
            "parallel": {"ranks": num_ranks, **layout},
        }
    )
    plan = make_plan(job, cluster=CPU, vocab_size=VOCAB)
    assert plan.model_shape == replace(SHAPE, tie_embeddings=plan.model_shape.tie_embeddings)
    bus = Bus(rank=rank, run_dir=Path(folder))
    module = Decoder(plan.model_shape)
    fill(module)
    with open_mesh(plan.layout, device="cpu") as mesh:
        model = parallelize(module.double(), plan, mesh)
        held = sum(get_local_tensor(parameter).numel() for _, parameter in model.named_parameters())
        state = TrainState(model, build_optimizer(model, job.optim), seed=7)
        place = (mesh.data_parallel_rank, plan.layout.data_parallel_size)
        data = TrainingData(Steps(*place, plan.num_microbatches), causal_cross_entropy(16))
        assert Trainer(job, plan, state, bus, data).run() == "finished"
    bus.close()
    return held


@pytest.fixture(scope="module")
def ran(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[list[int], list[list[ExpertsLoaded]]]]:
    """By layout: parameters of each rank, and what each rank told."""
    found = {}
    for name, (num_ranks, _) in LAYOUTS.items():
        folder = tmp_path_factory.mktemp(name)
        held = run_ranks(num_ranks, trained, name, str(folder))
        told = [
            [e.event for e in read_recorded_events(folder, ExpertsLoaded, rank=rank)]
            for rank in range(num_ranks)
        ]
        found[name] = held, told
    return found


@pytest.mark.parametrize("name", ["ep", "ep-zero3", "pp"])
def test_loads_are_told_once_and_are_those_of_one_process(ran: Any, name: str) -> None:
    (reference,) = ran["one"][1]
    assert [event.step for event in reference] == [1, 2, 3]
    for event in reference:
        assert list(event.tokens_by_expert) == ["blocks.1.moe", "blocks.2.moe"]
        assert [sum(tokens) for tokens in event.tokens_by_expert.values()] == [
            2 * BATCH * SEQ_LEN
        ] * 2
        assert min(event.dropped.values()) > 0
    first, second = ran[name][1]
    assert [list(event.tokens_by_expert) for event in second] == (
        [["blocks.2.moe"]] * 3 if name == "pp" else []
    )
    for number, wanted in enumerate(reference):
        told = [events[number] for events in (first, second) if events]
        assert [event.step for event in told] == [wanted.step] * len(told)
        layers = [
            (layer, tokens, e.dropped[layer])
            for e in told
            for layer, tokens in e.tokens_by_expert.items()
        ]
        assert layers == [
            (layer, tokens, wanted.dropped[layer])
            for layer, tokens in wanted.tokens_by_expert.items()
        ]


def test_ranks_hold_as_many_parameters_as_the_plan_says(ran: Any) -> None:
    (whole,), _ = ran["one"]
    given = next(s for s in (SHAPE, replace(SHAPE, tie_embeddings=False)) if s.num_params == whole)
    assert ran["ep"][0] == [count_rank_params(given, 2)] * 2
    assert (
        count_rank_params(given, 2) == whole - 2 * 2 * 3 * 32 * 24
    )  # half of the experts of two layers
    assert sum(ran["ep-zero3"][0]) == whole
