"""Which faults fit a job: by its layout nobody can see some, and others are rightly called
otherwise."""

from __future__ import annotations

from phalanx.drills.trials import DrillShape
from phalanx.resilience.expectation import Expectation

MIN_MAJORITY = 3
_CORRUPT, _RANKS_DISAGREE = "corrupt", "ranks disagree"


def find_reason_against_job(expectation: Expectation, shape: DrillShape) -> str:
    """Why a fault can have no right answer in a job of this shape; "" if it can."""
    if _is_told_by_replicas(expectation):
        if shape.count_replicas() < 2 and not shape.checks_memory:
            return (
                f"each rank alone updates its part of the weights with {shape.layout}: no other"
                " one holds them, and only resilience.check_memory_every=1 sees it"
            )
    elif expectation.verdict == _RANKS_DISAGREE and not shape.has_one_group:
        return (
            f"with {shape.layout} the ranks exchange in groups of some of them: nobody calls a"
            " collective of all ranks meanwhile, and the one of the fault is an absent collective"
        )
    return ""


def can_name_rank(expectation: Expectation, shape: DrillShape) -> bool:
    """True if a verdict on the fault can name the rank that was struck."""
    if not expectation.is_named_by_majority:
        return expectation.names_rank
    num_voters = shape.num_ranks
    if _is_told_by_replicas(expectation):
        # Who compares its memory with what it was needs no other.
        num_voters = MIN_MAJORITY if shape.checks_memory else shape.count_replicas()
    return expectation.names_rank and num_voters >= MIN_MAJORITY


def _is_told_by_replicas(expectation: Expectation) -> bool:
    """True where the majority that names a rank is one of those that hold the same state; of other
    faults it is one of all ranks."""
    return expectation.is_named_by_majority and expectation.verdict == _CORRUPT
