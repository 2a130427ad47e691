"""The runs through the trainer that a model is judged in: which layouts, which job, which steps are
what. Torch-free."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.core.typed_json import JsonObject
from phalanx.job.costs import ModelCosts
from phalanx.job.schema import Job
from phalanx.plan.cluster import Cluster
from phalanx.plan.layout import Layout
from phalanx.plan.plan import LossScaling, Plan
from phalanx.verify.cases import TRAINER_ROW_PREFIX as PREFIX
from phalanx.verify.cases import Case, plan_layout_cases

PLAIN_LOOP_OPTIMIZERS = ("adamw", "sgd")
"""The optimizers that `verify/plain/training.py` has written out."""
NUM_STEPS = 10
WSD_DECAY_FRACTION = 0.23
WARMUP_STEPS = 2
# Good steps, of which the last finds what a skipped one left, follow each of both.
OVERFLOW_STEP, NO_TARGETS_STEP = 4, 7
REPEATED_STEP = 8
"""Not finite the first time that it is computed, and good when it is computed again."""
INFINITE_LOSS_STEP = 9
"""Its loss is infinite, and its gradients are not."""
REFUSED_STEP = 3
"""A good step that a guard refuses: it must be skipped as one that is not finite is."""
UNMASKED_STEP = 5
"""No target of the step is masked, and all are the same one: they pull together, so that its
gradients are larger than those of other steps, and are clipped."""
HALF_MASKED_STEP = 2
"""The step in which the second half of the batch has no target: whole microbatches have none."""
SAVE_EVERY, STOP_STEP = 3, 5
"""Step 3 is saved in the background, step 5 at a stop."""
LINKED_STEP = NO_TARGETS_STEP
"""The resumed run saves each of its steps; nothing has changed in the one that is skipped, so that
its checkpoint may link all files of the one before."""
SAME_LAYOUT = "resumed in the same layout"
BACKGROUND_EVERY = 4
POSTPONED_STEP = 2 * BACKGROUND_EVERY + 1
"""The run that is resumed elsewhere saves in a folder of its own: step 4 in the background, where
writing is held back until step 8 is done, whose save is due then and waits for that; step 9 in its
place, with the memory of the first save; and the last step, as a run does at its end."""
NORMS_EVERY = 2
"""Norms by block are measured in each second step, from the first on."""
LINKED_CHECKPOINT = "resumed from a checkpoint that may link files of the one before"
EVAL_EVERY = 3
EVALUATED_STEPS = frozenset((3, 6, 9, 10))
# Squares of such gradients are infinite, while the gradients are not.
OVERFLOW_FACTOR = 1e200
UNCLIPPED_STEP, UNCLIPPED_FACTOR = NUM_STEPS, 64.0
"""Where a job clips nothing, gradients of the last step are so many times as large: what clips
them all the same shows. No later step has the weights that such a step makes."""
TEST_LOSS_SCALING = LossScaling(initial=1024.0, growth_steps=2)


@dataclass(frozen=True)
class TrainerCase:
    """A run in the layout of `plan`: stopped after STOP_STEP and resumed in it, and resumed from
    the first checkpoint in the layout of `other_plan`."""

    name: str
    parallel: JsonObject
    plan: Plan
    other_name: str
    other_plan: Plan

    @property
    def has_other_layout(self) -> bool:
        """False if both layouts are the same one."""
        return self.other_plan.parallel != self.plan.parallel

    def without_other_layout(self) -> TrainerCase:
        """The case whose first checkpoint its own layout resumes."""
        own_name = self.name.removeprefix(PREFIX)
        return replace(self, other_name=own_name, other_plan=self.plan)


def list_trainer_layouts(
    num_ranks: int, *, experts: bool = False
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Layouts of `num_ranks` ranks in which the trainer is judged: one for each way in which its
    state lies in ranks; with `experts` those that spread them, too. A run is resumed in its own and
    in the next one of them."""
    if num_ranks == 1:
        yield "one", {}
        return
    yield "ddp", {"dp_replicate": num_ranks}
    yield "zero3", {"dp_shard": num_ranks, "zero_stage": 3}
    if experts and num_ranks % 2 == 0:
        yield "zero3-ep2", {"dp_shard": num_ranks, "zero_stage": 3, "ep": 2}
    rest = num_ranks // 2
    other_degrees: dict[str, Any] = {}
    if rest > 1:
        other_degrees = {"dp_shard": rest, "zero_stage": 3}
    infix = "-zero3" if other_degrees else ""
    if num_ranks % 2 == 0:
        yield f"tp2{infix}", {**other_degrees, "tp": 2}
    if num_ranks % 2 == 0 and rest > 1:
        yield f"hsdp2x{rest}-zero3", {"dp_replicate": 2, **other_degrees}
    yield "zero1", {"dp_shard": num_ranks, "zero_stage": 1}
    if num_ranks % 2 == 0:
        yield f"pp2{infix}-1f1b", {**other_degrees, "pp": 2, "schedule": "1f1b"}
    yield (
        "zero1-offload-optimizer",
        {
            "dp_shard": num_ranks,
            "zero_stage": 1,
            "offload": "optimizer",
        },
    )


def list_resumed_layouts(
    num_ranks: int, *, experts: bool = False
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Layouts without a row of their own in which runs of other ones are resumed, and saved: copies
    of what tp or ep cuts, of which each block is written by one of its holders."""
    if num_ranks % 2:
        return
    if num_ranks > 2:
        yield "ddp-tp2", {"dp_replicate": num_ranks // 2, "tp": 2}
    if experts:
        yield "ddp-ep2", {"ep": 2}


def has_trainer_row_of_combination(layout: Layout, zero_stage: int) -> bool:
    """True if a layout of as many ranks in which the trainer is judged has the same axes together,
    and holds state in ranks of data parallelism in the same way."""
    num_ranks = layout.world_size
    own_degrees = {axis: getattr(layout, axis) for axis in _STATE_AXES}
    own = _describe_state(own_degrees, zero_stage, num_ranks)
    return any(
        own == _describe_state(degrees, degrees.get("zero_stage", 0), num_ranks)
        for listed in (list_trainer_layouts, list_resumed_layouts)
        for _, degrees in listed(num_ranks, experts=True)
    )


def _describe_state(
    degrees: Mapping[str, Any], zero_stage: int, num_ranks: int
) -> tuple[frozenset[str], bool, bool]:
    """Along which axes state is copied or cut, and whether the optimizer's state and weights are
    cut by data parallelism. Whole copies are one axis, whatever ep folds over."""
    used = {axis for axis in _STATE_AXES if degrees.get(axis, 1) > 1}
    if not zero_stage and used & {"dp_shard", "ep"}:
        used -= {"dp_shard"}
        share = math.prod(degrees.get(axis, 1) for axis in ("pp", "tp", "cp", "ep"))
        used |= {"dp_replicate"} if num_ranks > share else set()
    return frozenset(used), zero_stage in (1, 2), zero_stage == 3


def list_axes_without_trainer_row(layout: Layout) -> list[str]:
    """The axes of a layout that no layout of as many ranks has in which the trainer is judged;
    dp_replicate and dp_shard together are one of them."""
    in_rows: set[str] = set()
    for _, degrees in list_trainer_layouts(layout.world_size, experts=True):
        in_rows |= _list_used_axes({axis: degrees.get(axis, 1) for axis in _STATE_AXES})
    used = _list_used_axes({axis: getattr(layout, axis) for axis in _STATE_AXES})
    return [axis for axis in (*_STATE_AXES, _HSDP) if axis in used - in_rows]


# Along which state is copied or cut.
_STATE_AXES = ("dp_replicate", "dp_shard", "cp", "tp", "ep", "pp")
_HSDP = "dp_replicate with dp_shard"


def _list_used_axes(degrees: Mapping[str, int]) -> set[str]:
    used = {axis for axis, degree in degrees.items() if degree > 1}
    if {"dp_replicate", "dp_shard"} <= used:
        used.add(_HSDP)
    return used


LOSS_SCALE_VARIANT = "loss-scale"
# Keeps what it did not send, as all lossy compressions do, and a matrix besides.
COMPRESSION_VARIANT = "ddp-powersgd"


def list_trainer_case_names(num_ranks: int, *, experts: bool = False) -> list[str]:
    """Names of all cases of so many ranks; with `experts` those of layouts that spread them."""
    names = [PREFIX + name for name, _ in list_trainer_layouts(num_ranks, experts=experts)]
    names.append(PREFIX + LOSS_SCALE_VARIANT)
    if num_ranks > 1:
        names.append(PREFIX + COMPRESSION_VARIANT)
    return names


def make_trainer_job(job: Job) -> Job:
    """The verified job as a run of NUM_STEPS steps, in which every phase of the schedule is
    passed."""
    body = job.to_json()
    body["train"]["steps"] = NUM_STEPS
    # In steps no whole number: one rounded up is another one.
    body["optim"]["decay_fraction"] = WSD_DECAY_FRACTION
    body["optim"]["warmup_steps"] = WARMUP_STEPS
    body["observe"]["norms_every"] = NORMS_EVERY
    body["eval"] |= {"every_steps": EVAL_EVERY, "keep_best": False, "metric": "loss", "mode": None}
    body["checkpoint"] |= {
        "every_steps": SAVE_EVERY,
        "every_minutes": None,
        "every": None,
        "mtbf_hours": None,
        "at_end": False,
        "asynchronous": True,
        "keep_last": None,
        "keep_every": None,
        "url": None,
    }
    body["resilience"] |= {"max_skipped_steps": 10, "inject": ()}
    return Job.model_validate_json(json.dumps(body))


CLIPPING = "clipping"
REPEATED_STEPS = "a step that is repeated, not finite the first time alone"
RECORDED_STEPS = "what is recorded of steps: loss, targets, tokens, rate, norm, loss scale"
RECORDED_GRADIENT_NORMS = "recorded norms of gradients by block"
RECORDED_UPDATE_NORMS = "recorded norms of updates and weights by block"
JUDGED_PARTS = (
    "learning rates",
    CLIPPING,
    "skipped steps, and one that a guard refuses",
    REPEATED_STEPS,
    "weights and optimizer state after each step",
    "evaluations",
    "a checkpoint saved in the background, and one at a stop",
    "a second checkpoint saved in the background",
    "a save at the end of a run",
    "a run resumed in the same layout",
    "weights of the run's newest checkpoint, read as exports do",
    "that weights which are not finite are not saved",
    RECORDED_STEPS,
    RECORDED_GRADIENT_NORMS,
    RECORDED_UPDATE_NORMS,
)
POSTPONED_SAVE = "a save that is due while another is in flight"
LINKED_FILES = "a checkpoint whose files are linked from the one before"
RESUMED_ELSEWHERE = "a run resumed in another layout"
NOT_JUDGED_PARTS = (
    "metrics of an own objective, the best step",
    "saves by the clock, to a store, and which checkpoints are kept",
    "runs resumed on another number of ranks, from an older checkpoint, or from ranks' memory",
    "random draws other than dropout's",
    "seconds, bytes and memory on record",
    "checksums of a checkpoint's file beyond its first 4 MiB",
    "runs in other types than float64",
    "what a run does where it finds corruption, but for going on where there is none",
    "the job's own train.steps, optim.warmup_steps and decay_fraction, observe.norms_every,"
    " resilience.max_skipped_steps, eval.* and checkpoint.*: rows of the trainer have their own",
)


def choose_step_factors(job: Job, plan: Plan) -> dict[int, float]:
    """Step -> what its gradients are multiplied by."""
    # A stage adds its balance loss itself: what is done to the loss does not reach that.
    has_balance_loss = getattr(plan.model_shape, "balance_loss", 0.0) > 0
    if job.optim.clip_norm is not None or has_balance_loss:
        return {}
    return {UNCLIPPED_STEP: UNCLIPPED_FACTOR}


def choose_row_loss_scaling(job: Job) -> LossScaling:
    """How the row with a loss scale multiplies the loss: by the job's own number where it asks for
    a fixed one; else by one that adapts within the steps of the run."""
    scale = job.precision.loss_scale
    if scale == "dynamic":
        return TEST_LOSS_SCALING
    return LossScaling(scale)


def list_replaced_scale_numbers(job: Job) -> tuple[str, ...]:
    """Lines on the job's own numbers that the row with a loss scale does not have."""
    if job.precision.loss_scale != "dynamic":
        return ()
    scaling = choose_row_loss_scaling(job)
    return (
        "precision.loss_scale_initial and loss_scale_growth_steps of the job: this row's scale"
        f" begins at {scaling.initial:g} and doubles after {scaling.growth_steps} good steps",
    )


def explain_no_trainer_run(job: Job) -> str:
    """Why no run of the job is judged; empty if runs are."""
    if job.optim.kind in PLAIN_LOOP_OPTIMIZERS:
        return ""
    return (
        f"optim.kind={job.optim.kind} is not written out a second time:"
        f" {' and '.join(PLAIN_LOOP_OPTIMIZERS)} are"
    )


def make_trainer_cases(
    job: Job, *, num_ranks: int, cluster: Cluster, shape: ModelCosts | None
) -> list[TrainerCase | Case]:
    """A case for each layout that the model fits; else the refused Case, with its reason.

    `job` is one of `make_trainer_job`.
    """
    planned: list[Case] = []
    cases: list[TrainerCase | Case] = []
    # Of a model without experts the plan refuses what spreads them.
    layouts = list(list_trainer_layouts(num_ranks, experts=True))

    def plan_cases(layouts: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Case]:
        return plan_layout_cases(job, layouts, num_ranks=num_ranks, cluster=cluster, shape=shape)

    for case in plan_cases(layouts):
        if case.plan is None:
            cases.append(replace(case, name=PREFIX + case.name))
        else:
            planned.append(case)
    resumed = plan_cases(list(list_resumed_layouts(num_ranks, experts=True)))
    only_resumed = {case.name: case for case in resumed if case.plan is not None}
    for index, case in enumerate(planned):
        other = planned[(index + 1) % len(planned)]
        if index == len(planned) - 1:
            other = only_resumed.get("ddp-ep2", other)
        assert case.plan is not None
        assert other.plan is not None
        cases.append(
            TrainerCase(PREFIX + case.name, dict(case.parallel), case.plan, other.name, other.plan)
        )
    if planned:
        other = only_resumed.get("ddp-tp2", planned[min(1, len(planned) - 1)])
        cases.append(_make_loss_scale_case(planned[0], other, choose_row_loss_scaling(job)))
    if num_ranks > 1:
        compressed = {"dp_replicate": num_ranks, "compress": "powersgd"}
        cases += [
            _make_compression_case(case) for case in plan_cases([(COMPRESSION_VARIANT, compressed)])
        ]
    return cases


def make_named_trainer_cases(
    job: Job,
    names: Sequence[str],
    *,
    num_ranks: int,
    cluster: Cluster,
    shape: ModelCosts | None,
) -> list[Case]:
    """The cases of `names`; of a verified job."""
    if not names:
        return []
    runs: list[Case] = []
    job = make_trainer_job(job)
    for case in make_trainer_cases(job, num_ranks=num_ranks, cluster=cluster, shape=shape):
        if case.name not in names:
            continue
        if isinstance(case, TrainerCase):
            case = Case(
                case.name,
                case.parallel,
                case.plan,
                other_name=case.other_name,
                other_plan=case.other_plan,
            )
        runs.append(case)
    return runs


def _make_loss_scale_case(case: Case, other: Case, scaling: LossScaling) -> TrainerCase:
    """The layout of `case` with a loss that is scaled as in fp16, resumed in that of `other`."""
    assert case.plan is not None
    assert other.plan is not None
    return TrainerCase(
        PREFIX + LOSS_SCALE_VARIANT,
        dict(case.parallel),
        replace(case.plan, loss_scaling=scaling),
        other.name,
        replace(other.plan, loss_scaling=scaling),
    )


def _make_compression_case(case: Case) -> TrainerCase | Case:
    """A layout with compressed gradients, which no other one resumes: it is resumed in itself, from
    the checkpoint at the stop and from the one in the background."""
    if case.plan is None:
        return replace(case, name=PREFIX + case.name)
    return TrainerCase(PREFIX + case.name, dict(case.parallel), case.plan, case.name, case.plan)
