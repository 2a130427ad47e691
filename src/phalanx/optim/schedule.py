"""Learning rates as a pure function of the step: nothing to save, nothing to drift."""

from __future__ import annotations

import math

from phalanx.job.schema import Optim


def learning_rate(optim: Optim, step: int, total_steps: int) -> float:
    """The rate of update `step` (1-based). Warm-up ends at `warmup_steps`; the last step has lr x min_lr_ratio."""
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    low = optim.lr * optim.min_lr_ratio
    done = (step - optim.warmup_steps) / max(1, total_steps - optim.warmup_steps)
    if optim.schedule == "constant":
        return optim.lr
    if optim.schedule == "cosine":
        return low + (optim.lr - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    if optim.schedule == "linear":
        return low + (optim.lr - low) * max(0.0, 1 - done)
    decay_steps = max(1, round(total_steps * optim.decay_fraction))
    into_decay = step - (total_steps - decay_steps)
    return optim.lr if into_decay <= 0 else low + (optim.lr - low) * max(0.0, 1 - into_decay / decay_steps)
