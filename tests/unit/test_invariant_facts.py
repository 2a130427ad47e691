"""What the report says of invariants whose checks had nothing to compare."""

from __future__ import annotations

from phalanx.observe.events import Envelope, InvariantChecked
from phalanx.report.invariant_facts import InvariantFacts, InvariantLog


def _sum_up(*looked_at: str) -> InvariantFacts:
    """The facts of two passed checks, summed up by the first rank of each stage."""
    log = InvariantLog()
    for rank, text in enumerate(looked_at):
        checked = InvariantChecked(
            4, "replicas_equal", True, is_summary=True, num_checks=2, looked_at=text
        )
        log.add_event(Envelope(checked, rank, 0, 1e9))
    return log.list_invariant_facts()[0]


def test_replicas_that_nobody_has_are_not_said_to_be_equal() -> None:
    facts = _sum_up("0 blocks of weights that several ranks hold")
    assert (facts.num_checks, facts.has_held) == (2, None)


def test_what_one_stage_compared_has_held() -> None:
    some = "20 blocks of weights that several ranks hold"
    assert _sum_up(some).has_held
    assert _sum_up("0 blocks of weights that several ranks hold", some).has_held
