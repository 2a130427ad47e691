"""Schedules by name: which sizes each has, the nearest legal one for those it has not, and its
actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from phalanx.core.errors import LayoutError, did_you_mean
from phalanx.plan.pipeline.looped import (
    gpipe,
    interleaved,
    interleaved_zero_bubble,
    num_rounds,
    one_forward_one_backward,
)
from phalanx.plan.pipeline.schedule import Schedule
from phalanx.plan.pipeline.v_shaped import dualpipe_v, zb_v


@dataclass(frozen=True)
class _Named:
    make: Callable[[int, int, int], Schedule]
    stages_per_rank: int  # unless asked for otherwise
    least_stages_per_rank: int
    most_stages_per_rank: int | None = None
    in_rounds: bool = False
    least_microbatches_per_rank: int = 0


_SCHEDULES = {
    "gpipe": _Named(gpipe, 1, 1, 1),
    "1f1b": _Named(one_forward_one_backward, 1, 1, 1),
    "interleaved": _Named(interleaved, 2, 2, in_rounds=True),
    "interleaved-zero-bubble": _Named(interleaved_zero_bubble, 2, 1, in_rounds=True),
    "zb-v": _Named(zb_v, 2, 2, 2),
    "dualpipe-v": _Named(dualpipe_v, 2, 2, 2, least_microbatches_per_rank=2),
}
SCHEDULE_NAMES = tuple(_SCHEDULES)


def generate(
    name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None
) -> Schedule:
    """The actions of a named schedule.

    Raises LayoutError, with the nearest legal size, for one that it has not.
    """
    named = _named(name)
    if num_ranks < 1 or num_microbatches < 1:
        raise LayoutError(
            f"a pipeline of {num_ranks} ranks and {num_microbatches} microbatches",
            fix="use at least 1",
        )
    per_rank = named.stages_per_rank if stages_per_rank is None else stages_per_rank
    require_stages_per_rank(name, per_rank)
    _require_microbatches(name, named, num_ranks, num_microbatches)
    return named.make(num_ranks, num_microbatches, per_rank)


def can_run(name: str, num_ranks: int, num_microbatches: int) -> bool:
    """Whether a named schedule has that many microbatches."""
    named = _named(name)
    if num_microbatches < max(1, named.least_microbatches_per_rank * num_ranks):
        return False
    return not named.in_rounds or _fills_rounds(num_ranks, num_microbatches)


def default_stages_per_rank(name: str) -> int:
    return _named(name).stages_per_rank


def _named(name: str) -> _Named:
    if name not in _SCHEDULES:
        known = f"there are {', '.join(SCHEDULE_NAMES)}"
        raise LayoutError(
            f"there is no schedule {name!r}", fix=did_you_mean(name, SCHEDULE_NAMES) or known
        )
    return _SCHEDULES[name]


def can_have(name: str, stages_per_rank: int) -> bool:
    """Whether a named schedule has that many stages on each rank."""
    named = _named(name)
    return (
        named.least_stages_per_rank
        <= stages_per_rank
        <= (named.most_stages_per_rank or stages_per_rank)
    )


def require_stages_per_rank(name: str, wish: int) -> None:
    """Raises LayoutError, naming the nearest number that the schedule can have."""
    named = _named(name)
    least, most = named.least_stages_per_rank, named.most_stages_per_rank
    if can_have(name, wish):
        return
    fix = f"nearest: {most if most and wish > most else least}"
    if wish == 1:
        fix += ", or schedule 1f1b"
    elif most == 1:
        fix += ", or schedule interleaved"
    raise LayoutError(f"schedule {name} cannot have {wish} stages per rank", fix=fix)


def _require_microbatches(name: str, named: _Named, num_ranks: int, wish: int) -> None:
    least = named.least_microbatches_per_rank * num_ranks
    if wish < least:
        raise LayoutError(
            f"schedule {name} on {num_ranks} ranks cannot run {wish} microbatches",
            why="it has two stages per rank and wants a microbatch in each",
            fix=f"nearest: {least}",
        )
    if not named.in_rounds or _fills_rounds(num_ranks, wish):
        return
    below = next(count for count in range(wish, 0, -1) if _fills_rounds(num_ranks, count))
    above = next(
        count for count in range(wish, wish + num_ranks + 1) if _fills_rounds(num_ranks, count)
    )
    rounds = num_rounds(num_ranks, wish)
    raise LayoutError(
        f"schedule {name} on {num_ranks} ranks cannot run {wish} microbatches",
        why=f"they do not divide into {rounds} equal rounds",
        fix=f"nearest: {below} or {above}",
    )


def _fills_rounds(num_ranks: int, num_microbatches: int) -> bool:
    return num_microbatches % num_rounds(num_ranks, num_microbatches) == 0
