"""The peak learning rate of a job, and how many steps lead up to it: `optim.lr`, scaled by rule
when the batch is not the one that lr was tuned for.

A pure function of the job, and the only place where the rule is applied: the schedule, the plan's
number and its reason read it here. AdamW's betas and eps stay what they are: Malladi et al. (2022)
scale them too, which matters at factors far beyond those that are safe to extrapolate over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.job.hugging_face import find_weights_directory, is_hugging_face
from phalanx.job.schema import Job, Model, Optim

REASON_OF_SCALING_RULE = {
    "linear": "SGD follows the batch (Goyal et al. 2017)",
    "sqrt": "Adam follows the square root (Malladi et al. 2022)",
}
SCALING_RULE_OF_OPTIMIZER = {"adamw": "sqrt", "sgd": "linear"}  # what "auto" means
MAX_DEFAULT_WARMUP_STEPS = 50  # steps
RANDOM_WEIGHTS_LR = 3e-3
# Of weights that are trained already. AdamW moves each weight by about lr whatever its gradient, so
# the rate that random weights need overwrites what these know within a few steps; 2e-5 is usual
# where all of a published model is tuned.
TRAINED_WEIGHTS_LR_OF_OPTIMIZER = {"adamw": 2e-5, "sgd": 1e-3}


@dataclass(frozen=True)
class PeakLearningRate:
    """`why` says how `lr` came from the job's; empty where it is the job's."""

    lr: float
    why: str = ""


def count_warmup_steps(job: Job) -> int:
    """The steps of linear warm-up: the job's, or a tenth of the run, at most
    MAX_DEFAULT_WARMUP_STEPS."""
    if job.optim.warmup_steps is not None:
        return job.optim.warmup_steps
    return min(MAX_DEFAULT_WARMUP_STEPS, job.train.steps // 10)


def count_decay_steps(job: Job) -> int:
    """The steps at the end that a warm-up must leave free: those of the decay of "wsd", else 0."""
    if job.optim.schedule != "wsd":
        return 0
    return int(job.optim.decay_fraction * job.train.steps)


def find_scaling_rule(optim: Optim) -> str | None:
    """The rule by which lr follows the batch, "linear" or "sqrt"; None if it does not.

    "auto" knows no rule for an own optimizer.
    """
    rule: str | None = optim.lr_scaling
    if rule == "auto":
        rule = SCALING_RULE_OF_OPTIMIZER.get(optim.kind)
    if rule not in REASON_OF_SCALING_RULE:
        return None
    return rule


def resolve_peak_learning_rate(job: Job) -> PeakLearningRate:
    """The rate at the end of warm-up."""
    rule = find_scaling_rule(job.optim)
    reference, batch = job.optim.reference_batch_size, job.train.global_batch_size
    unscaled = resolve_unscaled_learning_rate(job)
    if rule is None or reference is None or reference == batch:
        return unscaled
    factor, shown_factor = batch / reference, f"{batch}/{reference}"
    if rule == "sqrt":
        factor, shown_factor = factor**0.5, f"sqrt({shown_factor})"
    reason = f"{rule}, as the job says"
    if rule == SCALING_RULE_OF_OPTIMIZER.get(job.optim.kind):
        reason = REASON_OF_SCALING_RULE[rule]
    lr = unscaled.lr * factor
    why = (
        f"lr {unscaled.lr:.3g} x {shown_factor} = {lr:.3g}: batch {batch} instead of {reference};"
        f" {reason}"
    )
    if unscaled.why:
        why += f"; {unscaled.why}"
    return PeakLearningRate(lr, why)


def resolve_unscaled_learning_rate(job: Job) -> PeakLearningRate:
    """The rate for `optim.reference_batch_size`: the job's, or where it says "auto" the default
    for its weights."""
    if job.optim.lr != "auto":
        return PeakLearningRate(job.optim.lr)
    trained = find_pretrained_weights_key(job.model)
    if not trained or job.optim.kind not in TRAINED_WEIGHTS_LR_OF_OPTIMIZER:
        return PeakLearningRate(RANDOM_WEIGHTS_LR)
    lr = TRAINED_WEIGHTS_LR_OF_OPTIMIZER[job.optim.kind]
    why = (
        f"the weights of {trained} are trained already; random ones would get"
        f" {RANDOM_WEIGHTS_LR:.3g}"
    )
    return PeakLearningRate(lr, f"lr {lr:.3g}: {why}")


def find_pretrained_weights_key(model: Model) -> str:
    """The key and value of [model] that bring trained weights; empty where the weights are random.

    An own factory may well return trained weights: nothing says so.
    """
    if model.init_from is not None:
        return f"model.init_from={model.init_from}"
    if is_hugging_face(model.kind):
        assert model.kind is not None
        if find_weights_directory(model.kind) is not None:
            return f"model.kind={model.kind}"
    return ""


def resolve_optim_section(job: Job) -> Optim:
    """The [optim] section with a number for lr, which optimizers are built from."""
    return job.optim.model_copy(update={"lr": resolve_unscaled_learning_rate(job).lr})


def list_learning_rate_overrides_on_resume(was: Job, overrides: Sequence[str]) -> list[str]:
    """Overrides to add to the `overrides` that a run is continued with; `was` is the job that it
    ran with until now.

    Whoever resumes with another batch and asks for a rule means the batch that lr was chosen for:
    the one before.
    """
    # Of several the last counts, in a dict as among overrides.
    overrides_by_key = dict(override.partition("=")[::2] for override in overrides)
    # Only a rule of this call counts: an old job with one has its reference.
    rule = overrides_by_key.get("optim.lr_scaling", "none").strip("\"'")
    known = (
        was.optim.reference_batch_size is not None
        or "optim.reference_batch_size" in overrides_by_key
    )
    if known or rule == "none":
        return []
    return [f"optim.reference_batch_size={was.train.global_batch_size}"]
