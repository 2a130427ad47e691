"""The nouns of a rule of thumb: what it measures, its limit, and the verdict on one plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from phalanx.plan.advice.facts import PlanFacts

State = Literal["holds", "tight", "fails", "unknown"]
Bound = Literal["at most", "at least"]


@dataclass(frozen=True)
class RuleMeasurement:
    """The number of a plan that a rule looks at, and its limit.

    `value` is None where it is not known; then `missing` names what is.
    """

    value: float | None
    limit: float
    consequence: str = ""
    remedy: str = ""
    missing: str = ""
    comfortable: float | None = None
    """A limit inside of `limit`: between both a rule holds, but only just."""


@dataclass(frozen=True)
class RuleVerdict:
    """A rule of thumb on one plan, as data."""

    name: str
    title: str
    state: State
    value: float | None
    limit: float
    bound: Bound
    unit: str
    consequence: str
    remedy: str
    correction: str
    evidence: str

    @property
    def comparison(self) -> str:
        """Value and limit in words: '16 ranks, at most 8'."""
        # The unit once: a limit in % has its own sign.
        unit = self.unit
        if self.value is not None and unit != "%":
            unit = ""
        limit_text = format_measured_value(self.limit, self.unit)
        limit = f"{self.bound} {format_measured_value(self.limit, unit)}"
        if self.value is None:
            return f"not judged, {limit}"
        value = format_measured_value(self.value, self.unit)
        if self.state == "fails" and value == limit_text:
            # Else "5.0 %, at most 5.0 %" would say that the rule holds.
            side = "above" if self.bound == "at most" else "below"
            value = f"just {side} {value}"
        return f"{value}, {limit}"

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self)) | {"comparison": self.comparison}


@dataclass(frozen=True)
class RuleOfThumb:
    """A rule: `measure` returns None for a plan that it does not apply to.

    `correction` is what is often said about it and is not so. `evidence` is where the limit comes
    from.
    """

    name: str
    title: str
    bound: Bound
    unit: str
    measure: Callable[[PlanFacts], RuleMeasurement | None]
    evidence: str
    correction: str = ""

    def evaluate(self, facts: PlanFacts) -> RuleVerdict | None:
        """The verdict on a plan; None where the rule does not apply."""
        measurement = self.measure(facts)
        if measurement is None:
            return None
        verdict = RuleVerdict(
            self.name,
            self.title,
            _determine_verdict_state(measurement, self.bound),
            measurement.value,
            measurement.limit,
            self.bound,
            self.unit,
            measurement.consequence,
            measurement.remedy,
            self.correction,
            self.evidence,
        )
        if verdict.state == "unknown":
            return replace(verdict, consequence=f"not known: {measurement.missing}", remedy="")
        return verdict


def _determine_verdict_state(measurement: RuleMeasurement, bound: Bound) -> State:
    if measurement.value is None:
        return "unknown"
    if not _is_within_limit(measurement.value, measurement.limit, bound):
        return "fails"
    comfortable = measurement.comfortable
    if comfortable is not None and not _is_within_limit(measurement.value, comfortable, bound):
        return "tight"
    return "holds"


def _is_within_limit(value: float, limit: float, bound: Bound) -> bool:
    if bound == "at most":
        return value <= limit
    return value >= limit


def format_measured_value(value: float, unit: str) -> str:
    """0.123 of unit "%" -> '12.3 %'; 4096 tokens -> '4,096 tokens'."""
    if unit == "%":
        return f"{100 * value:.1f} %"
    text = f"{value:,.0f}"
    # Whole numbers have no decimals, and large ones need none.
    if value != round(value) and abs(value) < 100:
        text = f"{value:.3g}"
    return f"{text} {unit}".rstrip()
