"""Optimizers are torch's, with decay by the kind of module and their state allocated before the
first step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from models import decoder, global_batches
from phalanx.core.errors import CheckpointError, LayoutError
from phalanx.job.schema import Optim
from phalanx.mesh.logical import Box, LogicalShard, ReplicaPosition, collect_module_shards
from phalanx.nn.models.decoder import Decoder
from phalanx.nn.objective import causal_cross_entropy
from phalanx.optim.build import build_optimizer, list_optimizer_shards, set_learning_rate
from phalanx.optim.groups import WeightDecayGroups, build_weight_decay_groups
from phalanx.optim.optimizers.adamw import SLOTS

ADAMW = Optim(lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
SGD = Optim(kind="sgd", lr=0.01, momentum=0.7, weight_decay=0.3)
PLAIN_SGD = Optim(kind="sgd", lr=0.01, momentum=0.0)
DECAYS = (
    "q.weight",
    "k.weight",
    "v.weight",
    "o.weight",
    "gate.weight",
    "up.weight",
    "down.weight",
    "head.weight",
)


def train(
    module: Decoder, optimizer: torch.optim.Optimizer, rates: list[float]
) -> dict[str, torch.Tensor]:
    for rate, batch in zip(rates, global_batches(len(rates)), strict=True):
        set_learning_rate(optimizer, rate)
        optimizer.zero_grad()
        causal_cross_entropy(64)(module(batch["inputs"]), batch)[0].backward()
        optimizer.step()
    return {name: p.detach() for name, p in module.named_parameters()}


def by_torch(module: nn.Module, optim: Optim) -> torch.optim.Optimizer:
    """Decay on q, k, v, o, gate, up, down and the untied head; none on norms and the embedding."""
    decay = 0.0 if optim.weight_decay == "auto" else optim.weight_decay
    named = dict(module.named_parameters())
    groups: list[dict[str, Any]] = [
        {
            "params": [p for name, p in named.items() if name.endswith(DECAYS)],
            "weight_decay": decay,
        },
        {
            "params": [p for name, p in named.items() if not name.endswith(DECAYS)],
            "weight_decay": 0.0,
        },
    ]
    if optim.kind == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, foreach=False)
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, foreach=False)


@pytest.mark.parametrize(
    "optim", [ADAMW, SGD, PLAIN_SGD], ids=["adamw", "sgd", "sgd without momentum"]
)
def test_steps_equal_torchs_with_the_groups_written_out(optim: Optim) -> None:
    rates = [0.01, 0.02, 0.005]
    module = decoder(tied=False, dtype=torch.float64)
    found = train(module, build_optimizer(module, optim), rates)
    reference = decoder(tied=False, dtype=torch.float64)
    wanted = train(reference, by_torch(reference, optim), rates)
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-12, atol=1e-13, msg=name)


class OneMatrix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([[1.0, -2.0]], dtype=torch.float64))


def test_the_first_step_of_adamw_is_the_formula() -> None:
    """After bias correction the first update is lr g / (|g| + eps), on top of decay lr x 0.3 x
    w."""
    module = OneMatrix()
    optimizer = build_optimizer(module, ADAMW)
    gradient = torch.tensor([[0.5, 0.25]], dtype=torch.float64)
    module.w.grad = gradient.clone()
    wanted = module.w.detach() * (1 - 0.01 * 0.3) - 0.01 * gradient / (gradient.abs() + 1e-6)
    optimizer.step()
    torch.testing.assert_close(module.w.detach(), wanted, rtol=1e-12, atol=1e-12)


def test_two_steps_of_sgd_are_the_formula() -> None:
    """v = g, then v = 0.7 v + g, where g has 0.3 w in it; w -= lr v."""
    module = OneMatrix()
    optimizer = build_optimizer(module, SGD)
    w, v = module.w.detach().clone(), torch.zeros(1, 2, dtype=torch.float64)
    for gradient in ([[0.5, 0.25]], [[-1.0, 2.0]]):
        module.w.grad = torch.tensor(gradient, dtype=torch.float64)
        v = 0.7 * v + module.w.grad + 0.3 * w
        w = w - 0.01 * v
        optimizer.step()
    torch.testing.assert_close(module.w.detach(), w, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("kind", "decay"), [("adamw", 0.1), ("sgd", 0.0)])
def test_auto_is_the_decay_that_the_optimizer_is_used_with(kind: str, decay: float) -> None:
    optimizer = build_optimizer(OneMatrix(), Optim(kind=kind))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [decay]


class Everything(nn.Module):
    """One of each kind of parameter that people have."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.patch_embed = nn.Conv2d(3, 4, 2)
        self.pos_embed = nn.Parameter(torch.zeros(1, 9, 4))
        self.attention = nn.MultiheadAttention(4, 2)
        self.memory = nn.LSTM(4, 4)
        self.batch_norm, self.layer_norm, self.group_norm = (
            nn.BatchNorm2d(4),
            nn.LayerNorm((2, 4)),
            nn.GroupNorm(2, 4),
        )
        self.gain = nn.Parameter(torch.ones(4))
        self.out = nn.Linear(4, 5)
        self.tied = nn.Linear(4, 5, bias=False)
        self.tied.weight = self.words.weight


def test_decay_is_by_the_kind_of_module() -> None:
    """Matrices and kernels decay; embeddings, norms, biases and other vectors do not, whatever
    they are called."""
    module = Everything()
    groups = build_weight_decay_groups(module, module.named_parameters())
    names = {id(p): name for name, p in module.named_parameters()}
    assert {names[id(p)] for p in groups.decayed} == {
        "patch_embed.weight",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "memory.weight_ih_l0",
        "memory.weight_hh_l0",
        "out.weight",
    }
    assert {names[id(p)] for p in groups.undecayed} == set(names.values()) - {
        names[id(p)] for p in groups.decayed
    }
    with pytest.warns(DeprecationWarning, match="Groups.kept is now Groups.undecayed"):
        assert groups.kept is groups.undecayed


def test_state_exists_before_the_first_step_and_keeps_its_storage() -> None:
    """Memory is known, and loading is a copy into what the optimizer already holds."""
    module = decoder(tied=True, dtype=torch.float32)
    optimizer = build_optimizer(module, ADAMW)
    storages = {
        p: {slot: s.data_ptr() for slot, s in optimizer.state[p].items()}
        for p in module.parameters()
    }
    assert all(set(slots) == {"step", *SLOTS} for slots in storages.values())
    train(module, optimizer, [0.01])
    for parameter, slots in storages.items():
        assert {slot: s.data_ptr() for slot, s in optimizer.state[parameter].items()} == slots
        assert optimizer.state[parameter]["step"].item() == 1


def test_frozen_parameters_are_left_out() -> None:
    module = decoder(tied=True, dtype=torch.float32)
    module.embed.weight.requires_grad_(False)
    held = {p for group in build_optimizer(module, ADAMW).param_groups for p in group["params"]}
    assert held == set(module.parameters()) - {module.embed.weight}


def test_a_model_without_anything_to_train_is_refused() -> None:
    with pytest.raises(LayoutError, match="Linear has no parameter to train"):
        build_optimizer(nn.Linear(2, 2).requires_grad_(False), ADAMW)


def rmsprop(groups: WeightDecayGroups, optim: Optim) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(groups.with_decay(optim.weight_decay, auto=0.01), lr=optim.lr)


def slow_vectors(groups: WeightDecayGroups, optim: Optim) -> torch.optim.Optimizer:
    slow = {"params": list(groups.undecayed), "lr": 0.1 * optim.lr}
    return torch.optim.SGD([{"params": list(groups.decayed)}, slow], lr=optim.lr)


def own_rate(groups: WeightDecayGroups, optim: Optim) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(groups.parameters()), lr=7.0)


def no_optimizer(groups: WeightDecayGroups, optim: Optim) -> str:
    return "adam"


def test_an_own_optimizer_is_a_name() -> None:
    found = build_optimizer(OneMatrix(), Optim(kind="test_optim:rmsprop", lr=0.02))
    assert isinstance(found, torch.optim.RMSprop)
    assert (found.param_groups[0]["lr"], found.param_groups[0]["weight_decay"]) == (0.02, 0.01)
    with pytest.raises(
        LayoutError, match=r"test_optim:no_optimizer returned str, not a torch\.optim\.Optimizer"
    ):
        build_optimizer(OneMatrix(), Optim(kind="test_optim:no_optimizer"))


def test_groups_of_an_own_optimizer_keep_their_part_of_the_rate() -> None:
    optimizer = build_optimizer(nn.Linear(2, 2), Optim(kind="test_optim:slow_vectors", lr=0.5))
    for lr in (0.25, 0.5, 0.125):
        set_learning_rate(optimizer, lr)
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == pytest.approx([lr, 0.1 * lr], rel=1e-15)


def own_choice_of_rate(groups: WeightDecayGroups, optim: Optim) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(list(groups.parameters()), lr=1.0)
    optimizer.param_groups[0]["lr"] = None
    return optimizer


def test_a_group_without_a_rate_gets_the_jobs() -> None:
    """As Adafactor's of transformers, which chooses its own unless it is given one."""
    optimizer = build_optimizer(
        nn.Linear(2, 2), Optim(kind="test_optim:own_choice_of_rate", lr=0.5)
    )
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25]


def test_a_rate_that_all_groups_share_is_the_jobs() -> None:
    optimizer = build_optimizer(nn.Linear(2, 2), Optim(kind="test_optim:own_rate", lr=0.5))
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25]


class StageOfOneGroup(nn.Linear):
    """A pipeline's stage; the other one has the job's rate."""

    is_staged = True

    @property
    def mesh(self) -> Any:
        return SimpleNamespace(gather_json=lambda ratios: [[1.0], ratios])


def test_a_stage_of_one_group_keeps_its_part_of_the_rate() -> None:
    optimizer = build_optimizer(StageOfOneGroup(2, 2), Optim(kind="test_optim:own_rate", lr=0.5))
    own_part = optimizer.param_groups[0]["lr"] / 0.5
    assert own_part != 1
    set_learning_rate(optimizer, 0.2)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(own_part * 0.2)


def test_shards_name_each_slot_of_each_parameter_and_share_storage() -> None:
    module = decoder(tied=True, dtype=torch.float32)
    optimizer = build_optimizer(module, ADAMW)
    shards, _ = collect_module_shards(module, ReplicaPosition(1, 3))
    found = list_optimizer_shards(
        optimizer, module.named_parameters(), shards, rank=1, world_size=3
    )
    assert set(found) == {f"optim/{name}/{slot}" for name in shards for slot in ("step", *SLOTS)}
    moment = found["optim/embed.weight/exp_avg"]
    assert moment.tensor.data_ptr() == optimizer.state[module.embed.weight]["exp_avg"].data_ptr()
    assert moment.boxes == shards["embed.weight"].boxes
    assert (moment.replica, moment.num_replicas) == (1, 3)
    assert found["optim/embed.weight/step"].global_shape == ()


def test_state_of_a_cut_parameter_in_another_shape_is_refused() -> None:
    """What a factored optimizer keeps per row differs between ranks of tp: it must not be saved
    as if it were alike."""
    weight = nn.Parameter(torch.ones(4, 3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    owner = LogicalShard("w", (8, 3), "float32", (Box((0, 0), (0, 0), (4, 3)),), weight.detach())
    optimizer.state[weight] = {"count": torch.tensor(3.0), "moment": torch.ones(4, 3)}
    kept = list_optimizer_shards(optimizer, [("w", weight)], {"w": owner}, rank=0, world_size=2)
    assert (kept["optim/w/moment"].global_shape, kept["optim/w/count"].global_shape) == ((8, 3), ())
    optimizer.state[weight]["rows"] = torch.ones(4)
    with pytest.raises(CheckpointError, match="optim/w/rows"):
        list_optimizer_shards(optimizer, [("w", weight)], {"w": owner}, rank=0, world_size=2)
