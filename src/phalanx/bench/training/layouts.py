"""The job of a comparison, and phalanx's plan of it for each layout by name. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.bench.training.contenders import Contender
from phalanx.core.cores import count_allowed_cores
from phalanx.core.errors import LayoutError, UsageError, format_nearest_word_hint
from phalanx.job.schema import Job
from phalanx.job.schema import Parallel as ParallelSection
from phalanx.plan.plan import Plan
from phalanx.run.plan_job import plan_job

JOB_LAYOUT = "job"
"""The layout that the job itself asks for."""
GLOO_SUFFIX = "/gloo"
DEFAULT_LAYOUTS = "ddp,zero1,zero2,zero3,tp"
MAX_RANKS = 8
COMPARED_PRECISIONS = ("fp32", "bf16")
# What libraries do not have, or what is not training: keys, and what they are set to.
CHANGED_KEYS: dict[str, dict[str, Any]] = {
    # All begin with the same random weights.
    "model": {"init_from": None},
    "train": {"compile": False, "recompute": "none", "offload_activations": False},
    "optim": {"schedule": "constant", "warmup_steps": 0, "lr_scaling": "none"},
    "checkpoint": {
        "at_end": False,
        "every_steps": None,
        "every_minutes": None,
        "every": None,
        "mtbf_hours": None,
    },
    "eval": {"every_steps": None, "tokens": 0, "keep_best": False},
    "observe": {"sinks": [], "trace_steps": [], "profile_steps": []},
    "resilience": {"inject": []},
}
# Only these are said: of the others nobody expects anything in a comparison.
_SAID_SECTIONS = ("model", "train", "optim")
# Without a warm-up larger rates let differences of rounding grow tenfold every few steps, and then
# equal losses would show nothing.
MAX_LEARNING_RATE = 1e-4
# More than a comparison takes: ranks are ended between two steps.
_ENDLESS_STEPS = 1_000_000


@dataclass(frozen=True)
class ComparedJob:
    """The job that all contenders train, on `num_ranks` ranks of this machine's CPUs.

    `plan`: of data parallelism alone, whose microbatches and rate libraries take. `notes`: what of
    the job was changed.
    """

    job: Job
    num_ranks: int
    plan: Plan
    notes: tuple[str, ...]

    def plan_layout(self, layout: str) -> tuple[Job, Plan]:
        """The job in `layout`, and its plan.

        Raises UsageError for a name that is none, and LayoutError where the layout does not fit.
        """
        return _plan_layout(self.job, layout, self.num_ranks)

    def plan_contender(self, contender: Contender) -> tuple[Job, Plan]:
        """The job and the plan of what `contender` trains. Raises as `plan_layout` does."""
        if contender.loop != "phalanx_layout":
            return self.job, self.plan
        return self.plan_layout(contender.variant)


def make_compared_job(job: Job, num_ranks: int | None) -> ComparedJob:
    """The job as it is compared on `num_ranks` ranks (None: those of the job, else as many as there
    are cores, 2 to MAX_RANKS).

    Raises UsageError for what cannot be compared.
    """
    _require_comparable(job)
    num_ranks = num_ranks or job.parallel.ranks
    if num_ranks is None:
        num_ranks = max(2, min(MAX_RANKS, count_allowed_cores()))
    if num_ranks < 2:
        raise UsageError("one rank has nobody to talk to", fix="--ranks 2, say")
    if job.train.global_batch_size % num_ranks:
        raise UsageError(
            f"train.global_batch_size={job.train.global_batch_size} has no whole share for each of"
            f" {num_ranks} ranks",
            fix=f"train.global_batch_size={2 * num_ranks}, say",
        )
    body = job.to_json()
    notes = []
    for section, keys in CHANGED_KEYS.items():
        for key, value in keys.items():
            if section in _SAID_SECTIONS and body[section][key] not in (value, None):
                notes.append(f"{section}.{key}={json.dumps(value)}")
            body[section][key] = value
    if job.optim.lr == "auto" or job.optim.lr > MAX_LEARNING_RATE:
        body["optim"]["lr"] = MAX_LEARNING_RATE
        notes.append(f"optim.lr={MAX_LEARNING_RATE:g}")
    body["train"] |= {"steps": _ENDLESS_STEPS, "sample_tokens": 0}
    body["cluster"] = {"device": "cpu"}
    compared = Job.model_validate_json(json.dumps(body))
    plan = _plan_layout(compared, "ddp", num_ranks)[1]
    if plan.precision not in COMPARED_PRECISIONS:
        raise UsageError(
            f"precision.compute={plan.precision} is not compared",
            fix=f"one of {', '.join(COMPARED_PRECISIONS)}",
        )
    return ComparedJob(compared, num_ranks, plan, tuple(notes))


def _require_comparable(job: Job) -> None:
    if job.model.is_foreign:
        raise UsageError(
            f"model.kind={job.model.kind} is not compared: the models of phalanx are",
            fix="leave model.kind out, or give model.preset",
        )
    if job.optim.kind != "adamw":
        raise UsageError(
            f"optim.kind={job.optim.kind} is not compared: all contenders train with AdamW"
        )
    if job.cluster.device == "cuda":
        raise UsageError("contenders are compared on CPUs", fix="cluster.device=cpu")


def parse_layouts(text: str, num_ranks: int) -> list[str]:
    """The names in `--layouts`, each once. Raises UsageError."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    if names == ["none"]:
        return []
    known = list(_map_layouts_to_axes(num_ranks))
    for name in names:
        if name.removesuffix(GLOO_SUFFIX) not in (*known, JOB_LAYOUT):
            hint = format_nearest_word_hint(name, [*known, JOB_LAYOUT])
            raise UsageError(
                f"--layouts: {name!r} is none",
                fix=hint or f"some of {', '.join((*known, JOB_LAYOUT))}; zero3{GLOO_SUFFIX}, say",
            )
    return names


def _map_layouts_to_axes(num_ranks: int) -> dict[str, dict[str, Any]]:
    return {
        "ddp": {"dp_replicate": num_ranks},
        "zero1": {"dp_shard": num_ranks, "zero_stage": 1},
        "zero2": {"dp_shard": num_ranks, "zero_stage": 2},
        "zero3": {"dp_shard": num_ranks, "zero_stage": 3},
        "tp": {"tp": num_ranks},
        "cp": {"cp": num_ranks},
        "ep": {"dp_shard": num_ranks, "ep": num_ranks},
        "pp": {"pp": num_ranks},
    }


# A layout by name has these as it says, and what else the job says of [parallel].
_AXES = ("dp_replicate", "dp_shard", "zero_stage", "tp", "cp", "ep", "pp")


def _plan_layout(job: Job, layout: str, num_ranks: int) -> tuple[Job, Plan]:
    name = layout.removesuffix(GLOO_SUFFIX)
    body = job.to_json()
    if name != JOB_LAYOUT:
        defaults = ParallelSection().model_dump(mode="json")
        body["parallel"] |= {axis: defaults[axis] for axis in _AXES}
        body["parallel"] |= _map_layouts_to_axes(num_ranks)[name]
    body["parallel"]["ranks"] = num_ranks
    if layout.endswith(GLOO_SUFFIX):
        body["parallel"]["collectives"] = "gloo"
    laid_out = Job.model_validate_json(json.dumps(body))
    return laid_out, plan_job(laid_out, checks_initial=False).plan


def select_contenders_with_plan(
    compared: ComparedJob, contenders: Sequence[Contender], *, may_leave_out: bool
) -> tuple[list[Contender], dict[str, str]]:
    """(the contenders whose layout fits the job, name -> why it does not).

    Raises LayoutError for the first that does not fit, unless `may_leave_out`.
    """
    fitting, refused = [], {}
    for contender in contenders:
        try:
            compared.plan_contender(contender)
        except LayoutError as error:
            if not may_leave_out:
                raise
            refused[contender.name] = str(error)
        else:
            fitting.append(contender)
    return fitting, refused
