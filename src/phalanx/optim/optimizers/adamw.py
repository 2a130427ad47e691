"""AdamW with decoupled decay, fused."""

from __future__ import annotations

import torch

from phalanx.job.schema import Optim
from phalanx.optim.groups import WeightDecayGroups

WEIGHT_DECAY = 0.1
SLOTS = ("exp_avg", "exp_avg_sq")


def build(groups: WeightDecayGroups, optim: Optim) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(
        groups.with_decay(optim.weight_decay, auto=WEIGHT_DECAY),
        lr=float(optim.lr),
        betas=optim.betas,
        eps=optim.eps,
        fused=True,
    )
    # torch would make this state at the first step: made here, memory is known before it, and a
    # checkpoint is copied into place.
    for parameter in groups.parameters():
        optimizer.state[parameter] = {
            # On the parameter's device, where the fused kernel reads it.
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            **{slot: torch.zeros_like(parameter, requires_grad=False) for slot in SLOTS},
        }
    return optimizer
