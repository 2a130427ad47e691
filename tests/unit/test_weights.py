"""A trained run as a plain module: load_weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import phalanx
from models import plan
from phalanx.checkpoint.best import record_best_step
from phalanx.checkpoint.stores.local import LocalStore
from phalanx.core.errors import CheckpointError
from phalanx.core.phases import PhaseTimer
from phalanx.job.schema import Optim
from phalanx.mesh.mesh import open_mesh
from phalanx.optim.build import build_optimizer
from ranks import run_ranks

Saved = tuple[Path, dict[str, torch.Tensor]]


def net(width: int = 4) -> nn.Module:
    """BatchNorm's buffers, and a weight in two places."""
    module = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 4))
    module[2].weight = nn.Parameter(module[2].weight.detach()) if width != 4 else module[0].weight
    return module


def save_two_steps(rank: int, run_dir: Path) -> dict[str, torch.Tensor]:
    """Sharded over two ranks; the weights of step 2, whole."""
    a_plan = plan(2, dp_shard=2)
    with open_mesh(a_plan.layout, device="cpu") as mesh:
        torch.manual_seed(1)
        model = phalanx.parallelize(net(), a_plan, mesh)
        state = phalanx.TrainState(model, build_optimizer(model, Optim()), 0)
        for step in (1, 2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.5)
                model.module[1].running_mean.add_(step)
            state.step = step
            state.save(LocalStore(run_dir / "checkpoints"), job_digest="0", phases=PhaseTimer())
        found = {name: t.detach() for name, t in model.module.state_dict().items()}
        return {
            name: t.full_tensor() if hasattr(t, "full_tensor") else t.clone()
            for name, t in found.items()
        }


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    directory = tmp_path_factory.mktemp("run")
    return directory, run_ranks(2, save_two_steps, directory)[0]


def test_a_plain_module_gets_every_weight_and_buffer(run_dir: Saved) -> None:
    """Written by two sharded ranks, read by no mesh at all; tied weights stay tied."""
    directory, wanted = run_dir
    module = net()
    assert phalanx.load_weights(module, directory) == 2
    assert [
        name for name, t in module.state_dict().items() if not torch.equal(t, wanted[name])
    ] == []
    assert module[2].weight is module[0].weight


def test_one_checkpoint_or_the_best(run_dir: Saved) -> None:
    directory, _ = run_dir
    assert phalanx.load_weights(net(), str(directory / "checkpoints" / "step-1")) == 1
    with pytest.raises(CheckpointError, match=r"kept as the best.*eval\.keep_best=true"):
        phalanx.load_weights(net(), directory, best=True)
    record_best_step(directory, step=1, loss=0.5, num_targets=9)
    assert phalanx.load_weights(net(), directory, best=True) == 1
    assert phalanx.load_weights(net(), directory) == 2


def test_another_module_is_refused_and_left_alone(run_dir: Saved, tmp_path: Path) -> None:
    directory, _ = run_dir
    module = net(5)
    before = {name: t.clone() for name, t in module.state_dict().items()}
    with pytest.raises(
        CheckpointError,
        match=r"does not fit this model(?s:.*)0\.weight +float32 \[5, 4\] +float32 \[4, 4\]",
    ):
        phalanx.load_weights(module, directory)
    assert all(torch.equal(t, before[name]) for name, t in module.state_dict().items())
    with pytest.raises(CheckpointError, match="no checkpoint is there"):
        phalanx.load_weights(module, tmp_path)


def test_a_flipped_bit_is_found(run_dir: Saved) -> None:
    directory, _ = run_dir
    file = sorted((directory / "checkpoints" / "step-1").glob("*.safetensors"))[0]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=file.name):
        phalanx.load_weights(net(), directory / "checkpoints" / "step-1")
