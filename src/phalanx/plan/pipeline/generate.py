"""Schedules by name: which sizes each has, the nearest legal one for those it has not, and the
actions of those whose stages lie on ranks in a loop.

All of these but GPipe are one idea: a rank has its forwards in one order and its backwards in
another, does some forwards ahead ("warm-up"), then one forward and one backward in turn, then the
backwards that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat

from phalanx.core.errors import LayoutError, format_nearest_word_hint
from phalanx.plan.pipeline.schedule import Action, ActionKind, Schedule, place_stages_in_loop
from phalanx.plan.pipeline.v_shaped import generate_dualpipe_v, generate_zb_v


def generate_gpipe(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """GPipe: all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965)."""
    rows = []
    for rank in range(num_ranks):
        forwards = _list_actions_of_stage("F", rank, num_microbatches)
        backwards = _list_actions_of_stage("B", rank, num_microbatches)
        rows.append((*forwards, *backwards))
    return Schedule("gpipe", num_microbatches, place_stages_in_loop(num_ranks, 1), tuple(rows))


def generate_1f1b(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """1F1B: a rank holds at most as many microbatches as there are stages from it to the end
    (arXiv 2006.09503)."""
    rows = []
    for rank in range(num_ranks):
        forwards = _list_actions_of_stage("F", rank, num_microbatches)
        backwards = _list_actions_of_stage("B", rank, num_microbatches)
        # As many forwards ahead as there are stages behind it: then the first gradient is back.
        rows.append(_alternate_forward_backward(forwards, backwards, num_ranks - 1 - rank))
    return Schedule("1f1b", num_microbatches, place_stages_in_loop(num_ranks, 1), tuple(rows))


def _list_actions_of_stage(kind: ActionKind, stage: int, num_microbatches: int) -> list[Action]:
    # `tuple.__new__` is three times as fast as Action(...), and there may be a hundred thousand.
    rows = zip(repeat(kind), repeat(stage), range(num_microbatches), strict=False)
    return list(map(partial(tuple.__new__, Action), rows))


def generate_interleaved(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    """Interleaved 1F1B: several stages per rank make the bubble smaller, for more sends
    (Narayanan et al. 2021, arXiv 2104.04473)."""
    rows = []
    for rank in range(num_ranks):
        forwards = list(
            _list_interleaved_actions("F", rank, num_ranks, num_microbatches, stages_per_rank)
        )
        backwards = list(
            _list_interleaved_actions("B", rank, num_ranks, num_microbatches, stages_per_rank)
        )
        # Twice the hops to the last rank: a forward has to get there, and its gradient back.
        ahead = _count_warmup_forwards(num_ranks, num_microbatches, stages_per_rank)
        ahead += 2 * (num_ranks - 1 - rank)
        rows.append(_alternate_forward_backward(forwards, backwards, ahead))
    placement = place_stages_in_loop(num_ranks, stages_per_rank)
    return Schedule("interleaved", num_microbatches, placement, tuple(rows))


def generate_interleaved_zero_bubble(
    num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> Schedule:
    """Interleaved zero-bubble: gradients of weights wait until there is nothing else to do
    (ZB1P: Qi et al. 2023, arXiv 2401.10241).

    With one stage per rank this is the paper's ZB-H1.
    """
    rows = []
    for rank in range(num_ranks):
        forwards = list(
            _list_interleaved_actions("F", rank, num_ranks, num_microbatches, stages_per_rank)
        )
        inputs = list(
            _list_interleaved_actions("I", rank, num_ranks, num_microbatches, stages_per_rank)
        )
        ahead = (
            _count_warmup_forwards(num_ranks, num_microbatches, stages_per_rank)
            + num_ranks
            - 1
            - rank
        )
        rows.append(
            tuple(
                _insert_weight_actions(
                    _alternate_forward_backward(forwards, inputs, ahead), lag=rank
                )
            )
        )
    placement = place_stages_in_loop(num_ranks, stages_per_rank)
    return Schedule("interleaved-zero-bubble", num_microbatches, placement, tuple(rows))


def count_interleaved_rounds(num_ranks: int, num_microbatches: int) -> int:
    """The number of rounds of about `num_ranks` microbatches that interleaved schedules take
    through all stages of a rank."""
    # As in torch's schedules, to which tests hold ours.
    return max(1, num_microbatches // num_ranks)


def _count_warmup_forwards(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> int:
    """The number of forwards that the last rank does before its first backward: all of a round,
    but in its last stage."""
    return (stages_per_rank - 1) * (
        num_microbatches // count_interleaved_rounds(num_ranks, num_microbatches)
    )


def _list_interleaved_actions(
    kind: ActionKind, rank: int, num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> Iterator[Action]:
    """The actions of one kind on a rank: a round of microbatches goes through one stage, then
    through the next; backwards meet the last stage first."""
    stages = range(rank, num_ranks * stages_per_rank, num_ranks)
    if kind != "F":
        # A gradient comes from the stage after, so the last stage has it first.
        stages = stages[::-1]
    size = num_microbatches // count_interleaved_rounds(num_ranks, num_microbatches)
    for first in range(0, num_microbatches, size):
        for stage in stages:
            for microbatch in range(first, first + size):
                yield Action(kind, stage, microbatch)


def _alternate_forward_backward(
    forwards: Sequence[Action], backwards: Sequence[Action], ahead: int
) -> tuple[Action, ...]:
    ahead = min(ahead, len(forwards))
    # The pairs end with the forwards: as many backwards are left as went ahead.
    return (
        *forwards[:ahead],
        *chain.from_iterable(zip(forwards[ahead:], backwards, strict=False)),
        *backwards[len(forwards) - ahead :],
    )


def _insert_weight_actions(actions: Iterable[Action], lag: int) -> Iterator[Action]:
    """`actions` with the oldest W that is due after each I from the `lag`-th on; the other W
    come at the end."""
    due: list[Action] = []
    for action in actions:
        yield action
        if action.kind == "I":
            due.append(Action("W", action.stage, action.microbatch))
            if len(due) > lag:
                yield due.pop(0)
    yield from due


@dataclass(frozen=True)
class _NamedSchedule:
    make: Callable[[int, int, int], Schedule]
    stages_per_rank: int  # unless asked for otherwise
    least_stages_per_rank: int
    most_stages_per_rank: int | None = None
    in_rounds: bool = False
    least_microbatches_per_rank: int = 0


_NAMED_SCHEDULES = {
    "gpipe": _NamedSchedule(generate_gpipe, 1, 1, 1),
    "1f1b": _NamedSchedule(generate_1f1b, 1, 1, 1),
    "interleaved": _NamedSchedule(generate_interleaved, 2, 2, in_rounds=True),
    "interleaved-zero-bubble": _NamedSchedule(
        generate_interleaved_zero_bubble, 2, 1, in_rounds=True
    ),
    "zb-v": _NamedSchedule(generate_zb_v, 2, 2, 2),
    "dualpipe-v": _NamedSchedule(generate_dualpipe_v, 2, 2, 2, least_microbatches_per_rank=2),
}
SCHEDULE_NAMES = tuple(_NAMED_SCHEDULES)


def generate_schedule(
    name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None
) -> Schedule:
    """The actions of a named schedule.

    Raises LayoutError, with the nearest legal size, for one that it has not.
    """
    named = _find_named_schedule(name)
    if num_ranks < 1 or num_microbatches < 1:
        raise LayoutError(
            f"a pipeline of {num_ranks} ranks and {num_microbatches} microbatches",
            fix="use at least 1",
        )
    if stages_per_rank is None:
        stages_per_rank = named.stages_per_rank
    require_stages_per_rank(name, stages_per_rank)
    _require_runnable_microbatches(name, named, num_ranks, num_microbatches)
    return named.make(num_ranks, num_microbatches, stages_per_rank)


def can_run_microbatches(name: str, num_ranks: int, num_microbatches: int) -> bool:
    """True if a named schedule can run `num_microbatches`."""
    named = _find_named_schedule(name)
    if num_microbatches < max(1, named.least_microbatches_per_rank * num_ranks):
        return False
    return not named.in_rounds or _are_rounds_even(num_ranks, num_microbatches)


def get_default_stages_per_rank(name: str) -> int:
    return _find_named_schedule(name).stages_per_rank


def _find_named_schedule(name: str) -> _NamedSchedule:
    if name not in _NAMED_SCHEDULES:
        known = f"there are {', '.join(SCHEDULE_NAMES)}"
        raise LayoutError(
            f"there is no schedule {name!r}",
            fix=format_nearest_word_hint(name, SCHEDULE_NAMES) or known,
        )
    return _NAMED_SCHEDULES[name]


def can_have_stages_per_rank(name: str, stages_per_rank: int) -> bool:
    """True if a named schedule can have `stages_per_rank`."""
    named = _find_named_schedule(name)
    most = named.most_stages_per_rank or stages_per_rank
    return named.least_stages_per_rank <= stages_per_rank <= most


def require_stages_per_rank(name: str, wish: int) -> None:
    """Raises LayoutError for a number of stages per rank that the schedule cannot have, naming
    the nearest that it can."""
    named = _find_named_schedule(name)
    least, most = named.least_stages_per_rank, named.most_stages_per_rank
    if can_have_stages_per_rank(name, wish):
        return
    nearest = least
    if most and wish > most:
        nearest = most
    fix = f"nearest: {nearest}"
    if wish == 1:
        fix += ", or schedule 1f1b"
    elif most == 1:
        fix += ", or schedule interleaved"
    raise LayoutError(f"schedule {name} cannot have {wish} stages per rank", fix=fix)


def _require_runnable_microbatches(
    name: str, named: _NamedSchedule, num_ranks: int, wish: int
) -> None:
    least = named.least_microbatches_per_rank * num_ranks
    if wish < least:
        raise LayoutError(
            f"schedule {name} on {num_ranks} ranks cannot run {wish} microbatches",
            why="it has two stages per rank and wants a microbatch in each",
            fix=f"nearest: {least}",
        )
    if not named.in_rounds or _are_rounds_even(num_ranks, wish):
        return
    # One microbatch always fills its round, and so does the next multiple of the ranks.
    below = above = wish
    while not _are_rounds_even(num_ranks, below):
        below -= 1
    while not _are_rounds_even(num_ranks, above):
        above += 1
    rounds = count_interleaved_rounds(num_ranks, wish)
    raise LayoutError(
        f"schedule {name} on {num_ranks} ranks cannot run {wish} microbatches",
        why=f"they do not divide into {rounds} equal rounds",
        fix=f"nearest: {below} or {above}",
    )


def _are_rounds_even(num_ranks: int, num_microbatches: int) -> bool:
    return num_microbatches % count_interleaved_rounds(num_ranks, num_microbatches) == 0
