"""Whether a schedule can run at all, before anything runs it: each thing wrong with it in one
line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from phalanx.core.errors import JobProblem, LayoutError
from phalanx.plan.pipeline.execution import ActionResults
from phalanx.plan.pipeline.schedule import Action, ActionKind, Schedule
from phalanx.plan.pipeline.simulate import (
    Seconds,
    count_peak_in_flight,
    simulate_schedule,
)

_RankAndIndex = tuple[int, int]  # rank, position


def find_schedule_problems(
    schedule: Schedule, *, max_in_flight: int | None = None
) -> tuple[JobProblem, ...]:
    """Problems by rank and position, both as they stand in the file: ranks count from 0 and
    positions from 1.

    Each stage has one rank and does F once for each microbatch, then B once, or I and W once; what
    an action needs is made by another one, and no rank waits for ever. With `max_in_flight`: no
    rank holds more microbatches, counted per stage, than that. Consequences of a listed problem are
    not listed.
    """
    places = _map_actions_to_positions(schedule)
    problems = [
        *_find_misplaced_actions(schedule),
        *_find_repeated_or_missing_actions(schedule, places),
    ]
    # Only a schedule with every action once, where it belongs, can be run on paper.
    if not problems:
        problems = list(_find_deadlocked_ranks(schedule))
    if not problems and max_in_flight is not None:
        problems = list(_find_ranks_over_in_flight_limit(schedule, max_in_flight))
    return tuple(problems)


def require_runnable_schedule(schedule: Schedule, *, max_in_flight: int | None = None) -> None:
    """Raises LayoutError with the first problem that `find_schedule_problems` finds, and how many
    more there are."""
    problems = find_schedule_problems(schedule, max_in_flight=max_in_flight)
    if problems:
        message = f"schedule {schedule.name} cannot run: {problems[0]}"
        if len(problems) > 1:
            message += f" (and {len(problems) - 1} more)"
        raise LayoutError(message)


def _format_position(rank: int, position: int) -> str:
    return f"rank {rank}, position {position + 1}"


def _map_actions_to_positions(schedule: Schedule) -> dict[Action, list[_RankAndIndex]]:
    places: dict[Action, list[_RankAndIndex]] = defaultdict(list)
    for rank, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            places[action].append((rank, position))
    return places


def _find_misplaced_actions(schedule: Schedule) -> Iterator[JobProblem]:
    """A problem for each action of a stage or microbatch that does not exist, or on a rank that
    does not hold the stage."""
    for rank, row in enumerate(schedule.actions):
        if not row:
            yield JobProblem(f"rank {rank}", "has nothing to do")
        for position, action in enumerate(row):
            where = _format_position(rank, position)
            if action.stage >= schedule.num_stages:
                yield JobProblem(
                    str(action), f"there are {schedule.num_stages} stages, from 0", where
                )
            elif action.microbatch >= schedule.num_microbatches:
                yield JobProblem(
                    str(action),
                    f"there are {schedule.num_microbatches} microbatches, from 0",
                    where,
                )
            elif schedule.rank_of_stage[action.stage] != rank:
                owner = schedule.rank_of_stage[action.stage]
                yield JobProblem(str(action), f"stage {action.stage} is on rank {owner}", where)


def _find_repeated_or_missing_actions(
    schedule: Schedule, places: dict[Action, list[_RankAndIndex]]
) -> Iterator[JobProblem]:
    """A problem for each action that is done twice, or never."""
    for action, occurrences in places.items():
        for rank, position in occurrences[1:]:
            yield JobProblem(
                str(action),
                f"comes a second time; the first is at {_format_position(*occurrences[0])}",
                _format_position(rank, position),
            )
    # Over all that should be there: an action that nobody does is in no row.
    for stage, owner in enumerate(schedule.rank_of_stage):
        for microbatch in range(schedule.num_microbatches):
            yield from _find_repeated_or_missing_of_microbatch(stage, microbatch, owner, places)


def _find_repeated_or_missing_of_microbatch(
    stage: int, microbatch: int, owner: int, places: dict[Action, list[_RankAndIndex]]
) -> Iterator[JobProblem]:
    forward, backward, inputs, weights = (
        Action(kind, stage, microbatch) for kind in ("F", "B", "I", "W")
    )
    missing = f"is missing on rank {owner}"
    if forward not in places:
        yield JobProblem(str(forward), missing)
    halves = [half for half in (inputs, weights) if half in places]
    if backward in places:
        for half in halves:
            yield JobProblem(
                str(half),
                f"is part of {backward}, which is there too",
                _format_position(*places[half][0]),
            )
    elif not halves:
        yield JobProblem(str(backward), f"{missing}, and so are {inputs} and {weights}")
    elif len(halves) == 1:
        half, other = inputs, weights
        if halves == [weights]:
            half, other = weights, inputs
        yield JobProblem(
            str(other),
            f"{missing}; {half} is half of a backward",
            _format_position(*places[half][0]),
        )


def _find_deadlocked_ranks(schedule: Schedule) -> Iterator[JobProblem]:
    """A problem for each rank that never ends: where it stands, and where what it waits for
    would be made."""
    # Any seconds do: who waits for ever follows from the order alone.
    costs: dict[ActionKind, Seconds] = {"F": 1, "B": 1, "I": 1, "W": 1}
    paper_run = simulate_schedule(schedule, [costs] * schedule.num_stages)
    if not paper_run.stuck:
        return
    results = ActionResults(schedule.num_stages, schedule.num_microbatches)
    makers: dict[int, _RankAndIndex] = {}
    for rank, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            makers[results.output_index_of(action)] = rank, position
    # An action that ran has a span: a stuck rank stands at the first one without.
    standing = {rank: len(paper_run.spans_s[rank]) for rank in paper_run.stuck}
    for rank, needed in paper_run.stuck.items():
        maker_rank, position = makers[results.output_index_of(needed)]
        maker = schedule.actions[maker_rank][position]
        problem = f"waits for {maker}, which comes later, at position {position + 1}"
        if maker_rank != rank:
            stop = standing[maker_rank]
            problem = (
                f"waits for {maker} of {_format_position(maker_rank, position)}, and rank"
                f" {maker_rank} stands at position {stop + 1}, {schedule.actions[maker_rank][stop]}"
            )
        yield JobProblem(
            str(schedule.actions[rank][standing[rank]]),
            problem,
            _format_position(rank, standing[rank]),
        )


def _find_ranks_over_in_flight_limit(schedule: Schedule, limit: int) -> Iterator[JobProblem]:
    for rank, peak in enumerate(count_peak_in_flight(schedule).per_rank):
        if peak > limit:
            yield JobProblem(
                f"rank {rank}", f"holds up to {peak} microbatches at once, and {limit} may be"
            )
