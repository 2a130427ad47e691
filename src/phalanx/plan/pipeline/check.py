"""Whether a schedule can run at all, before anything runs it: each thing wrong with it in one
line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from phalanx.core.errors import LayoutError, Problem
from phalanx.plan.pipeline.schedule import Action, Kind, Schedule
from phalanx.plan.pipeline.simulate import Results, Seconds, in_flight, run

_Place = tuple[int, int]  # rank, position


def check(schedule: Schedule, *, max_in_flight: int | None = None) -> tuple[Problem, ...]:
    """Problems by rank and position, both as they stand in the file: ranks count from 0 and
    positions from 1.

    Each stage has one rank and does F once for each microbatch, then B once, or I and W once; what
    an action needs is done by somebody, and no rank waits for ever. With `max_in_flight`: no rank
    holds more microbatches, counted per stage, than that. What follows from a problem already told
    is not told again.
    """
    places = _places(schedule)
    problems = [*_misplaced(schedule), *_miscounted(schedule, places)]
    if not problems:
        problems = list(_waits_for_ever(schedule))
    if not problems and max_in_flight is not None:
        problems = list(_too_many_held(schedule, max_in_flight))
    return tuple(problems)


def require_runnable(schedule: Schedule, *, max_in_flight: int | None = None) -> None:
    """Raises LayoutError with the first problem that `check` finds, and how many more there are."""
    problems = check(schedule, max_in_flight=max_in_flight)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise LayoutError(f"schedule {schedule.name} cannot run: {problems[0]}{more}")


def _at(rank: int, position: int) -> str:
    return f"rank {rank}, position {position + 1}"


def _places(schedule: Schedule) -> dict[Action, list[_Place]]:
    places: dict[Action, list[_Place]] = defaultdict(list)
    for rank, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            places[action].append((rank, position))
    return places


def _misplaced(schedule: Schedule) -> Iterator[Problem]:
    """Actions of stages or microbatches that there are not, or on a rank that does not hold the
    stage."""
    for rank, row in enumerate(schedule.actions):
        if not row:
            yield Problem(f"rank {rank}", "has nothing to do")
        for position, action in enumerate(row):
            where = _at(rank, position)
            if action.stage >= schedule.num_stages:
                yield Problem(str(action), f"there are {schedule.num_stages} stages, from 0", where)
            elif action.microbatch >= schedule.num_microbatches:
                yield Problem(
                    str(action),
                    f"there are {schedule.num_microbatches} microbatches, from 0",
                    where,
                )
            elif schedule.rank_of_stage[action.stage] != rank:
                owner = schedule.rank_of_stage[action.stage]
                yield Problem(str(action), f"stage {action.stage} is on rank {owner}", where)


def _miscounted(schedule: Schedule, places: dict[Action, list[_Place]]) -> Iterator[Problem]:
    """What is done twice, or never."""
    for action, found in places.items():
        for rank, position in found[1:]:
            yield Problem(
                str(action),
                f"comes a second time; the first is at {_at(*found[0])}",
                _at(rank, position),
            )
    for stage, owner in enumerate(schedule.rank_of_stage):
        for microbatch in range(schedule.num_microbatches):
            yield from _miscounted_microbatch(stage, microbatch, owner, places)


def _miscounted_microbatch(
    stage: int, microbatch: int, owner: int, places: dict[Action, list[_Place]]
) -> Iterator[Problem]:
    forward, whole, inputs, weights = (
        Action(kind, stage, microbatch) for kind in ("F", "B", "I", "W")
    )
    missing = f"is missing on rank {owner}"
    if forward not in places:
        yield Problem(str(forward), missing)
    halves = [half for half in (inputs, weights) if half in places]
    if whole in places:
        for half in halves:
            yield Problem(
                str(half), f"is part of {whole}, which is there too", _at(*places[half][0])
            )
    elif not halves:
        yield Problem(str(whole), f"{missing}, and so are {inputs} and {weights}")
    elif len(halves) == 1:
        other = weights if halves == [inputs] else inputs
        yield Problem(
            str(other), f"{missing}; {halves[0]} is half of a backward", _at(*places[halves[0]][0])
        )


def _waits_for_ever(schedule: Schedule) -> Iterator[Problem]:
    """Each rank that never ends: where it stands, and where what it waits for would be made."""
    costs: dict[Kind, Seconds] = {"F": 1, "B": 1, "I": 1, "W": 1}
    found = run(schedule, [costs] * schedule.num_stages)
    if not found.stuck:
        return
    results = Results(schedule.num_stages, schedule.num_microbatches)
    makers: dict[int, _Place] = {}
    for rank, row in enumerate(schedule.actions):
        makers |= {results.made_by(action): (rank, position) for position, action in enumerate(row)}
    standing = {rank: len(found.spans_s[rank]) for rank in found.stuck}
    for rank, needed in found.stuck.items():
        there, position = makers[results.made_by(needed)]
        maker = schedule.actions[there][position]
        what = f"waits for {maker}, which comes later, at position {position + 1}"
        if there != rank:
            what = (
                f"waits for {maker} of {_at(there, position)}, and rank {there} stands at position "
            )
            what += f"{standing[there] + 1}, {schedule.actions[there][standing[there]]}"
        yield Problem(str(schedule.actions[rank][standing[rank]]), what, _at(rank, standing[rank]))


def _too_many_held(schedule: Schedule, limit: int) -> Iterator[Problem]:
    for rank, peak in enumerate(in_flight(schedule).per_rank):
        if peak > limit:
            yield Problem(
                f"rank {rank}", f"holds up to {peak} microbatches at once, and {limit} may be"
            )
