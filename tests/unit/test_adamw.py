"""build_adamw is torch's AdamW with decay on matrices only, its state allocated before the first step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from models import decoder, global_batches
from phalanx.job.schema import Optim
from phalanx.mesh.logical import module_shards
from phalanx.nn.models.decoder import Decoder
from phalanx.nn.objective import causal_cross_entropy
from phalanx.optim.adamw import SLOTS, build_adamw, optimizer_shards, set_learning_rate

OPTIM = Optim(lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)


def train(module: Decoder, optimizer: torch.optim.Optimizer, rates: list[float]) -> dict[str, torch.Tensor]:
    for rate, batch in zip(rates, global_batches(len(rates)), strict=True):
        set_learning_rate(optimizer, rate)
        optimizer.zero_grad()
        causal_cross_entropy(64)(module(batch["inputs"]), batch)[0].backward()
        optimizer.step()
    return {name: p.detach() for name, p in module.named_parameters()}


def test_steps_equal_torchs_with_the_groups_written_out() -> None:
    """Decay 0.3 on q, k, v, o, gate, up, down and the untied head; none on norms and the embedding."""
    rates = [0.01, 0.02, 0.005]
    module = decoder(tied=False, dtype=torch.float64)
    found = train(module, build_adamw(module.named_parameters(), OPTIM), rates)
    reference = decoder(tied=False, dtype=torch.float64)
    decays = ("q.weight", "k.weight", "v.weight", "o.weight", "gate.weight", "up.weight", "down.weight", "head.weight")
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in reference.named_parameters() if name.endswith(decays)], "weight_decay": 0.3},
        {"params": [p for name, p in reference.named_parameters() if not name.endswith(decays)], "weight_decay": 0.0},
    ]
    wanted = train(reference, torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9), eps=1e-6, foreach=False), rates)
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-12, atol=1e-13, msg=name)


def test_the_first_step_is_the_formula() -> None:
    """After bias correction the first update is lr g / (|g| + eps), on top of decay lr x 0.3 x w."""
    parameter = nn.Parameter(torch.tensor([[1.0, -2.0]], dtype=torch.float64))
    optimizer = build_adamw([("w", parameter)], OPTIM)
    gradient = torch.tensor([[0.5, 0.25]], dtype=torch.float64)
    parameter.grad = gradient.clone()
    wanted = parameter.detach() * (1 - 0.01 * 0.3) - 0.01 * gradient / (gradient.abs() + 1e-6)
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), wanted, rtol=1e-12, atol=1e-12)


def test_state_exists_before_the_first_step_and_keeps_its_storage() -> None:
    """Memory is known, and loading is a copy into what the optimizer already holds."""
    module = decoder(tied=True, dtype=torch.float32)
    optimizer = build_adamw(module.named_parameters(), OPTIM)
    storages = {p: {slot: s.data_ptr() for slot, s in optimizer.state[p].items()} for p in module.parameters()}
    assert all(set(slots) == {"step", *SLOTS} for slots in storages.values())
    train(module, optimizer, [0.01])
    for parameter, slots in storages.items():
        assert {slot: s.data_ptr() for slot, s in optimizer.state[parameter].items()} == slots
        assert optimizer.state[parameter]["step"].item() == 1


def test_frozen_parameters_are_left_out() -> None:
    module = decoder(tied=True, dtype=torch.float32)
    module.embed.weight.requires_grad_(False)
    held = {p for group in build_adamw(module.named_parameters(), OPTIM).param_groups for p in group["params"]}
    assert held == set(module.parameters()) - {module.embed.weight}


def test_shards_name_each_slot_of_each_parameter_and_share_storage() -> None:
    module = decoder(tied=True, dtype=torch.float32)
    optimizer = build_adamw(module.named_parameters(), OPTIM)
    shards, _ = module_shards(module, replica=1, num_replicas=3)
    found = optimizer_shards(optimizer, module.named_parameters(), shards, rank=1, world_size=3)
    assert set(found) == {f"optim/{name}/{slot}" for name in shards for slot in ("step", *SLOTS)}
    moment = found["optim/embed.weight/exp_avg"]
    assert moment.tensor.data_ptr() == optimizer.state[module.embed.weight]["exp_avg"].data_ptr()
    assert moment.boxes == shards["embed.weight"].boxes
    assert (moment.replica, moment.num_replicas) == (1, 3)
    assert found["optim/embed.weight/step"].global_shape == ()
