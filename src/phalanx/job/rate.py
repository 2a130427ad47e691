"""The peak learning rate of a job, and how many steps lead up to it: `optim.lr`, scaled by rule when the batch is not
the one that lr was tuned for.

A pure function of the job, and the only place where the rule is applied. AdamW's betas and eps stay what they are:
Malladi et al. (2022) scale them too, which matters at factors far beyond those that are safe to extrapolate over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.job.schema import Job, Optim

REASONS = {
    "linear": "SGD follows the batch (Goyal et al. 2017)",
    "sqrt": "Adam follows the square root (Malladi et al. 2022)",
}
RULES = {"adamw": "sqrt", "sgd": "linear"}  # what "auto" means


MAX_DEFAULT_WARMUP = 50  # steps


@dataclass(frozen=True)
class PeakRate:
    """`why` says how `lr` came from the job's; empty where it is the job's."""

    lr: float
    why: str = ""


def warmup_steps(job: Job) -> int:
    """The steps of linear warm-up: the job's, or where it leaves them open what is never most of a run."""
    given = job.optim.warmup_steps
    return min(MAX_DEFAULT_WARMUP, job.train.steps // 10) if given is None else given


def scaling_rule(optim: Optim) -> str | None:
    """ "linear" or "sqrt", or None where lr does not follow the batch. "auto" knows no rule for an own optimizer."""
    rule = RULES.get(optim.kind) if optim.lr_scaling == "auto" else optim.lr_scaling
    return rule if rule in REASONS else None


def peak_rate(job: Job) -> PeakRate:
    """The rate at the end of warm-up."""
    optim, batch = job.optim, job.train.global_batch_size
    rule, reference = scaling_rule(optim), job.optim.reference_batch_size
    if rule is None or reference is None or reference == batch:
        return PeakRate(optim.lr)
    ratio = batch / reference
    lr = optim.lr * (ratio if rule == "linear" else ratio**0.5)
    factor = f"{batch}/{reference}" if rule == "linear" else f"sqrt({batch}/{reference})"
    reason = REASONS[rule] if rule == RULES.get(optim.kind) else f"{rule}, as the job says"
    return PeakRate(lr, f"lr {optim.lr:.3g} x {factor} = {lr:.3g}: batch {batch} instead of {reference}; {reason}")


def reference_on_resume(was: Job, overrides: Sequence[str]) -> list[str]:
    """What to add to the `overrides` that a run is continued with; `was` is the job that it ran with until now.

    Whoever resumes with another batch and asks for a rule means the batch that lr was chosen for: the one before.
    """
    given = dict(override.partition("=")[::2] for override in overrides)
    rule = given.get("optim.lr_scaling", "none").strip("\"'")
    known = was.optim.reference_batch_size is not None or "optim.reference_batch_size" in given
    return [] if known or rule == "none" else [f"optim.reference_batch_size={was.train.global_batch_size}"]
