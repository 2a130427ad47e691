"""What one key cannot know: combinations of keys that no cluster could run. One small function per question.

A check says which keys it reads. It runs when the user gave one of them, and none of them was itself refused.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from phalanx.core import registry
from phalanx.core.errors import did_you_mean
from phalanx.core.phases import PHASES
from phalanx.job.data_checks import QUESTIONS as DATA_QUESTIONS
from phalanx.job.explain import Finding, printable
from phalanx.job.model_checks import QUESTIONS as MODEL_QUESTIONS
from phalanx.job.nearby import divisors, divisors_near, multiples_near
from phalanx.job.positions import Path
from phalanx.job.rate import warmup_steps
from phalanx.job.schema import Job
from phalanx.job.secret_checks import secrets_in

MODELS, SINKS, FAULTS = "phalanx.nn.models", "phalanx.observe.sinks", "phalanx.resilience.faults"
OPTIMIZERS = "phalanx.optim.optimizers"
FAULT_KEYS = ("rank", "step", "phase")


@dataclass(frozen=True)
class Check:
    """`asked_by`: the keys one of which the user must have given; the defaults of the others may then disagree."""

    run: Callable[[Job], list[Finding]]
    reads: tuple[str, ...]
    asked_by: tuple[str, ...]


CHECKS: list[Check] = []


def run_checks(job: Job, given: Collection[str], refused: Collection[str]) -> list[Finding]:
    """All findings about `job`. `given` and `refused` hold dotted keys: what the user wrote, and what was wrong."""
    findings: list[Finding] = []
    for check in CHECKS:
        if any(key in given for key in check.asked_by) and not any(key in refused for key in check.reads):
            also = tuple(_path(key) for key in check.reads)
            findings += [replace(finding, also=also) for finding in check.run(job)]
    return findings + secrets_in(job)


_Question = Callable[[Job], list[Finding]]


def check(*reads: str, asked_by: tuple[str, ...] = ()) -> Callable[[_Question], _Question]:
    def register(run: _Question) -> _Question:
        CHECKS.append(Check(run, reads, asked_by or reads))
        return run

    return register


# Model


for _model_question, _keys in MODEL_QUESTIONS:
    check(*_keys)(_model_question)


@check("model.kind")
def model_exists(job: Job) -> list[Finding]:
    if job.model.kind is None:
        return []
    return _exists("model.kind", job.model.kind, MODELS, "model", "package.module:factory")


@check("model.kind", "model.args")
def args_need_a_factory(job: Job) -> list[Finding]:
    if job.model.is_foreign or not job.model.args:
        return []
    what = f'is for your own factory, and model.kind is "{job.model.kind or "decoder"}"'
    return [_finding("model.args", what, 'set model.kind = "package.module:factory", or remove model.args')]


@check("model.objective")
def objective_is_a_name(job: Job) -> list[Finding]:
    if job.model.objective is None or _is_foreign_name(job.model.objective):
        return []
    return [_finding("model.objective", f"{job.model.objective!r} is not package.module:function")]


# Data


for _data_question, _keys in DATA_QUESTIONS:
    check(*_keys)(_data_question)


# Batch and ranks


@check("parallel.ranks", "parallel.dp_replicate", "parallel.dp_shard")
def axes_fill_the_ranks(job: Job) -> list[Finding]:
    ranks, copies, shards = job.parallel.ranks, job.parallel.dp_replicate, job.parallel.dp_shard
    if ranks is None:
        return []
    if copies is not None and shards is not None and copies * shards != ranks:
        pairs = [(degree, ranks // degree) for degree in divisors(ranks)]
        near = min(pairs, key=lambda pair: abs(pair[0] - copies) + abs(pair[1] - shards))
        what = f"dp_replicate {copies} x dp_shard {shards} makes {copies * shards} ranks, and parallel.ranks is {ranks}"
        fix = f"nearest: dp_replicate {near[0]} x dp_shard {near[1]}, or ranks {copies * shards}"
        return [_finding("parallel.ranks", what, fix)]
    for name, degree in (("dp_replicate", copies), ("dp_shard", shards)):
        if degree is not None and ranks % degree:
            what = f"{name} {degree} does not divide the {ranks} ranks"
            return [_finding(f"parallel.{name}", what, f"nearest: {divisors_near(ranks, degree)}")]
    return []


@check("train.global_batch_size", "train.micro_batch_size")
def micro_batch_divides_global(job: Job) -> list[Finding]:
    batch, micro = job.train.global_batch_size, job.train.micro_batch_size
    if micro is None or batch % micro == 0:
        return []
    what = f"micro-batches of {micro} do not divide the global batch of {batch} sequences"
    fix = f"nearest micro_batch_size: {divisors_near(batch, micro)}"
    return [_finding("train.micro_batch_size", what, fix)]


@check(
    "train.global_batch_size",
    "train.micro_batch_size",
    "parallel.ranks",
    "parallel.dp_replicate",
    "parallel.dp_shard",
)
def ranks_share_the_batch(job: Job) -> list[Finding]:
    batch, micro = job.train.global_batch_size, job.train.micro_batch_size or 1
    ranks = _known_ranks(job)
    if ranks is None or batch % micro or batch % (ranks * micro) == 0:
        return []
    parts = "" if micro == 1 else f" in micro-batches of {micro}"
    what = f"a global batch of {batch} sequences cannot be shared evenly by {ranks} ranks{parts}"
    fix = f"nearest global_batch_size: {multiples_near(batch, ranks * micro)}; or ranks: "
    return [_finding("train.global_batch_size", what, fix + divisors_near(batch // micro, ranks))]


# Schedule and optimizer


@check("train.steps", "optim.warmup_steps", asked_by=("optim.warmup_steps",))
def warmup_fits(job: Job) -> list[Finding]:
    steps, warmup = job.train.steps, warmup_steps(job)
    if warmup <= steps:
        return []
    what = f"a warm-up of {warmup} steps is longer than the {steps} steps of train.steps"
    return [_finding("optim.warmup_steps", what, f"warmup_steps at most {steps}, or steps at least {warmup}")]


@check(
    "train.steps",
    "optim.schedule",
    "optim.warmup_steps",
    "optim.decay_fraction",
    asked_by=("optim.warmup_steps", "optim.decay_fraction"),
)
def warmup_and_decay_fit(job: Job) -> list[Finding]:
    steps, warmup, decay = job.train.steps, warmup_steps(job), job.optim.decay_fraction
    if job.optim.schedule != "wsd" or warmup > steps or warmup + int(decay * steps) <= steps:
        return []
    what = f"{warmup} steps of warm-up and {int(decay * steps)} of decay are more than the {steps} steps of train.steps"
    fix = f"decay_fraction at most {(steps - warmup) / steps:.3g}, or warmup_steps at most {steps - int(decay * steps)}"
    return [_finding("optim.decay_fraction", what, fix)]


@check("optim.betas")
def betas_are_below_one(job: Job) -> list[Finding]:
    what = "wanted a number below 1, was given 1: the moment would never change"
    return [Finding(("optim", "betas", i), what) for i, beta in enumerate(job.optim.betas) if beta == 1]


@check("optim.kind")
def optimizer_exists(job: Job) -> list[Finding]:
    return _exists("optim.kind", job.optim.kind, OPTIMIZERS, "optimizer", "package.module:build")


@check("optim.kind", "optim.lr_scaling")
def scaling_rule_is_known(job: Job) -> list[Finding]:
    if job.optim.lr_scaling != "auto" or not registry.is_foreign(job.optim.kind):
        return []
    what = "no rule is known for your own optimizer"
    return [_finding("optim.lr_scaling", what, 'set "linear" (SGD) or "sqrt" (Adam), or "none"')]


@check("optim.lr_scaling", "optim.reference_batch_size")
def scaling_needs_a_reference(job: Job) -> list[Finding]:
    if job.optim.lr_scaling == "none" or job.optim.reference_batch_size is not None:
        return []
    what = f'"{job.optim.lr_scaling}" scales lr from the batch it was tuned for, and nothing says which that was'
    return [_finding("optim.lr_scaling", what, "set optim.reference_batch_size")]


# Evaluation


@check("eval.tokens", "eval.every_steps", "eval.keep_best")
def evaluations_have_tokens(job: Job) -> list[Finding]:
    if job.eval.tokens:
        return []
    wishes = {"every_steps": job.eval.every_steps is not None, "keep_best": job.eval.keep_best}
    what = "needs an evaluation, and eval.tokens is 0: there is none"
    return [_finding(f"eval.{key}", what, "set eval.tokens") for key, wish in wishes.items() if wish]


@check("eval.metric", "eval.mode", "model.objective", asked_by=("eval.metric", "eval.mode"))
def metrics_are_the_objectives(job: Job) -> list[Finding]:
    metric, mode, own = job.eval.metric, job.eval.mode, job.model.objective
    if metric == "loss":
        return [_finding("eval.mode", "the best loss is the lowest", 'mode = "min"')] if mode == "max" else []
    if own is None:
        what = f'the objective of phalanx has the loss and nothing named "{printable(metric)}"'
        return [_finding("eval.metric", what, "set model.objective to one of yours that has metrics")]
    if mode is None:
        what = f"nothing says whether a high or a low {printable(metric)} is better"
        return [_finding("eval.mode", what, 'set eval.mode to "max" or "min"')]
    return []


# Checkpoints


@check("checkpoint.url")
def checkpoints_have_an_address(job: Job) -> list[Finding]:
    url = job.checkpoint.url
    if url is None or re.fullmatch(r"[a-z][a-z0-9+.-]*://.+", url):
        return []
    what = f"{url!r} is not a URL"
    return [_finding("checkpoint.url", what, "as s3://bucket/run-7; without it checkpoints are in the run's directory")]


@check("checkpoint.every", "checkpoint.mtbf_hours")
def auto_interval_needs_failures(job: Job) -> list[Finding]:
    kept = job.checkpoint
    if kept.every == "auto" and kept.mtbf_hours is None:
        what = '"auto" weighs what a save costs against how often the job fails, and nothing says how often'
        return [_finding("checkpoint.every", what, "set checkpoint.mtbf_hours, or every_minutes instead")]
    if kept.every is None and kept.mtbf_hours is not None:
        return [_finding("checkpoint.mtbf_hours", 'is for checkpoint.every = "auto"', 'set every = "auto" as well')]
    return []


@check("checkpoint.keep_last", "checkpoint.keep_every")
def keeping_some_removes_others(job: Job) -> list[Finding]:
    if job.checkpoint.keep_every is None or job.checkpoint.keep_last is not None:
        return []
    what = "keeps some of what is removed, and without keep_last nothing is"
    return [_finding("checkpoint.keep_every", what, "set checkpoint.keep_last")]


# Names from folders


@check("observe.sinks")
def sinks_exist(job: Job) -> list[Finding]:
    return [
        finding
        for index, sink in enumerate(job.observe.sinks or ())
        for finding in _exists(f"observe.sinks.{index}", sink, SINKS, "sink", "package.module:Class")
    ]


@check("resilience.inject")
def faults_are_well_formed(job: Job) -> list[Finding]:
    return [
        Finding(("resilience", "inject", index), *wrong)
        for index, text in enumerate(job.resilience.inject)
        for wrong in _fault_problems(text)
    ]


@check("resilience.inject", "parallel.ranks", "parallel.dp_replicate", "parallel.dp_shard")
def fault_ranks_exist(job: Job) -> list[Finding]:
    ranks = _known_ranks(job)
    if ranks is None:
        return []
    what, fix = "{text!r} strikes rank {number}, which does not exist", f"ranks are 0 to {ranks - 1}"
    return [replace(finding, fix=fix) for finding in _faults_beyond(job, "rank", ranks - 1, what)]


@check("resilience.inject", "train.steps")
def fault_steps_come(job: Job) -> list[Finding]:
    steps = job.train.steps
    return _faults_beyond(job, "step", steps, f"{{text!r}} strikes at step {{number}}, and train.steps is {steps}")


def _faults_beyond(job: Job, key: str, last: int, what: str) -> list[Finding]:
    """One finding for each fault that names a `key` greater than `last`."""
    findings: list[Finding] = []
    for index, text in enumerate(job.resilience.inject):
        for name, _, value in (part.partition("=") for part in _split_fault(text)[1]):
            if name == key and _is_count(value) and int(value) > last:
                findings.append(Finding(("resilience", "inject", index), what.format(text=text, number=int(value))))
    return findings


def _fault_problems(text: str) -> list[tuple[str, str]]:
    """What is wrong with the spelling of "fault:key=value,...", each as (what, fix)."""
    usage = 'write "fault:rank=1,step=7,phase=backward"'
    fault, parts = _split_fault(text)
    known = _names(FAULTS)
    wrong: list[tuple[str, str]] = []
    if fault.partition(":")[0] in ("", *known) and fault not in known:
        wrong.append((f"{text!r} is not fault:key=value,...", usage))
    elif registry.is_foreign(fault) and not _is_foreign_name(fault):
        wrong.append((f"{fault!r} is not package.module:function", usage))
    elif not registry.is_foreign(fault) and known and fault not in known:
        wrong.append((f"unknown fault {fault!r}", did_you_mean(fault, known) or f"faults are {', '.join(known)}"))
    seen: set[str] = set()
    for part in parts:
        key, _, value = part.partition("=")
        if not value:
            wrong.append((f"{part!r} in {text!r} is not key=value", usage))
        elif key not in FAULT_KEYS:
            fix = did_you_mean(key, FAULT_KEYS) or f"keys are {', '.join(FAULT_KEYS)}"
            wrong.append((f"unknown key {key!r} in {text!r}", fix))
        elif key in seen:
            wrong.append((f"{key} is given twice in {text!r}", "keep one of them"))
        elif key == "phase" and value not in PHASES:
            wrong.append((f"unknown phase {value!r}", did_you_mean(value, PHASES) or f"phases are {', '.join(PHASES)}"))
        elif key != "phase" and not _is_count(value):
            wrong.append((f"{key} {value!r} in {text!r} is not a whole number of at least 0", ""))
        seen.add(key)
    return wrong


def _split_fault(text: str) -> tuple[str, list[str]]:
    """ "kill:rank=1,step=7" -> ("kill", ["rank=1", "step=7"]). A fault of the user's own has a colon in its name."""
    head, _, tail = text.rpartition(":")
    return (head, tail.split(",")) if "=" in tail and head else (text, [])


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 19


def _exists(key: str, kind: str, package: str, noun: str, foreign: str) -> list[Finding]:
    """Nothing if `kind` is a module of `package` or a well-formed name of the user's own."""
    if registry.is_foreign(kind):
        return [] if _is_foreign_name(kind) else [_finding(key, f"{kind!r} is not {foreign}")]
    known = _names(package)
    if not known or kind in known:
        return []
    fix = did_you_mean(kind, known) or f"{noun}s are {', '.join(known)}, or {foreign} for your own"
    return [_finding(key, f"unknown {noun} {kind!r}", fix)]


def _names(package: str) -> list[str]:
    """The kinds in a folder of ours; none if this installation lacks it, and then nothing can be said about a name."""
    try:
        found = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # not even the room that the folder would be in
        return []
    return registry.names(package) if found is not None else []


def _is_foreign_name(name: str) -> bool:
    module, _, attribute = name.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), *attribute.split(".")))


def _known_ranks(job: Job) -> int | None:
    """The number of ranks, where the job alone decides it."""
    parallel = job.parallel
    if parallel.ranks is None and parallel.dp_replicate is not None and parallel.dp_shard is not None:
        return parallel.dp_replicate * parallel.dp_shard
    return parallel.ranks


def _finding(key: str, what: str, fix: str = "") -> Finding:
    return Finding(_path(key), what, fix)


def _path(key: str) -> Path:
    return tuple(int(part) if part.isdecimal() else part for part in key.split("."))
