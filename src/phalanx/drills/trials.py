"""The manifest of a drill: which fault strikes which rank at which step and phase, drawn from a
seed."""

from __future__ import annotations

import dataclasses
import importlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.core.errors import UsageError, format_nearest_word_hint
from phalanx.core.registry import list_modules_of_registry
from phalanx.core.typed_json import JsonRecord
from phalanx.drills.stages import find_reason_against_stage
from phalanx.resilience.expectation import Expectation
from phalanx.resilience.fault import FAULTS_PACKAGE

FIRST_FAULTS = ("kill", "crash", "freeze", "preempt")
"""Those of a drill that names none."""
ALL_FAULTS = "all"
WARM_UP_STEPS = 5
"""Before them no fault strikes: the usual step is not known yet."""


@dataclass(frozen=True)
class FaultFacts:
    """A fault of the folder: `summary` is the first sentence of its file, `why_not` the reason why
    it cannot run here ("": it can)."""

    name: str
    summary: str
    expectation: Expectation
    why_not: str = ""


@dataclass(frozen=True)
class TrialPlace(JsonRecord):
    """The place at which a fault strikes."""

    rank: int
    step: int
    phase: str


@dataclass(frozen=True)
class Trial:
    """One fault in one run. `inject` are the texts of resilience.inject."""

    fault: str
    seed: int
    repeat: int
    place: TrialPlace
    inject: tuple[str, ...]

    @property
    def key(self) -> tuple[str, int, int]:
        return (self.fault, self.seed, self.repeat)


@dataclass(frozen=True)
class DrillShape:
    """The range that trials are drawn from: ranks, steps, and steps from save to save; and what of
    the job decides whether a fault fits it.

    `num_replicas`: ranks that update the same block of a weight, of the block with fewest (None:
    all ranks). `checks_memory`: each rank compares its memory with what it was, in each step.
    `has_one_group`: all collectives of training are of all ranks. `layout`: in words.
    """

    num_ranks: int
    num_steps: int
    save_every_steps: int
    num_replicas: int | None = None
    checks_memory: bool = False
    has_one_group: bool = True
    layout: str = ""

    def count_replicas(self) -> int:
        """`num_replicas`, in figures."""
        return self.num_ranks if self.num_replicas is None else self.num_replicas


def list_faults() -> list[FaultFacts]:
    """All faults of the folder, by name, with what is missing here."""
    return [load_fault(name) for name in list_modules_of_registry(FAULTS_PACKAGE)]


def load_fault(name: str) -> FaultFacts:
    """The facts of one fault. Raises UsageError for one that there is not."""
    known = list_modules_of_registry(FAULTS_PACKAGE)
    if name not in known:
        raise UsageError(
            f"no fault {name!r}",
            fix=format_nearest_word_hint(name, known) or f"faults are {', '.join(known)}",
        )
    module = importlib.import_module(f"{FAULTS_PACKAGE}.{name}")
    expectation: Expectation = module.EXPECTATION
    summary = " ".join((module.__doc__ or "").split())
    return FaultFacts(name, summary, expectation, find_reason_against_stage(expectation.stage))


def choose_fault_names(words: Sequence[str]) -> tuple[str, ...]:
    """The faults that words of a command line name, each once; `all` is all of them."""
    names: list[str] = []
    for word in words or FIRST_FAULTS:
        if word == ALL_FAULTS:
            names += [fault.name for fault in list_faults()]
        else:
            names.append(load_fault(word).name)
    return tuple(dict.fromkeys(names))


def draw_trials(names: Sequence[str], shape: DrillShape, *, seed: int, repeats: int) -> list[Trial]:
    """The trials of a seed: the same for the same arguments, whatever other faults there are.

    Raises UsageError where the run is too short for a fault to strike and be recovered from.
    """
    trials = []
    for repeat in range(repeats):
        for name in names:
            expectation = load_fault(name).expectation
            first = 1 + max(
                WARM_UP_STEPS,
                expectation.warm_up_steps,
                shape.save_every_steps * expectation.needs_saves,
            )
            dice = random.Random(f"{name} {seed} {repeat}")
            last = shape.num_steps - shape.save_every_steps // 2 - expectation.settling_steps
            if last < first or shape.num_ranks < 2:
                raise UsageError(
                    f"{name} needs two ranks and {first + shape.num_steps - last} steps or more",
                    fix="give --steps 40, or parallel.ranks=2",
                )
            step = dice.randint(first, last)
            if expectation.strikes_at_saves:
                step = shape.save_every_steps * dice.randint(
                    1, (shape.num_steps - 1) // shape.save_every_steps
                )
            trial_place = TrialPlace(
                dice.randrange(shape.num_ranks), step, dice.choice(expectation.phases)
            )
            trials.append(
                Trial(name, seed, repeat, trial_place, write_inject_texts(name, trial_place, shape))
            )
    return trials


def write_inject_texts(name: str, trial_place: TrialPlace, shape: DrillShape) -> tuple[str, ...]:
    """The texts of resilience.inject for a fault at a place, and for those that come with it."""
    where = dataclasses.asdict(trial_place) | {"other": (trial_place.rank + 1) % shape.num_ranks}
    also = load_fault(name).expectation.also
    main = "{name}:rank={rank},step={step},phase={phase}"
    return tuple(text.format(name=name, **where) for text in (main, *also))
