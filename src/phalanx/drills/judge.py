"""A trial beside its bars: what was measured, what was asked for, and whether that is met."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.core.typed_json import JsonRecord
from phalanx.core.units import format_seconds
from phalanx.drills.fits import can_name_rank
from phalanx.drills.trials import DrillShape
from phalanx.resilience.expectation import HANG_DETECTION, Ending, Expectation

HANG_FLOOR_S = 5.0
HANG_STEPS = 10.0


@dataclass(frozen=True)
class Measured(JsonRecord):
    """Measurements of a run that met a fault. None: it did not come to that.

    `verdict` and `ranks`: of the first verdict after the fault. `false_verdicts`: verdicts before
    it, and of other classes when it was over. `exit_codes`: of the run, and of `--resume` where it
    was asked for. `num_left`: processes that were left behind. `goodput`: the share of the ranks'
    time in steps that stand. `said`: what the command said of that which it was to say
    (`Bars.says`). `num_restarts`: how often ranks started again or went back (of a shared run: in
    the trial's part), None in lines of earlier releases; `needless_restarts`: those of them that
    the fault did not ask for. `num_starved`: how often a rank was called slow because other
    processes had the processors, by the kernel's count: no false verdict. `load`: threads of the
    machine that ran or wanted to while the run went on, in the mean, those of the run among them
    (None: not known, as in lines of earlier releases). `samples`: what the ledger of samples says
    ("": it was not asked). `loss_difference`: the largest difference of a step's loss from that of
    the undisturbed run, as a part of it (None: steps are missing).
    """

    has_struck: bool
    verdict: str
    verdict_text: str
    ranks: tuple[int, ...]
    detected_s: float | None
    detected_steps: int | None
    false_verdicts: tuple[str, ...]
    trained_again_s: float | None
    lost_steps: int
    is_bit_equal: bool | None
    exit_codes: tuple[int, ...]
    is_overdue: bool
    num_left: int
    goodput: float | None
    wall_s: float
    said: str = ""
    num_restarts: int | None = None
    needless_restarts: int = 0
    num_starved: int = 0
    load: float | None = None
    samples: str = ""
    loss_difference: float | None = None


@dataclass(frozen=True)
class MeasuredAnswer(JsonRecord):
    """What one of several faults in a run was answered with; fields as in Measured.

    `false_verdicts`: verdicts on nothing, after the fault was over.
    """

    has_struck: bool
    verdict: str
    verdict_text: str
    ranks: tuple[int, ...]
    detected_s: float | None
    detected_steps: int | None
    false_verdicts: tuple[str, ...]
    trained_again_s: float | None
    lost_steps: int
    num_starved: int = 0


@dataclass(frozen=True)
class Bars(JsonRecord):
    """The numbers that a run must keep when it meets a fault. None: nothing is asked."""

    verdict: str
    rank: int | None
    detected_s: float | None
    detected_steps: int | None
    trained_again_s: float | None
    lost_steps: int
    is_bit_equal: bool
    exit_codes: tuple[int, ...]
    says: str = ""
    samples: str = ""
    loss_difference: float | None = None


@dataclass(frozen=True)
class Check(JsonRecord):
    """One bar: `found` and `bar` in words for people."""

    name: str
    found: str
    bar: str
    ok: bool


def build_bars(
    expectation: Expectation,
    *,
    rank: int,
    shape: DrillShape,
    step_p99_s: float,
    open_save_steps: int = 0,
) -> Bars:
    """The bars of a fault at `rank` in a run whose steps take `step_p99_s` at most, but for one in
    a hundred. `open_save_steps`: steps since the one whose save was being written when it struck.
    """
    detected_s = expectation.detected_s
    if detected_s == HANG_DETECTION:
        detected_s = max(HANG_FLOOR_S, HANG_STEPS * step_p99_s)
    assert not isinstance(detected_s, str)
    exit_codes: tuple[int, ...] = (0,)
    if expectation.ending is Ending.RESUMES:
        exit_codes = (expectation.exit_code, 0)
    elif expectation.ending is Ending.STOPS:
        exit_codes = (expectation.exit_code,)
    lost_steps = 0
    if expectation.may_lose_steps:
        lost_steps = shape.save_every_steps * expectation.lost_intervals + open_save_steps
        # What was trained on wrong state is done again.
        lost_steps += expectation.detected_steps or 0
    return Bars(
        verdict=expectation.verdict,
        rank=rank if can_name_rank(expectation, shape) else None,
        detected_s=detected_s,
        detected_steps=expectation.detected_steps,
        trained_again_s=expectation.trained_again_s,
        lost_steps=lost_steps,
        is_bit_equal=expectation.is_bit_equal and expectation.ending is not Ending.STOPS,
        exit_codes=exit_codes,
        says=expectation.says,
        samples=expectation.samples,
        loss_difference=expectation.loss_difference,
    )


def judge_trial(measured: Measured, bars: Bars) -> list[Check]:
    """All bars of a trial, in the order in which a person asks."""
    checks = judge_answer(measured, bars)
    if not measured.has_struck:
        return checks
    if bars.is_bit_equal:
        checks.append(judge_final_bits(measured.is_bit_equal))
    codes = _format_codes(measured.exit_codes)
    if measured.is_overdue:
        codes += ", killed at its limit"
    is_right = measured.exit_codes == bars.exit_codes and not measured.is_overdue
    checks.append(Check("exit code", codes, _format_codes(bars.exit_codes), is_right))
    if bars.says:
        checks.append(
            Check("message", measured.said or "not there", bars.says, bool(measured.said))
        )
    if bars.loss_difference is not None:
        checks.append(_judge_losses(measured.loss_difference, bars.loss_difference))
    if bars.samples:
        is_right = measured.samples == bars.samples
        checks.append(Check("samples", measured.samples, bars.samples, is_right))
    if measured.needless_restarts:
        measurement = str(measured.needless_restarts)
        checks.append(Check("needless restarts", measurement, "none", False))
    checks.append(Check("left behind", str(measured.num_left), "0", measured.num_left == 0))
    return checks


def judge_answer(measured: Measured | MeasuredAnswer, bars: Bars) -> list[Check]:
    """The bars of one fault that say nothing of how its run ended."""
    if not measured.has_struck:
        return [Check("struck", "no", "yes", False)]
    checks = [
        Check("class", measured.verdict, bars.verdict, measured.verdict == bars.verdict),
        *_judge_numbers(measured, bars),
    ]
    if bars.rank is not None:
        ranks = ", ".join(map(str, measured.ranks)) or "none"
        checks.append(Check("rank", ranks, str(bars.rank), measured.ranks == (bars.rank,)))
    if measured.false_verdicts:
        checks.append(Check("false verdicts", ", ".join(measured.false_verdicts), "none", False))
    return checks


def judge_final_bits(is_bit_equal: bool | None) -> Check:
    """The bar of a final checkpoint beside that of the undisturbed run; None: there is none."""
    word_of_equality = {True: "equal", False: "different", None: "no final checkpoint"}
    return Check("final bits", word_of_equality[is_bit_equal], "equal", is_bit_equal is True)


def _judge_numbers(measured: Measured | MeasuredAnswer, bars: Bars) -> list[Check]:
    checks = []
    for name, seconds, bar_s in (
        ("detected after", measured.detected_s, bars.detected_s),
        ("training again after", measured.trained_again_s, bars.trained_again_s),
    ):
        if bar_s is not None:
            is_met = seconds is not None and seconds <= bar_s
            measurement = "never" if seconds is None else format_seconds(seconds)
            checks.append(Check(name, measurement, format_seconds(bar_s), is_met))
    if bars.detected_steps is not None:
        steps, most = measured.detected_steps, bars.detected_steps
        measurement = "never" if steps is None else f"{steps} steps"
        is_met = steps is not None and steps <= most
        checks.append(Check("detected after", measurement, f"{most} steps", is_met))
    lost, most = measured.lost_steps, bars.lost_steps
    checks.append(Check("steps lost", str(lost), str(most), lost <= most))
    return checks


def _judge_losses(difference: float | None, most: float) -> Check:
    measurement = "steps are missing"
    if difference is not None:
        measurement = f"within {difference:.1g}"
    is_met = difference is not None and difference <= most
    return Check("losses", measurement, f"within {most:.1g}", is_met)


def _format_codes(codes: Sequence[int]) -> str:
    return ", then ".join(map(str, codes))


def finite_or_none(value: float) -> float | None:
    """`value`, or None for what was never measured."""
    return round(value, 4) if math.isfinite(value) else None
