"""The learning rate of a job, by its definition a second time."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

from phalanx.job.learning_rate import resolve_peak_learning_rate
from phalanx.job.schema import Job, Model
from phalanx.optim.schedule import learning_rate
from phalanx.verify.plain.documented import (
    RANDOM_WEIGHTS_RATE,
    TRAINED_WEIGHTS_RATE_OF_OPTIMIZER,
)
from phalanx.verify.plain.training import RateSchedule
from phalanx.verify.row import Difference
from phalanx.verify.trainer_errors import make_number_difference

RATES_JUDGED = "learning rates over the job's own steps"
RULE_OF_OPTIMIZER = {"adamw": "sqrt", "sgd": "linear"}
"""How the rate follows the batch with `optim.lr_scaling = "auto"`."""
MAX_WARMUP_STEPS = 50
"""Of a job that says none: a tenth of its steps, and so many at most."""
NUM_COMPARED_RATES = 2000
TOLERANCE = 1e-9


def make_rate_schedule(job: Job) -> RateSchedule:
    """The schedule of a job whose optimizer is written out a second time."""
    optim, peak = job.optim, _define_unscaled_peak(job)
    rule = RULE_OF_OPTIMIZER[optim.kind] if optim.lr_scaling == "auto" else optim.lr_scaling
    if rule != "none" and optim.reference_batch_size is not None:
        ratio = job.train.global_batch_size / optim.reference_batch_size
        peak *= math.sqrt(ratio) if rule == "sqrt" else ratio
    warmup = optim.warmup_steps
    if warmup is None:
        warmup = min(MAX_WARMUP_STEPS, job.train.steps // 10)
    return RateSchedule(
        kind=optim.schedule,
        peak=peak,
        warmup=warmup,
        num_steps=job.train.steps,
        last_over_peak=optim.min_lr_ratio,
        decay_fraction=optim.decay_fraction,
    )


def _define_unscaled_peak(job: Job) -> float:
    """The rate for the batch that it was tuned for: the job's; else the documented one of weights
    that are trained already, or of random ones."""
    if job.optim.lr != "auto":
        return job.optim.lr
    if not _begins_with_trained_weights(job.model):
        return RANDOM_WEIGHTS_RATE
    return TRAINED_WEIGHTS_RATE_OF_OPTIMIZER.get(job.optim.kind, RANDOM_WEIGHTS_RATE)


def _begins_with_trained_weights(model: Model) -> bool:
    """True for weights of another run, and for a directory of Hugging Face's that has some."""
    if model.init_from is not None:
        return True
    prefix, _, path = (model.kind or "").partition(":")
    names = ("model.safetensors", "model.safetensors.index.json")
    directory = Path(path).expanduser()
    return prefix == "hf" and any((directory / name).is_file() for name in names)


def find_wrong_rate(job: Job) -> Difference | None:
    """The first step of the run that `job` asks for whose rate is not that of the definition; None
    if there is none among the first and last steps, and about NUM_COMPARED_RATES between them."""
    schedule, steps = make_rate_schedule(job), job.train.steps
    peak = resolve_peak_learning_rate(job).lr
    stride = max(1, steps // NUM_COMPARED_RATES)
    near_ends = (
        range(1, min(steps, 2 * MAX_WARMUP_STEPS) + 1),
        range(max(1, steps - MAX_WARMUP_STEPS), steps + 1),
    )
    for step in sorted(set(itertools.chain(range(1, steps + 1, stride), *near_ends))):
        rate, expected = learning_rate(job, step, peak), schedule.rate(step)
        if not math.isclose(rate, expected, rel_tol=TOLERANCE, abs_tol=1e-300):
            error = abs(rate - expected) / max(abs(rate), abs(expected))
            cause = (
                f"in step {step} of {steps:,} the learning rate is {rate:.4g}, by the schedule it"
                f" is {expected:.4g}: warm-up, decay or peak is another"
            )
            return make_number_difference("learning rate", step, error, cause)
    return None
