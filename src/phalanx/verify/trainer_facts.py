"""What the second loop computed, without its tensors, and what ranks observed of the trainer.
Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from phalanx.core.typed_json import JsonRecord

FACTS_FILE_NAME = "run.json"
WEIGHT, BUFFER, COPY, GRADIENT, STATE = "weight", "buffer", "copy", "gradient", "optim"
COMPRESSION = "compression"
"""Kinds of tensors: those of the model; COPY, what the optimizer updates, where that is other
memory; STATE is followed by the slot: optim/exp_avg. COMPRESSION/SLOT is what the compression of
gradients keeps, of which there is no second loop."""
BEFORE, UPDATE = "before", "update"
"""Kinds of sizes of trained weights: before a step, and of what it changed."""

REFUSAL = "refused_by_verify"
"""Why a guard of the judged run refuses a step."""

Dots = tuple[float, float, float, float]
"""Over the elements that a rank holds, with `a` the trainer's and `r` the second loop's tensor:
|a - r|^2, |a - b|^2, (a - b).(r - b), |r - b|^2. `b` is the weight a step before, and zero for
other kinds than weights."""


@dataclass(frozen=True)
class SecondLoopStep(JsonRecord):
    """A step of the second loop; see `PlainStep`. `sizes`: kind -> name -> norm of the tensor after
    the step, of a weight how far it is from where it began; of BEFORE and UPDATE as they say.
    `evaluated_sources`: name -> its loss."""

    step: int
    loss: float
    num_targets: int
    grad_norm: float
    rate: float
    skipped: str
    is_clipped: bool
    tokens_seen: int
    loss_scale: float
    evaluation: float | None
    evaluated_targets: int
    evaluated_sources: Mapping[str, float]
    sizes: Mapping[str, Mapping[str, float]]

    def scale(self, kind: str, name: str) -> float:
        """The size that errors of a tensor are relative to: its own, or a thousandth of a usual
        one's if more."""
        sizes = self.sizes.get(kind, {})
        if not sizes:
            return 1.0
        usual = _root_mean_square(sizes.values())
        return max(sizes.get(name, 0.0), 1e-3 * usual) or 1.0


@dataclass(frozen=True)
class SecondLoopRecord(JsonRecord):
    """The steps of the second loop. `max_norm`: what it clips to, None where the job clips nothing;
    `unused`: parameters that never had a gradient; `narrows`: the module computes in fewer digits
    than float64 on its way."""

    max_norm: float | None
    narrows: bool
    unused: tuple[str, ...]
    steps: tuple[SecondLoopStep, ...]

    def get_step_record(self, step: int) -> SecondLoopStep:
        """The record of a step, counted from 1."""
        return self.steps[step - 1]


@dataclass
class StateObservation(JsonRecord):
    """The state of one rank after `step` steps, beside the second loop's.

    `asked_step`: whose data the trainer asks for next; 0 after the last step.

    `tensors`: kind -> name -> Dots; `numbers`: name -> by how much a slot without dimensions is
    off; `left`: name -> norm of a gradient that is there although no step has begun; `left_loads`:
    router -> how many choices of experts are counted by then; `modes`: names of modules that are
    not in the mode in which they began. `compression`: COMPRESSION/SLOT/NAME ->
    how far what compression keeps is from what it kept after the same step in an earlier attempt,
    relative to that; empty where none has been there.
    """

    step: int
    counted_step: int
    tokens_seen: int
    samples_seen: int
    asked_step: int = 0
    tensors: dict[str, dict[str, Dots]] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    left: dict[str, float] = field(default_factory=dict)
    left_loads: dict[str, float] = field(default_factory=dict)
    modes: tuple[str, ...] = ()
    compression: dict[str, float] = field(default_factory=dict)


@dataclass
class StepObservation(JsonRecord):
    """One step of the trainer on one rank: what its guards saw, and what its optimizer was given.

    `num_updates`: how often the optimizer stepped; `rates`: learning rates of its groups;
    `gradients`: name -> Dots of what it was given.
    """

    step: int
    loss: float
    num_targets: int
    grad_norm: float
    reason: str
    loss_scale: float
    num_updates: int = 0
    rates: tuple[float, ...] = ()
    gradients: dict[str, Dots] = field(default_factory=dict)


@dataclass(frozen=True)
class RecordedStep(JsonRecord):
    """A step as a rank has recorded it; what is not finite is NaN."""

    step: int
    loss: float
    num_targets: int
    tokens_seen: int
    learning_rate: float
    grad_norm: float
    loss_scale: float
    step_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class RecordedSkip(JsonRecord):
    """A skipped step as rank 0 has recorded it."""

    step: int
    reason: str
    first_sample: int
    num_samples: int


@dataclass(frozen=True)
class RecordedNorms(JsonRecord):
    """The norms by block of a step as rank 0 has recorded them: block -> norm."""

    step: int
    gradients: Mapping[str, float]
    updates: Mapping[str, float]
    weights: Mapping[str, float]


@dataclass
class ReadCheckpoint(JsonRecord):
    """The newest checkpoint of a run, read whole by rank 0. `tensors`: kind -> name -> Dots of what
    was read, of a stack once as a whole and once element by element; `unequal`: stacks of which
    these are not the same; `missing`: names of the second loop that it does not have; `error`: why
    it cannot be read."""

    step: int = 0
    tensors: dict[str, dict[str, Dots]] = field(default_factory=dict)
    unequal: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    error: str = ""


@dataclass
class AttemptObservation(JsonRecord):
    """One attempt of a run on one rank.

    `name` says what it is, in words. `end`: why it ended, of the trainer. `evaluations`: step ->
    loss, of rank 0, as `evaluated_targets` of these, and `evaluated_sources`: step -> source ->
    loss. `recorded`: the steps on record, of this rank; `skips` and `norms`: of rank 0. `read`: the
    newest checkpoint that it has saved, read by rank 0; none of an attempt whose checkpoints others
    read. `error`: what all ranks raised alike. `held`: name -> the part of it that the rank has.
    `why_not_repeated`: why the trainer does not repeat a step that was not finite; empty if it
    does. `num_linked_bytes`: of rank 0, how many bytes of the checkpoint of LINKED_STEP were not
    written for it. `saved_infinite_weight`: a weight of which an element was made infinite behind
    the last step, if the state could be saved all the same. `saved`: of rank 0, the steps that the
    run has saved by its end where it is resumed elsewhere, the newest first; `was_held_too_long`: a
    save was written before another was due, which therefore did not wait for it.
    """

    name: str
    first_step: int
    end: str = ""
    error: str = ""
    held: dict[str, str] = field(default_factory=dict)
    states: tuple[StateObservation, ...] = ()
    steps: tuple[StepObservation, ...] = ()
    evaluations: dict[str, float] = field(default_factory=dict)
    evaluated_targets: dict[str, int] = field(default_factory=dict)
    evaluated_sources: dict[str, dict[str, float]] = field(default_factory=dict)
    recorded: tuple[RecordedStep, ...] = ()
    skips: tuple[RecordedSkip, ...] = ()
    norms: tuple[RecordedNorms, ...] = ()
    read: tuple[ReadCheckpoint, ...] = ()
    checkpoints: tuple[int, ...] = ()
    why_not_repeated: str = ""
    num_linked_bytes: int = 0
    saved_infinite_weight: str = ""
    saved: tuple[int, ...] = ()
    was_held_too_long: bool = False


def _root_mean_square(sizes: Iterable[float]) -> float:
    values = list(sizes)
    return math.sqrt(sum(size**2 for size in values) / len(values))
