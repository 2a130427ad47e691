"""What a job will probably regret, said before it starts: pure functions of job, plan and data.

They are a part of the plan, so that `phalanx plan`, the run and its page say the same. Torch-free.

Each rule gives at most one warning, with the number it rests on and what to do. None of them
refuses anything, and a job that does what the defaults do gets none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from phalanx.core.units import format_count, plural
from phalanx.job.hugging_face import is_hugging_face
from phalanx.job.learning_rate import (
    RANDOM_WEIGHTS_LR,
    TRAINED_WEIGHTS_LR_OF_OPTIMIZER,
    find_pretrained_weights_key,
    resolve_unscaled_learning_rate,
)
from phalanx.job.schema import Job
from phalanx.job.user_dataset import is_given_unknown_samples
from phalanx.plan.pipeline.bubble import warn_of_compiled_split_backward, warn_of_large_bubble
from phalanx.plan.plan import EarlyWarning, Plan

LARGE_BATCH_TOKENS = 2**18
LARGE_BATCH_SAMPLES = 256  # where a sample has one target
MAX_USUAL_LR = {"adamw": 1e-3, "sgd": 0.1}
MAX_USUAL_FINETUNE_LR = {"adamw": 3e-4, "sgd": 0.03}  # a rate at which random weights are trained
# Samples under a BatchNorm: half as many make its variance uncertain by a half.
MIN_BATCHNORM_SAMPLES = 16
MAX_USEFUL_EPOCHS = 4.0  # beyond, repeated tokens are worth less and less (Muennighoff et al. 2023)
TOKEN_LOSS_STD_NATS = 2.0  # spread of one token's loss; it differs little between corpora
MAX_HELD_OUT_UNCERTAINTY = 0.05  # nats, or part of the samples
LONG_RUN_STEPS = 2_000
MIN_BF16_WORTHWHILE_PARAMS = 10_000_000


@dataclass(frozen=True)
class ExtraReasonsAndWarnings:
    """Reasons and warnings about a job from modules that know its files, which the planner does
    not."""

    reasons: tuple[str, ...] = ()
    warnings: tuple[EarlyWarning, ...] = ()


NO_EXTRA_REASONS_OR_WARNINGS = ExtraReasonsAndWarnings()


@dataclass(frozen=True)
class SourceFacts:
    """One source of tokens, and the part of the samples that it gives."""

    name: str
    share: float
    num_train: int


@dataclass(frozen=True)
class DataFacts:
    """Facts of the data that the warnings need: tokens, or samples of the user's own dataset."""

    unit: Literal["tokens", "samples"]
    num_train: int
    num_held_out: int
    sources: tuple[SourceFacts, ...] = ()
    """Of tokens; empty where there are samples."""
    sample_tokens: int | None = None
    """Tokens of one sample of a user's own dataset; None where its inputs are no row of them."""


WarningRule = Callable[["Job", "Plan", "DataFacts | None"], str | None]


def list_early_warnings(
    job: Job, plan: Plan, data: DataFacts | None = None
) -> tuple[EarlyWarning, ...]:
    """All warnings that can be given now. Without `data`, rules about data are silent."""
    warnings = []
    for code, rule in WARNING_RULES:
        text = rule(job, plan, data)
        if text is not None:
            warnings.append(EarlyWarning(code, text))
    return tuple(warnings)


def _warn_of_no_warmup(job: Job, plan: Plan, data: DataFacts | None) -> str | None:
    if job.optim.warmup_steps != 0:
        return None
    batch, tokens = plan.global_batch_size, plan.global_batch_size * plan.seq_len
    high = MAX_USUAL_LR.get(job.optim.kind, math.inf)
    remedy = f"set optim.warmup_steps, {max(1, min(job.train.steps // 20, 2000))} say"
    is_large, size = tokens >= LARGE_BATCH_TOKENS, f"{tokens:,} tokens"
    if _has_user_samples(job, data):
        is_large, size = batch >= LARGE_BATCH_SAMPLES, f"{batch:,} samples"
    if is_large:
        return (
            f"no warm-up with a large batch of {size}: the first steps are the ones that diverge;"
            f" {remedy}"
        )
    if plan.peak_lr >= high:
        return (
            f"no warm-up at a learning rate of {plan.peak_lr:.3g}: the first steps may diverge;"
            f" {remedy}"
        )
    return None


def _warn_of_fixed_lr(job: Job, plan: Plan, data: DataFacts | None) -> str | None:
    batch, reference = job.train.global_batch_size, job.optim.reference_batch_size
    if job.optim.lr_scaling != "none" or reference is None or reference == batch:
        return None
    return (
        f"the batch is {batch} and lr {resolve_unscaled_learning_rate(job).lr:.3g} was tuned for"
        f" {reference}: it stays as it is; set optim.lr_scaling=auto to let it follow"
    )


def _warn_of_high_lr(job: Job, plan: Plan, data: DataFacts | None) -> str | None:
    trained, lr = find_pretrained_weights_key(job.model), plan.peak_lr
    if not trained or lr < MAX_USUAL_FINETUNE_LR.get(job.optim.kind, RANDOM_WEIGHTS_LR):
        return None
    usual = TRAINED_WEIGHTS_LR_OF_OPTIMIZER.get(job.optim.kind)
    remedy = "set optim.lr to what your optimizer needs for them"
    if usual:
        remedy = f"leave optim.lr out for {usual:.3g}"
    return (
        f"lr {lr:.3g} is a rate for random weights, and those of {trained} are trained already: it"
        f" overwrites what they know; {remedy}"
    )


def _warn_of_small_batchnorm_batch(job: Job, plan: Plan, data: DataFacts | None) -> str | None:
    norms, ranks = plan.model_shape.num_batchnorms, plan.layout.data_parallel_size
    micro = plan.micro_batch_size
    if not norms:
        return None
    if not plan.parallel.sync_batchnorm and ranks > 1:
        return (
            f"{plural(norms, 'BatchNorm layer')} see {micro} samples each, not the {micro * ranks}"
            f" of all {ranks} ranks, and keep rank 0's running statistics: results follow the"
            " layout; leave parallel.sync_batchnorm on"
        )
    if micro * ranks < MIN_BATCHNORM_SAMPLES:
        return (
            f"{plural(norms, 'BatchNorm layer')} normalise over {micro * ranks} of"
            f" {plan.global_batch_size} samples: their statistics will be noisy; raise"
            " train.micro_batch_size or change the norm"
        )
    return None


def _warn_of_dropout(job: Job, plan: Plan, data: DataFacts | None) -> str | None:
    layers, ranks = plan.model_shape.num_dropouts, plan.layout.data_parallel_size
    is_compiled = plan.compile and plan.activations.recompute != "none"
    if not layers or ranks == 1 or (plan.parallel.dropout == "global" and not is_compiled):
        return None
    fix = "set parallel.dropout=global"
    if plan.parallel.dropout == "global":
        fix = (
            "what is compiled and recomputed draws as torch does: set train.compile=false or"
            " train.recompute=none"
        )
    return (
        f"{plural(layers, 'dropout layer')} draw on each of {ranks} ranks: a run repeats itself,"
        f" and another number of ranks draws other masks; {fix}"
    )


def _warn_of_evaluation_mode(job: Job, plan: Plan, data: DataFacts | None) -> str | None:
    number = plan.model_shape.num_idle_layers
    if not number:
        return None
    return (
        f"{plural(number, 'dropout or BatchNorm layer')} of {plan.model_shape.kind} train in"
        " evaluation mode, as from_pretrained leaves a module: they drop nothing, or keep their"
        " running statistics; call .train() before you return it"
    )


def _warn_of_narrow_parameters(job: Job, plan: Plan, data: DataFacts | None) -> str | None:
    shape = plan.model_shape
    # phalanx builds models of Hugging Face in fp32, whatever config.json says.
    if not shape.num_narrow_params or is_hugging_face(job.model.kind):
        return None
    narrow, total = format_count(shape.num_narrow_params), format_count(shape.num_params)
    return (
        f"{narrow} of {total} parameters of {shape.kind} are trained in 16 bits or fewer, as"
        " from_pretrained may load them: the optimizer keeps its state so, and updates below a"
        " weight's rounding are lost; call its .float() before you return it, and set"
        " precision.compute=bf16 to compute in 16 bits"
    )


def _warn_of_other_sample_length(job: Job, plan: Plan, data: DataFacts | None) -> str | None:
    if data is None or data.sample_tokens is None or data.sample_tokens == plan.seq_len:
        return None
    if is_given_unknown_samples(job) or plan.model_shape.reads_images:
        return None
    return (
        f"samples of {job.data.source} have {data.sample_tokens} tokens, and what is said of memory"
        f" and time is for data.seq_len={plan.seq_len}; set data.seq_len={data.sample_tokens}"
    )


def _warn_of_small_dataset(job: Job, plan: Plan, data: DataFacts | None) -> str | None:
    if data is None:
        return None
    samples, batch = _count_train_samples(plan, data), plan.global_batch_size
    if samples >= batch:
        return None
    noun = "samples"
    if data.unit == "tokens":
        noun = "sequences"
    return (
        f"{samples} {noun} are fewer than the batch of {batch}: some come twice in a step; lower "
        "train.global_batch_size"
    )


def _warn_of_many_epochs(job: Job, plan: Plan, data: DataFacts | None) -> str | None:
    """The warning for the source that is repeated most often."""
    if data is None or not data.sources:
        return None
    step_tokens = plan.global_batch_size * plan.seq_len
    worst = max(data.sources, key=lambda source: source.share / max(1, source.num_train))
    # A source gives its share of the samples, whatever its size: small ones come round more often.
    epochs = job.train.steps * step_tokens * worst.share / max(1, worst.num_train)
    if epochs <= MAX_USEFUL_EPOCHS:
        return None
    useful = max(1, int(MAX_USEFUL_EPOCHS * worst.num_train / (step_tokens * worst.share)))
    remedy = "give it less weight, get more of it"
    if len(data.sources) == 1:
        remedy = "get more text"
    return (
        f"{epochs:.1f} epochs over the {worst.num_train:,} tokens of {worst.name}: past about"
        f" {MAX_USEFUL_EPOCHS:g}, repeated text teaches little; {remedy}, or stop at"
        f" train.steps={useful}"
    )


def _warn_of_small_held_out(job: Job, plan: Plan, data: DataFacts | None) -> str | None:
    if data is None or not job.eval.tokens or not data.num_held_out:
        return None
    judged = min(data.num_held_out, job.eval.tokens)
    if data.unit == "samples":
        # Of a share, sqrt(p (1 - p) / n), at its widest: p a half.
        spread = 0.5 / judged**0.5
        error = f"a share of them, an accuracy say, is uncertain by {spread:.0%}"
    else:
        spread = TOKEN_LOSS_STD_NATS / judged**0.5
        error = f"their loss is uncertain by about {spread:.2f} nats"
    if spread <= MAX_HELD_OUT_UNCERTAINTY:
        return None
    remedy = "hold out more"
    if judged < data.num_held_out:
        remedy = "raise eval.tokens"
    return f"{judged:,} held-out {data.unit} are few to judge by: {error}; {remedy}"


def _warn_of_late_saves(job: Job, plan: Plan, data: DataFacts | None) -> str | None:
    steps, checkpoint = job.train.steps, job.checkpoint
    if steps < LONG_RUN_STEPS or checkpoint.has_interval or job.eval.keep_best:
        return None
    when = "never in"
    if checkpoint.at_end:
        when = "only after the last of"
    return (
        f"a checkpoint is saved {when} {steps:,} steps: a crash begins again; set"
        " checkpoint.every_minutes=10"
    )


def _warn_of_late_evaluation(job: Job, plan: Plan, data: DataFacts | None) -> str | None:
    """The warning for an interval longer than the run: a short trial of a long job's file is no
    mistake to refuse."""
    interval, steps = job.eval.every_steps, job.train.steps
    if interval is None or interval <= steps:
        return None
    return (
        f"eval.every_steps={interval} never comes in {plural(steps, 'step')}: only the end is"
        " evaluated"
    )


def _warn_of_missing_saves(job: Job, plan: Plan, data: DataFacts | None) -> str | None:
    """The warning for an interval longer than the run, with what saves all the same; nothing does
    where no other key asks for it."""
    interval, steps = job.checkpoint.every_steps, job.train.steps
    if interval is None or interval <= steps:
        return None
    outcome = "nothing is saved, checkpoint.at_end being false"
    others = _list_saves_beside_every_steps(job)
    if others:
        outcome = f"what saves is {' and '.join(others)}"
    elif job.checkpoint.at_end:
        outcome = "only the end is saved"
    return f"checkpoint.every_steps={interval} never comes in {plural(steps, 'step')}: {outcome}"


def _list_saves_beside_every_steps(job: Job) -> list[str]:
    """The keys by which the state is saved on the way, without checkpoint.every_steps."""
    checkpoint = job.checkpoint
    keys = []
    if checkpoint.every_minutes is not None:
        keys.append(f"checkpoint.every_minutes={checkpoint.every_minutes:g}")
    if checkpoint.every is not None:
        keys.append(f"checkpoint.every={checkpoint.every}")
    if job.eval.keep_best:
        keys.append("eval.keep_best")
    return keys


def _warn_of_fp32(job: Job, plan: Plan, data: DataFacts | None) -> str | None:
    if (
        plan.device != "cuda"
        or plan.precision != "fp32"
        or plan.num_params < MIN_BF16_WORTHWHILE_PARAMS
    ):
        return None
    if plan.precision_is_auto:  # these GPUs have no bf16, and a reason of the plan says so
        return None
    return (
        f"{format_count(plan.num_params)} parameters in fp32 on a GPU: bf16 uses its tensor cores"
        " and half the memory of activations; set precision.compute=bf16"
    )


def _warn_of_bubble(job: Job, plan: Plan, data: DataFacts | None) -> str | None:
    return warn_of_large_bubble(job, plan)


def _warn_of_compiled_stages(job: Job, plan: Plan, data: DataFacts | None) -> str | None:
    return warn_of_compiled_split_backward(job, plan)


WARNING_RULES: tuple[tuple[str, WarningRule], ...] = (
    ("no_warmup", _warn_of_no_warmup),
    ("lr_ignores_batch", _warn_of_fixed_lr),
    ("high_lr_of_trained_weights", _warn_of_high_lr),
    ("few_batchnorm_samples", _warn_of_small_batchnorm_batch),
    ("dropout_depends_on_layout", _warn_of_dropout),
    ("trains_in_evaluation_mode", _warn_of_evaluation_mode),
    ("trains_narrow_parameters", _warn_of_narrow_parameters),
    ("samples_of_other_length", _warn_of_other_sample_length),
    ("dataset_below_batch", _warn_of_small_dataset),
    ("many_epochs", _warn_of_many_epochs),
    ("small_held_out", _warn_of_small_held_out),
    ("saved_at_the_end_only", _warn_of_late_saves),
    ("evaluated_at_the_end_only", _warn_of_late_evaluation),
    ("saves_never_come", _warn_of_missing_saves),
    ("fp32_on_gpu", _warn_of_fp32),
    ("pipeline_bubble", _warn_of_bubble),
    ("pipeline_compiled", _warn_of_compiled_stages),
)


def describe_partial_epoch_batch(job: Job, plan: Plan, data: DataFacts | None) -> str | None:
    """A line on samples that do not fill a batch, which other trainers drop; None where there are
    none.

    Text is not counted in sequences. This is nothing to regret, and so no warning but a reason of
    the plan.
    """
    if data is None or data.unit == "tokens":
        return None
    batch, samples = plan.global_batch_size, data.num_train
    rest = samples % batch
    if not rest or samples < batch or job.train.steps * batch <= samples:
        return None
    return (
        f"{samples:,} samples make {samples // batch:,} batches of {batch} and {rest} over: nothing"
        f" is dropped, the batch that ends an epoch takes its other {batch - rest} from the next"
    )


def _has_user_samples(job: Job, data: DataFacts | None) -> bool:
    return data is not None and data.unit == "samples"


def _count_train_samples(plan: Plan, data: DataFacts) -> int:
    if data.unit == "tokens":
        return data.num_train // plan.seq_len
    return data.num_train
