"""The record of a soak, cut at its strikes: what each of them was answered with before the next."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.core.typed_json import JsonRecord
from phalanx.drills.aftermath import find_over_s, list_late_kinds
from phalanx.drills.judge import (
    Bars,
    Check,
    MeasuredAnswer,
    build_bars,
    finite_or_none,
    judge_answer,
)
from phalanx.drills.record import RunRecord
from phalanx.drills.soak.mix import PlannedStrike
from phalanx.drills.trials import DrillShape, load_fault
from phalanx.drills.verdicts import Verdict, count_starved_ranks, find_named_ranks, find_verdicts
from phalanx.observe.events import StepFinished
from phalanx.resilience.expectation import NO_VERDICT, Expectation
from phalanx.resilience.fault import parse_fault
from phalanx.resilience.strikes import Strike


@dataclass(frozen=True)
class AnsweredStrike(JsonRecord):
    """A strike of a soak beside its bars. `struck_s`: its moment, in seconds since the first event
    of the run; None where it did not strike."""

    planned: PlannedStrike
    struck_s: float | None
    measured: MeasuredAnswer
    bars: Bars

    @property
    def checks(self) -> list[Check]:
        return judge_answer(self.measured, self.bars)

    @property
    def is_passed(self) -> bool:
        return all(check.ok for check in self.checks)


NOT_STRUCK = MeasuredAnswer(
    has_struck=False,
    verdict=NO_VERDICT,
    verdict_text="",
    ranks=(),
    detected_s=None,
    detected_steps=None,
    false_verdicts=(),
    trained_again_s=None,
    lost_steps=0,
)


def measure_strikes(
    record: RunRecord, planned: Sequence[PlannedStrike], shape: DrillShape, step_p99_s: float
) -> list[AnsweredStrike]:
    """Measure and judge each planned strike by what the run recorded until the next one. A strike
    counts as one if all its faults struck."""
    strikes = [_find_strike(record, each) for each in planned]
    began_s = min((each.monotonic_s for each in record.envelopes), default=math.nan)
    answered = []
    before_s = -math.inf
    # What ranks may still say of a strike before, after which they went on.
    outstanding = ""
    for number, (plan, strike) in enumerate(zip(planned, strikes, strict=True)):
        expectation = load_fault(plan.fault).expectation
        measured, struck_s, open_save_steps = NOT_STRUCK, None, 0
        if strike is not None:
            later = (each.monotonic_s for each in strikes[number + 1 :] if each is not None)
            window = record.cut(before_s, next(later, math.inf))
            measured = _measure_answer(window, strike, expectation, outstanding)
            outstanding = expectation.verdict if expectation.ranks_go_on else ""
            struck_s = round(strike.monotonic_s - began_s, 4)
            open_save_steps = window.count_steps_of_open_save(strike, shape.save_every_steps)
            before_s = strike.monotonic_s
        bars = build_bars(
            expectation,
            rank=plan.place.rank,
            shape=shape,
            step_p99_s=step_p99_s,
            open_save_steps=open_save_steps,
        )
        answered.append(AnsweredStrike(plan, struck_s, measured, bars))
    return answered


def find_early_verdicts(record: RunRecord) -> list[Verdict]:
    """The verdicts before the first strike: all are false."""
    first_s = min((each.monotonic_s for each in record.strikes), default=math.inf)
    return [each for each in find_verdicts(record.envelopes) if each.monotonic_s < first_s]


def list_false_verdicts(
    undisturbed: RunRecord, disturbed: RunRecord, answered: Sequence[AnsweredStrike]
) -> list[str]:
    """The classes of all verdicts on nothing: those of the undisturbed run, which say so, those
    before the first strike, and those after a strike was over."""
    kinds = [f"{each.kind} (undisturbed run)" for each in find_verdicts(undisturbed.envelopes)]
    kinds += [each.kind for each in find_early_verdicts(disturbed)]
    for each in answered:
        kinds += each.measured.false_verdicts
    return kinds


def _find_strike(record: RunRecord, planned: PlannedStrike) -> Strike | None:
    """The main strike of a plan; None unless it and all that come with it struck."""
    main = None
    for text in planned.inject:
        fault = parse_fault(text)
        struck = [
            each
            for each in record.strikes
            if each.fault == fault.name and fault.is_due_at(each.rank, each.step, each.phase)
        ]
        if not struck:
            return None
        main = main or struck[0]
    return main


def _measure_answer(
    window: RunRecord, strike: Strike, expectation: Expectation, outstanding: str
) -> MeasuredAnswer:
    """`window`: from the strike before to just before the next one. `outstanding`: the class of
    verdicts that may still come on the strike before."""
    struck_s = strike.monotonic_s
    not_on_it = {*expectation.preceded_by, outstanding} - {expectation.verdict}
    verdicts = [
        each
        for each in find_verdicts(window.envelopes, expectation.verdict)
        if each.monotonic_s >= struck_s and each.kind not in not_on_it
    ]
    first = verdicts[0] if verdicts else None
    detected_s, detected_steps = None, None
    if first is not None:
        detected_s = round(first.monotonic_s - struck_s, 4)
        detected_steps = max(0, first.step - strike.step)
    again_s = window.find_trained_again_s(strike, ranks_go_on=expectation.ranks_go_on)
    over_s = find_over_s(struck_s, again_s, detected_s, expectation)
    consequences = {expectation.verdict} if expectation.ranks_go_on else set()
    return MeasuredAnswer(
        has_struck=True,
        verdict=first.kind if first is not None else NO_VERDICT,
        verdict_text=first.text if first is not None else "",
        ranks=find_named_ranks(verdicts),
        detected_s=detected_s,
        detected_steps=detected_steps,
        false_verdicts=list_late_kinds(verdicts, over_s, consequences),
        trained_again_s=finite_or_none(again_s),
        lost_steps=count_steps_done_again(window, struck_s),
        num_starved=count_starved_ranks(window.envelopes),
    )


def count_steps_done_again(window: RunRecord, struck_s: float) -> int:
    """Steps that were done after a moment and had been done before, then or before it: of the rank
    that did most of them."""
    newest: dict[int, int] = {}
    num_repeated: Counter[int] = Counter()
    for envelope in window.finished_steps:
        assert isinstance(envelope.event, StepFinished)
        step, last = int(envelope.event.step), newest.get(envelope.rank, 0)
        if step <= last and envelope.monotonic_s >= struck_s:
            num_repeated[envelope.rank] += 1
        newest[envelope.rank] = max(step, last)
    return max(num_repeated.values(), default=0)


def sum_charges_s(planned: Sequence[PlannedStrike], shape: DrillShape, step_s: float) -> float:
    """Seconds that a run whose steps take `step_s` may lose by all strikes together.

    That is the bar to train again, in which detection and the steps that are done again are; where
    a fault has none, the time of the steps that it may lose.
    """
    charges_s = []
    for each in planned:
        expectation = load_fault(each.fault).expectation
        bars = build_bars(expectation, rank=each.place.rank, shape=shape, step_p99_s=step_s)
        if bars.trained_again_s is None:
            charges_s.append(bars.lost_steps * step_s)
        else:
            charges_s.append(bars.trained_again_s)
    return math.fsum(charges_s)
