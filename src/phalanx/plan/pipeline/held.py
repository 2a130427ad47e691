"""Memory in flight: the microbatches whose activations a rank holds.

It follows from the order, not from the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx.plan.pipeline.schedule import Action, Schedule


@dataclass(frozen=True)
class InFlight:
    """Peaks, in microbatches of one stage, from their forward until their B or W."""

    per_stage: tuple[int, ...]
    per_rank: tuple[int, ...]
    """Over all stages of the rank together."""
    only_for_weights_per_rank: tuple[int, ...]
    """At most so many at once of which no more than a W is left, so that less than all
    activations is kept."""


@dataclass
class _Holding:
    """One rank at one moment, by stage."""

    whole: dict[int, int]
    for_weights: dict[int, int]

    def after(self, action: Action) -> None:
        stage = action.stage
        if action.kind == "F":
            self.whole[stage] += 1
        elif action.kind == "B":
            self.whole[stage] -= 1
        elif action.kind == "I":
            self.whole[stage] -= 1
            self.for_weights[stage] += 1
        else:
            self.for_weights[stage] -= 1


def in_flight(schedule: Schedule) -> InFlight:
    per_stage = [0] * schedule.num_stages
    per_rank, for_weights = [0] * schedule.num_ranks, [0] * schedule.num_ranks
    for rank in range(schedule.num_ranks):
        for holding in _moments(schedule, rank):
            for stage, count in holding.whole.items():
                per_stage[stage] = max(per_stage[stage], count + holding.for_weights[stage])
            waiting = sum(holding.for_weights.values())
            per_rank[rank] = max(per_rank[rank], sum(holding.whole.values()) + waiting)
            for_weights[rank] = max(for_weights[rank], waiting)
    return InFlight(tuple(per_stage), tuple(per_rank), tuple(for_weights))


def peak_bytes(
    schedule: Schedule, activation_bytes: Sequence[int], weight_input_bytes: Sequence[int]
) -> tuple[int, ...]:
    """Of each rank: what its stages keep of a microbatch, all of it until B or I, and what W
    reads between I and W."""
    peaks = []
    for rank in range(schedule.num_ranks):
        peaks.append(
            max(
                (
                    sum(count * activation_bytes[stage] for stage, count in holding.whole.items())
                    + sum(
                        count * weight_input_bytes[stage]
                        for stage, count in holding.for_weights.items()
                    )
                    for holding in _moments(schedule, rank)
                ),
                default=0,
            )
        )
    return tuple(peaks)


def _moments(schedule: Schedule, rank: int) -> Iterator[_Holding]:
    """After each action of `rank`; always the same object."""
    stages = {action.stage for action in schedule.actions[rank]}
    holding = _Holding(dict.fromkeys(stages, 0), dict.fromkeys(stages, 0))
    for action in schedule.actions[rank]:
        holding.after(action)
        yield holding
