"""Schedules in which stages lie on ranks in a loop: GPipe, 1F1B, interleaved 1F1B, interleaved
zero-bubble.

All but GPipe are one idea: a rank has its forwards in one order and its backwards in another, does
some forwards ahead ("warm-up"), then one forward and one backward in turn, then the backwards that
are left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from phalanx.plan.pipeline.schedule import Action, Kind, Schedule, loop_placement


def gpipe(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965)."""
    rows = (
        tuple(
            Action(kind, rank, microbatch)
            for kind in ("F", "B")
            for microbatch in range(num_microbatches)
        )
        for rank in range(num_ranks)
    )
    return Schedule("gpipe", num_microbatches, loop_placement(num_ranks, 1), tuple(rows))


def one_forward_one_backward(
    num_ranks: int, num_microbatches: int, stages_per_rank: int = 1
) -> Schedule:
    """A rank holds at most as many microbatches as there are stages from it to the end (arXiv
    2006.09503)."""
    rows = []
    for rank in range(num_ranks):
        forwards = [Action("F", rank, microbatch) for microbatch in range(num_microbatches)]
        backwards = [Action("B", rank, microbatch) for microbatch in range(num_microbatches)]
        rows.append(tuple(_in_turn(forwards, backwards, num_ranks - 1 - rank)))
    return Schedule("1f1b", num_microbatches, loop_placement(num_ranks, 1), tuple(rows))


def interleaved(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    """Several stages per rank make the bubble smaller, for more sends (Narayanan et al. 2021,
    arXiv 2104.04473)."""
    rows = []
    for rank in range(num_ranks):
        forwards = list(_passes("F", rank, num_ranks, num_microbatches, stages_per_rank))
        backwards = list(_passes("B", rank, num_ranks, num_microbatches, stages_per_rank))
        ahead = _ahead(num_ranks, num_microbatches, stages_per_rank) + 2 * (num_ranks - 1 - rank)
        rows.append(tuple(_in_turn(forwards, backwards, ahead)))
    return Schedule(
        "interleaved", num_microbatches, loop_placement(num_ranks, stages_per_rank), tuple(rows)
    )


def interleaved_zero_bubble(
    num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> Schedule:
    """Gradients of weights wait until there is nothing else to do (ZB1P: Qi et al. 2023, arXiv
    2401.10241).

    With one stage per rank this is the paper's ZB-H1.
    """
    rows = []
    for rank in range(num_ranks):
        forwards = list(_passes("F", rank, num_ranks, num_microbatches, stages_per_rank))
        inputs = list(_passes("I", rank, num_ranks, num_microbatches, stages_per_rank))
        ahead = _ahead(num_ranks, num_microbatches, stages_per_rank) + num_ranks - 1 - rank
        rows.append(tuple(_with_weights(_in_turn(forwards, inputs, ahead), lag=rank)))
    placement = loop_placement(num_ranks, stages_per_rank)
    return Schedule("interleaved-zero-bubble", num_microbatches, placement, tuple(rows))


def num_rounds(num_ranks: int, num_microbatches: int) -> int:
    """Interleaved schedules take microbatches through all stages of a rank in rounds of about
    `num_ranks`."""
    return max(1, num_microbatches // num_ranks)


def _ahead(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> int:
    """Forwards that the last rank does before its first backward: all of a round, but in its
    last stage."""
    return (stages_per_rank - 1) * (num_microbatches // num_rounds(num_ranks, num_microbatches))


def _passes(
    kind: Kind, rank: int, num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> Iterator[Action]:
    """A round of microbatches through one stage, then through the next; backwards meet the last
    stage first."""
    stages = range(rank, num_ranks * stages_per_rank, num_ranks)
    size = num_microbatches // num_rounds(num_ranks, num_microbatches)
    for begin in range(0, num_microbatches, size):
        for stage in stages if kind == "F" else reversed(stages):
            for microbatch in range(begin, begin + size):
                yield Action(kind, stage, microbatch)


def _in_turn(
    forwards: Sequence[Action], backwards: Sequence[Action], ahead: int
) -> Iterator[Action]:
    ahead = min(ahead, len(forwards))
    yield from forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - ahead :]


def _with_weights(actions: Iterator[Action], lag: int) -> Iterator[Action]:
    """After each I from the `lag`-th on, the oldest W that is due; at the end those that are
    left."""
    due: list[Action] = []
    for action in actions:
        yield action
        if action.kind == "I":
            due.append(Action("W", action.stage, action.microbatch))
            if len(due) > lag:
                yield due.pop(0)
    yield from due
