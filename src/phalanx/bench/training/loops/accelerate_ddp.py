"""Hugging Face Accelerate: the loop of its documentation, which trains under DDP."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module

from phalanx.bench.training.loops.shared import (
    build_fused_adamw,
    build_module_with_loss,
    compute_microbatch_loss,
)
from phalanx.bench.training.payload import RankSetting
from phalanx.bench.training.rank import TrainingTurns


def train_in_turns(setting: RankSetting, turns: TrainingTurns) -> None:
    """Train what `Accelerator.prepare` makes of module and optimizer, over gloo."""
    accelerate = import_module("accelerate")
    buckets = accelerate.DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = accelerate.Accelerator(
        cpu=True,
        mixed_precision="bf16" if setting.plan.precision == "bf16" else "no",
        kwargs_handlers=[buckets],
    )
    assert accelerator.num_processes == setting.num_ranks, "it sees all ranks"
    module = build_module_with_loss(setting)
    model, optimizer = accelerator.prepare(module, build_fused_adamw(setting, module))
    max_norm = setting.job.optim.clip_norm

    def accumulate(is_last: bool) -> AbstractContextManager[None]:
        return nullcontext() if is_last else accelerator.no_sync(model)

    for microbatches in turns:
        total = 0.0
        for index, batch in enumerate(microbatches, 1):
            with accumulate(index == len(microbatches)):
                loss = compute_microbatch_loss(model, batch, microbatches)
                accelerator.backward(loss)
            total += loss.item()
        if max_norm is not None:
            accelerator.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        turns.record_loss(total)
