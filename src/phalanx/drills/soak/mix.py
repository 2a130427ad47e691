"""The faults of a soak: which of them can be mixed in one run, and where each strike of a seed
falls."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.core.errors import UsageError
from phalanx.core.typed_json import JsonRecord
from phalanx.core.units import format_seconds
from phalanx.drills.trials import (
    ALL_FAULTS,
    DrillShape,
    FaultFacts,
    TrialPlace,
    list_faults,
    load_fault,
    write_inject_texts,
)
from phalanx.resilience.checkpoint_damage import EXPECTATION as CHECKPOINT_DAMAGE
from phalanx.resilience.expectation import Ending, Expectation

FAILED_SAVE = "save failed"
_MIN_GAP_STEPS = 40
_JITTER = 0.25


@dataclass(frozen=True)
class FaultLeftOut(JsonRecord):
    """A fault that a mix has not, and why."""

    fault: str
    why: str


@dataclass(frozen=True)
class FaultMix:
    """The faults of a soak by name, and those that it leaves out."""

    faults: tuple[str, ...]
    left_out: tuple[FaultLeftOut, ...] = ()

    def list_overrides(self) -> list[str]:
        """The keys of the job that its faults need, each once."""
        texts = [text for name in self.faults for text in load_fault(name).expectation.overrides]
        return list(dict.fromkeys(texts))

    @property
    def min_gap_steps(self) -> int:
        """Least steps from the middle of one fault to that of the next: a quarter of them follows
        on the last one, and must settle it."""
        settling = [load_fault(name).expectation.settling_steps for name in self.faults]
        return max(_MIN_GAP_STEPS, math.ceil(max(settling, default=0) / _JITTER))


@dataclass(frozen=True)
class PlannedStrike(JsonRecord):
    """One fault of a soak and its place. `inject` are the texts of resilience.inject."""

    fault: str
    place: TrialPlace
    inject: tuple[str, ...]


def choose_mix(words: Sequence[str], fault_every_s: float) -> FaultMix:
    """The faults that words of a command line name; without any, or with `all`, those of the folder
    that fit into any job.

    Raises UsageError for one that cannot be among others.
    """
    shortest_gap_s = fault_every_s * (1 - 2 * _JITTER)
    names: list[str] = []
    left_out: list[FaultLeftOut] = []
    for word in words or (ALL_FAULTS,):
        if word == ALL_FAULTS:
            for fault in list_faults():
                why = find_reason_against_mixing(fault, shortest_gap_s)
                overrides = fault.expectation.overrides
                if not why and overrides:
                    why = f"needs {', '.join(overrides)}; name it to have it in the mix"
                if why:
                    left_out.append(FaultLeftOut(fault.name, why))
                else:
                    names.append(fault.name)
        else:
            fault = load_fault(word)
            if why := find_reason_against_mixing(fault, shortest_gap_s):
                raise UsageError(f"{word} cannot be one of many faults in a run", why=why)
            names.append(word)
    return FaultMix(
        tuple(dict.fromkeys(names)),
        tuple(each for each in left_out if each.fault not in names),
    )


def find_reason_against_mixing(fault: FaultFacts, shortest_gap_s: float) -> str:
    """Why a fault cannot be one of many in a run, the next of which may strike after
    `shortest_gap_s` seconds; "" if it can."""
    expectation = fault.expectation
    if expectation.ending is Ending.STOPS:
        return "the run ends with it"
    if expectation.ending is Ending.RESUMES:
        return "the run ends with it, and goes on with --resume: not by itself"
    if not expectation.is_bit_equal:
        return "final weights differ after it"
    if expectation.verdict == CHECKPOINT_DAMAGE.verdict:
        return "it leaves a damaged checkpoint behind, and no checkpoint of a soak may be one"
    if expectation.stage:
        return "needs a stage of its own around the run"
    if expectation.verdict == FAILED_SAVE and not expectation.strikes_at_saves:
        return "it is found at a save, and those of a soak are too rare for its bar"
    if any("attempt=" in text for text in expectation.also):
        return "its second fault strikes in one attempt only, which is another one in each soak"
    if expectation.lasts_s > shortest_gap_s:
        return (
            f"goes on for {format_seconds(expectation.lasts_s)}, and the next fault may strike"
            f" after {format_seconds(shortest_gap_s)}"
        )
    return fault.why_not


def draw_strikes(
    faults: Sequence[str], shape: DrillShape, *, gap_steps: int, seed: int
) -> list[PlannedStrike]:
    """One strike for each `gap_steps` steps of the run, in their order: somewhere in the middle
    half of them, or at a save where the fault strikes at saves.

    All faults come once, in an order of the seed, before one comes again.
    """
    dice = random.Random(f"soak {seed}")
    deck: list[str] = []
    strikes = []
    for number in range(shape.num_steps // gap_steps):
        if not deck:
            deck = dice.sample(faults, len(faults))
        name = deck.pop()
        expectation = load_fault(name).expectation
        offset = 0.5 + dice.uniform(-_JITTER, _JITTER)
        step = _move_to_save(round((number + offset) * gap_steps), expectation, shape)
        place = TrialPlace(dice.randrange(shape.num_ranks), step, dice.choice(expectation.phases))
        strikes.append(PlannedStrike(name, place, write_inject_texts(name, place, shape)))
    return strikes


def _move_to_save(step: int, expectation: Expectation, shape: DrillShape) -> int:
    """`step`, or the one nearest to it in which a fault that strikes at saves can strike."""
    if not expectation.strikes_at_saves:
        return step
    save_interval = shape.save_every_steps
    return max(round(step / save_interval), 1) * save_interval
