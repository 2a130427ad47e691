"""What a step does: schedule and optimizer, evaluation, digits, what is recomputed."""

from __future__ import annotations

import json

from phalanx.core import registry
from phalanx.job.checks.check import declare_check, make_finding
from phalanx.job.findings import Finding, shorten_to_one_line
from phalanx.job.learning_rate import count_decay_steps, count_warmup_steps
from phalanx.job.schema import Job

# Schedule and optimizer


@declare_check("train.steps", "optim.warmup_steps", asked_by=("optim.warmup_steps",))
def check_warmup_fits_in_run(job: Job) -> list[Finding]:
    steps, warmup = job.train.steps, count_warmup_steps(job)
    if warmup <= steps:
        return []
    problem = f"a warm-up of {warmup} steps is longer than the {steps} steps of train.steps"
    return [
        make_finding(
            "optim.warmup_steps",
            problem,
            f"warmup_steps at most {steps}, or steps at least {warmup}",
        )
    ]


@declare_check(
    "train.steps",
    "optim.schedule",
    "optim.warmup_steps",
    "optim.decay_fraction",
    asked_by=("optim.warmup_steps", "optim.decay_fraction"),
)
def check_warmup_and_decay_fit_in_run(job: Job) -> list[Finding]:
    steps, warmup, decay = job.train.steps, count_warmup_steps(job), count_decay_steps(job)
    # A warm-up longer than the run is told by `check_warmup_fits_in_run`.
    if warmup > steps or warmup + decay <= steps:
        return []
    problem = (
        f"{warmup} steps of warm-up and {decay} of decay are more than the {steps} steps of"
        " train.steps"
    )
    fix = (
        f"decay_fraction at most {(steps - warmup) / steps:.3g}, or warmup_steps at most"
        f" {steps - decay}"
    )
    return [make_finding("optim.decay_fraction", problem, fix)]


@declare_check("optim.betas")
def check_betas_are_below_one(job: Job) -> list[Finding]:
    problem = "wanted a number below 1, was given 1: the moment would never change"
    return [
        Finding(("optim", "betas", i), problem)
        for i, beta in enumerate(job.optim.betas)
        if beta == 1
    ]


@declare_check("optim.kind", "optim.lr_scaling")
def check_lr_scaling_rule_is_known(job: Job) -> list[Finding]:
    if job.optim.lr_scaling != "auto" or not registry.is_foreign(job.optim.kind):
        return []
    problem = "no rule is known for your own optimizer"
    return [
        make_finding("optim.lr_scaling", problem, 'set "linear" (SGD) or "sqrt" (Adam), or "none"')
    ]


@declare_check("optim.lr_scaling", "optim.reference_batch_size")
def check_lr_scaling_has_reference_batch(job: Job) -> list[Finding]:
    if job.optim.lr_scaling == "none" or job.optim.reference_batch_size is not None:
        return []
    problem = (
        f'"{job.optim.lr_scaling}" scales lr from the batch it was tuned for, and nothing says'
        " which that was"
    )
    return [make_finding("optim.lr_scaling", problem, "set optim.reference_batch_size")]


# Evaluation


@declare_check("eval.tokens", "eval.every_steps", "eval.keep_best")
def check_evaluations_have_tokens(job: Job) -> list[Finding]:
    if job.eval.tokens:
        return []
    wishes = {"every_steps": job.eval.every_steps is not None, "keep_best": job.eval.keep_best}
    problem = "needs an evaluation, and eval.tokens is 0: there is none"
    return [
        make_finding(f"eval.{key}", problem, "set eval.tokens")
        for key, wish in wishes.items()
        if wish
    ]


@declare_check("eval.metric", "eval.mode", "model.objective", asked_by=("eval.metric", "eval.mode"))
def check_metric_is_of_objective(job: Job) -> list[Finding]:
    metric, mode, objective = job.eval.metric, job.eval.mode, job.model.objective
    if metric == "loss":
        if mode != "max":
            return []
        return [make_finding("eval.mode", "the best loss is the lowest", 'mode = "min"')]
    if objective is None:
        name = shorten_to_one_line(metric)
        problem = f'the objective of phalanx has the loss and nothing named "{name}"'
        return [
            make_finding(
                "eval.metric", problem, "set model.objective to one of yours that has metrics"
            )
        ]
    if mode is None:
        problem = f"nothing says whether a high or a low {shorten_to_one_line(metric)} is better"
        return [make_finding("eval.mode", problem, 'set eval.mode to "max" or "min"')]
    return []


# Digits


@declare_check(
    "precision.compute",
    "precision.loss_scale",
    "precision.loss_scale_initial",
    "precision.loss_scale_growth_steps",
)
def check_loss_scale_is_for_fp16(job: Job) -> list[Finding]:
    of, plain = job.precision, Job().precision
    if of.compute != "fp16":
        keys = ["loss_scale", "loss_scale_initial", "loss_scale_growth_steps"]
        problem, fix = "is for fp16", 'set precision.compute = "fp16", or remove it'
    elif of.loss_scale != "dynamic":
        keys = ["loss_scale_initial", "loss_scale_growth_steps"]
        problem = "is for the dynamic scale, and precision.loss_scale is a number"
        fix = "remove one of them"
    else:
        return []
    return [
        make_finding(f"precision.{key}", problem, fix)
        for key in keys
        if getattr(of, key) != getattr(plain, key)
    ]


@declare_check("precision.compute", "parallel.tp", "parallel.pp", asked_by=("precision.compute",))
def check_fp8_excludes_tp_and_pp(job: Job) -> list[Finding]:
    """A finding for fp8 with tp or pp: their products are made by hand, cut or in two halves,
    and would silently stay in bf16."""
    cut = job.parallel.degrees.degrees_above_one("tp", "pp")
    if job.precision.compute != "fp8" or not cut:
        return []
    axis = min(cut, key=("tp", "pp").index)
    problem = f'"fp8" is for layouts without tp and pp, and parallel.{axis} is {cut[axis]}'
    return [
        make_finding(
            "precision.compute", problem, f'set compute = "bf16", or leave parallel.{axis} out'
        )
    ]


@declare_check("parallel.compress", "parallel.compress_rank", "parallel.compress_fraction")
def check_compression_reads_its_keys(job: Job) -> list[Finding]:
    of, plain = job.parallel, Job().parallel
    readers = {"compress_rank": "powersgd", "compress_fraction": "topk"}
    findings = []
    for key, kind in readers.items():
        if of.compress != kind and getattr(of, key) != getattr(plain, key):
            problem = f'is for {kind}, and compress is "{of.compress}"'
            fix = f'set compress = "{kind}" as well'
            findings.append(make_finding(f"parallel.{key}", problem, fix))
    return findings


@declare_check(
    "train.deterministic",
    "train.micro_batch_size",
    "train.global_batch_size",
    asked_by=("train.deterministic",),
)
def check_layout_free_has_fixed_microbatches(job: Job) -> list[Finding]:
    if job.train.deterministic != "layout-free":
        return []
    micro, batch = job.train.micro_batch_size, job.train.global_batch_size
    if micro is None:
        problem = '"layout-free" needs microbatches of one size on any number of ranks'
        return [make_finding("train.deterministic", problem, "set train.micro_batch_size")]
    if batch % micro:
        problem = f"{micro} does not divide train.global_batch_size {batch}"
        return [make_finding("train.micro_batch_size", problem, "set a divisor of it")]
    return []


@declare_check(
    "train.deterministic",
    "parallel.zero_stage",
    "parallel.dp_shard",
    "parallel.tp",
    "parallel.cp",
    "parallel.pp",
    "parallel.ep",
    "parallel.compress",
    "parallel.unused_parameters",
    "parallel.dropout",
    "parallel.offload",
    "train.compile",
    "precision.compute",
    asked_by=("train.deterministic",),
)
def check_layout_free_is_proven(job: Job) -> list[Finding]:
    """A finding for each key with which it is not known that bits are the same on any number of
    ranks."""
    if job.train.deterministic != "layout-free":
        return []
    of = job.parallel
    values: dict[str, tuple[object, bool]] = {
        f"parallel.{axis}": (degree, True)
        for axis, degree in of.degrees.degrees_above_one("tp", "cp", "pp", "ep").items()
    }
    values |= {
        "parallel.zero_stage": (of.zero_stage, of.zero_stage is not None),
        "parallel.dp_shard": (of.dp_shard, (of.dp_shard or 1) > 1),
        "parallel.compress": (of.compress, of.compress != "none"),
        "parallel.unused_parameters": (of.unused_parameters, of.unused_parameters != "refuse"),
        "parallel.dropout": (of.dropout, of.dropout != "global"),
        "parallel.offload": (of.offload, of.offload != Job().parallel.offload),
        "train.compile": (job.train.compile, job.train.compile),
        "precision.compute": (job.precision.compute, job.precision.compute in ("fp16", "fp8")),
    }
    return [
        make_finding(
            "train.deterministic",
            f'train.deterministic = "layout-free" is not proven with {key} = {json.dumps(value)}',
            f"leave {key} out, or set train.deterministic=true",
        )
        for key, (value, is_refused) in values.items()
        if is_refused
    ]


# What is recomputed


@declare_check("train.recompute", "train.recompute_every")
def check_every_k_has_recompute_every(job: Job) -> list[Finding]:
    return _check_mode_and_key(
        job, ("every-k", "mixed"), "recompute_every", "which blocks, say 2 for every second one"
    )


@declare_check("train.recompute", "train.recompute_budget_gib")
def check_recompute_budget_has_size(job: Job) -> list[Finding]:
    return _check_mode_and_key(
        job, ("budget",), "recompute_budget_gib", "what activations may take"
    )


def _check_mode_and_key(job: Job, modes: tuple[str, ...], key: str, meaning: str) -> list[Finding]:
    """A finding unless one of `modes` of train.recompute and the key that these alone read are
    both set or both not."""
    mode = job.train.recompute
    is_asked, is_given = mode in modes, getattr(job.train, key) is not None
    if is_asked and not is_given:
        return [
            make_finding(
                "train.recompute", f'"{mode}" needs train.{key}: {meaning}', f"set train.{key}"
            )
        ]
    if is_given and not is_asked:
        return [
            make_finding(
                f"train.{key}",
                "is for " + " or ".join(f'train.recompute = "{mode}"' for mode in modes),
                f'set train.recompute = "{modes[0]}" as well',
            )
        ]
    return []


CHECKS = (
    check_warmup_fits_in_run,
    check_warmup_and_decay_fit_in_run,
    check_betas_are_below_one,
    check_lr_scaling_rule_is_known,
    check_lr_scaling_has_reference_batch,
    check_evaluations_have_tokens,
    check_metric_is_of_objective,
    check_loss_scale_is_for_fp16,
    check_fp8_excludes_tp_and_pp,
    check_compression_reads_its_keys,
    check_layout_free_has_fixed_microbatches,
    check_layout_free_is_proven,
    check_every_k_has_recompute_every,
    check_recompute_budget_has_size,
)
