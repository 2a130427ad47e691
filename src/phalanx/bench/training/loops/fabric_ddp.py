"""Lightning Fabric: the loop of its documentation, with its strategy "ddp"."""

from __future__ import annotations

from importlib import import_module

from phalanx.bench.training.loops.shared import (
    build_fused_adamw,
    build_module_with_loss,
    compute_microbatch_loss,
)
from phalanx.bench.training.payload import RankSetting
from phalanx.bench.training.rank import TrainingTurns


def train_in_turns(setting: RankSetting, turns: TrainingTurns) -> None:
    """Train what `Fabric.setup` makes of module and optimizer, over gloo."""
    lightning_fabric = import_module("lightning_fabric")
    environments = import_module("lightning_fabric.plugins.environments")
    strategies = import_module("lightning_fabric.strategies")
    fabric = lightning_fabric.Fabric(
        accelerator="cpu",
        devices=setting.num_ranks,
        strategy=strategies.DDPStrategy(
            # Ranks are there, with torchrun's variables.
            cluster_environment=environments.TorchElasticEnvironment(),
            gradient_as_bucket_view=True,
        ),
        precision="bf16-mixed" if setting.plan.precision == "bf16" else "32-true",
    )
    fabric.launch()
    assert fabric.world_size == setting.num_ranks, "it sees all ranks"
    module = build_module_with_loss(setting)
    model, optimizer = fabric.setup(module, build_fused_adamw(setting, module))
    max_norm = setting.job.optim.clip_norm
    for microbatches in turns:
        total = 0.0
        for index, batch in enumerate(microbatches, 1):
            with fabric.no_backward_sync(model, enabled=index < len(microbatches)):
                loss = compute_microbatch_loss(model, batch, microbatches)
                fabric.backward(loss)
            total += loss.item()
        if max_norm is not None:
            fabric.clip_gradients(model, optimizer, max_norm=max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        turns.record_loss(total)
