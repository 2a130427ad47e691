"""What contenders besides phalanx share: the module with its loss and weights, the optimizer, and
the loop that a user of torch writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from phalanx.bench.training.payload import RankSetting
from phalanx.bench.training.rank import TrainingTurns
from phalanx.mesh.logical import collect_module_shards
from phalanx.nn.build import build_model, build_objective
from phalanx.optim.groups import build_weight_decay_groups
from phalanx.optim.optimizers.adamw import WEIGHT_DECAY
from phalanx.parallel.executor import Batch


class MeanLossModule(nn.Module):
    """The job's module and its objective in one forward, as libraries want it: a batch in, the
    mean loss of its targets out."""

    def __init__(self, setting: RankSetting) -> None:
        super().__init__()
        self.model = build_model(setting.job, setting.plan.model_shape)
        self._objective = build_objective(setting.job)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss_sum, num_targets = self._objective(self.model(inputs), {"targets": targets})
        return loss_sum / num_targets


def build_module_with_loss(setting: RankSetting) -> MeanLossModule:
    """The module with the weights that phalanx begins with, whole on this rank."""
    module = MeanLossModule(setting).to_empty(device="cpu")
    model = module.model
    with torch.no_grad():
        model.initialize(collect_module_shards(model)[0], setting.job.run.seed)  # type: ignore[operator]
    return module


def build_fused_adamw(setting: RankSetting, module: nn.Module) -> torch.optim.AdamW:
    """torch's fused AdamW over `module`, with the job's numbers."""
    optim = setting.job.optim
    groups = build_weight_decay_groups(module, list(module.named_parameters()))
    return torch.optim.AdamW(
        groups.with_decay(optim.weight_decay, auto=WEIGHT_DECAY),
        lr=setting.plan.peak_lr,
        betas=optim.betas,
        eps=optim.eps,
        fused=True,
    )


def open_autocast(setting: RankSetting) -> AbstractContextManager[None]:
    """A context in which products are of the job's type."""
    return torch.autocast("cpu", torch.bfloat16, enabled=setting.plan.precision == "bf16")


def train_module_in_turns(
    setting: RankSetting,
    turns: TrainingTurns,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    accumulate: Callable[[bool], AbstractContextManager[None]] = lambda is_last: nullcontext(),
    autocast: bool = True,
) -> None:
    """The loop that one writes by hand: forward, backward, clipping, update.

    `accumulate(is_last)` is open around each microbatch: gradients are reduced in the last one.
    """
    max_norm = setting.job.optim.clip_norm
    for microbatches in turns:
        total = torch.zeros(())
        for index, batch in enumerate(microbatches, 1):
            with accumulate(index == len(microbatches)):
                with open_autocast(setting) if autocast else nullcontext():
                    loss = compute_microbatch_loss(module, batch, microbatches)
                loss.backward()
            total += loss.detach()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        turns.record_loss(total.item())


def compute_microbatch_loss(
    module: nn.Module, batch: Batch, microbatches: Sequence[Batch]
) -> torch.Tensor:
    """The microbatch's part of the step's mean loss: all have as many targets."""
    loss: torch.Tensor = module(batch["inputs"], batch["targets"])
    return loss / len(microbatches)
