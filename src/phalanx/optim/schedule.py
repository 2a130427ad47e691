"""The learning rate as a pure function of job and step: nothing to save, nothing to drift."""

from __future__ import annotations

import math

from phalanx.job.learning_rate import count_warmup_steps, resolve_peak_learning_rate
from phalanx.job.schema import Job


def learning_rate(job: Job, step: int, peak: float | None = None) -> float:
    """The rate of update `step` (1-based).

    Warm-up ends at `warmup`; the last step has peak x min_lr_ratio. With `peak`, which is the
    plan's and so the job's, no file is looked for.
    """
    optim, total_steps, warmup = job.optim, job.train.steps, count_warmup_steps(job)
    if peak is None:
        peak = resolve_peak_learning_rate(job).lr
    # Steps count from 1: a warm-up of 0 steps never gets here.
    if step <= warmup:
        return peak * step / warmup
    low = peak * optim.min_lr_ratio
    # 1 in the last step, in which every schedule but the constant one has come down to `low`.
    done = (step - warmup) / max(1, total_steps - warmup)
    if optim.schedule == "constant":
        return peak
    if optim.schedule == "cosine":
        return low + (peak - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    if optim.schedule == "linear":
        return low + (peak - low) * max(0.0, 1 - done)
    # wsd: constant, then linear in the last steps.
    decay_steps = max(1, round(total_steps * optim.decay_fraction))
    into_decay = step - (total_steps - decay_steps)
    if into_decay <= 0:
        return peak
    return low + (peak - low) * max(0.0, 1 - into_decay / decay_steps)
