"""Rules of long runs on many devices: failures, and instances that may be taken away."""

from __future__ import annotations

from phalanx.plan.advice.facts import PlanFacts
from phalanx.plan.advice.rule import RuleMeasurement, RuleOfThumb

MIN_GOODPUT = 0.90


def measure_goodput(facts: PlanFacts) -> RuleMeasurement | None:
    """The part of the wall time that trains."""
    if facts.layout.world_size == 1:
        return None
    return RuleMeasurement(
        facts.goodput,
        MIN_GOODPUT,
        consequence="the rest is saving, restarting and repeating steps after failures",
        remedy="checkpoints at the interval that the plan proposes, saved in the background",
        missing="how often the devices fail, and how long a save takes",
    )


def measure_spot_cost(facts: PlanFacts) -> RuleMeasurement | None:
    """Cost on instances that may be taken away, against those that may not."""
    if facts.spot_cost_ratio is None:
        return None
    return RuleMeasurement(
        facts.spot_cost_ratio,
        1.0,
        consequence="the price with the steps that are repeated after pre-emptions",
        remedy="instances on demand, or a checkpoint on the notice (30 s to 2 min)",
    )


RULES = (
    RuleOfThumb(
        "goodput",
        "Most of the time trains",
        "at least",
        "%",
        measure_goodput,
        evidence="Young 1974 and Daly 2006, with published failure rates",
        correction=(
            "Spikes of the loss do not find silent corruption of data; computing twice does (E57)."
        ),
    ),
    RuleOfThumb(
        "spot",
        "Spot instances are cheaper with their pre-emptions",
        "at most",
        "times the price on demand",
        measure_spot_cost,
        evidence="computed with the plan's pre-emption rate",
        correction="How much cheaper they are depends on vendor and day (E63).",
    ),
)
