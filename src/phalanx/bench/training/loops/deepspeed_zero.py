"""DeepSpeed's engine at a stage of ZeRO (the setting's variant), with its defaults otherwise."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from phalanx.bench.training.loops.shared import (
    build_fused_adamw,
    build_module_with_loss,
    compute_microbatch_loss,
)
from phalanx.bench.training.payload import RankSetting
from phalanx.bench.training.rank import TrainingTurns


def train_in_turns(setting: RankSetting, turns: TrainingTurns) -> None:
    """Train what `deepspeed.initialize` makes of module and optimizer, over gloo."""
    deepspeed = import_module("deepspeed")
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    module = build_module_with_loss(setting)
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=build_fused_adamw(setting, module),
        config=build_deepspeed_config(setting),
    )
    for microbatches in turns:
        total = 0.0
        for batch in microbatches:
            # It divides by the number of microbatches itself, and steps after the last one.
            loss = compute_microbatch_loss(engine, batch, [batch])
            engine.backward(loss)
            engine.step()
            total += loss.item()
        turns.record_loss(total / len(microbatches))


def build_deepspeed_config(setting: RankSetting) -> dict[str, Any]:
    """The setting in DeepSpeed's words."""
    plan = setting.plan
    config: dict[str, Any] = {
        "train_batch_size": plan.global_batch_size,
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.num_microbatches,
        "zero_optimization": {"stage": int(setting.contender.variant)},
        # torch's fused AdamW is none of those that it lists.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if plan.precision == "bf16":
        config["bf16"] = {"enabled": True}
    if setting.job.optim.clip_norm is not None:
        config["gradient_clipping"] = setting.job.optim.clip_norm
    return config
