"""SGD with momentum, not fused: that kernel knows no sharded tensors.

Decay is torch's: added to the gradient (L2).
"""

from __future__ import annotations

import torch

from phalanx.job.schema import Optim
from phalanx.optim.groups import WeightDecayGroups

WEIGHT_DECAY = 0.0


def build(groups: WeightDecayGroups, optim: Optim) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(
        groups.with_decay(optim.weight_decay, auto=WEIGHT_DECAY),
        lr=float(optim.lr),
        momentum=optim.momentum,
        foreach=True,
    )
    if optim.momentum:
        # From zeros the first step leaves the gradient itself in the buffer, as torch does.
        for parameter in groups.parameters():
            optimizer.state[parameter] = {
                "momentum_buffer": torch.zeros_like(parameter, requires_grad=False)
            }
    return optimizer
