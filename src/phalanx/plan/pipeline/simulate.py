"""A schedule run on paper: when every action begins, which ranks wait for ever, how long a step
takes, and how many microbatches are in flight.

An action begins when its rank is free and its input has arrived. Microbatches in flight follow from
the order alone, not from the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import chain
from operator import itemgetter, sub
from typing import Any

from phalanx.core.errors import LayoutError
from phalanx.plan.pipeline.execution import (
    ACTION_KINDS,
    NO_LINK,
    NO_RESULT,
    ExecutionOrder,
    find_execution_order,
)
from phalanx.plan.pipeline.schedule import Action, ActionKind, Schedule

# Fractions where equal times must be equal: sums of floats in another order are not.
Seconds = float | Fraction


@dataclass(frozen=True)
class SimulationResult:
    """The outcome of running a schedule on paper.

    `spans_s`: (begin, end) of each action that could run, by rank. `stuck`: rank -> the result it
    waits for, for ever.
    """

    spans_s: tuple[tuple[tuple[Seconds, Seconds], ...], ...]
    stuck: dict[int, Action]


def simulate_schedule(
    schedule: Schedule, seconds: Sequence[Mapping[ActionKind, Seconds]], send_s: Seconds = 0
) -> SimulationResult:
    """Runs a schedule on paper: every rank goes on as soon as it is free and its inputs have
    arrived, until all are done or none can move.

    `seconds` by stage and kind. Expects that `check` found every action once, where it belongs.
    """
    order = find_execution_order(schedule)
    spans_by_rank: list[list[tuple[Seconds, Seconds]]] = [[] for _ in schedule.actions]
    _run_actions(order, seconds, send_s, spans_by_rank)
    return SimulationResult(tuple(map(tuple, spans_by_rank)), order.stuck)


def compute_step_s(
    order: ExecutionOrder, seconds: Sequence[Mapping[ActionKind, Seconds]], send_s: Seconds = 0
) -> Seconds:
    """Seconds until the last action of a schedule ends, as `simulate_schedule` has it."""
    return max(_run_actions(order, seconds, send_s, None), default=0.0)


def _run_actions(
    order: ExecutionOrder,
    seconds: Sequence[Mapping[ActionKind, Seconds]],
    send_s: Seconds,
    spans_by_rank: list[list[tuple[Seconds, Seconds]]] | None,
) -> list[Seconds]:
    """When the last action of each rank ends; (begin, end) of each goes to `spans_by_rank`. This
    loop is most of the time that planning a long pipeline takes."""
    seconds_of_part = [of_kind.get(kind, 0) for of_kind in seconds for kind in ACTION_KINDS]
    clocks: list[Seconds] = [0] * order.num_ranks
    # When each result is at the neighbour that needs it, and until when each link is busy.
    arrived: list[Seconds] = [0] * order.num_results
    link_free: list[Seconds] = [0] * order.num_links
    for rank, part, received, output, link in order.steps:
        start = clocks[rank]
        if received != NO_RESULT and arrived[received] > start:
            start = arrived[received]
        clocks[rank] = end = start + seconds_of_part[part]
        if output != NO_RESULT:
            arrived[output] = end
            if link != NO_LINK and send_s:
                # One message after the other: this one leaves when the one before has arrived.
                leaves = link_free[link] if link_free[link] > end else end
                arrived[output] = link_free[link] = leaves + send_s
        if spans_by_rank is not None:
            spans_by_rank[rank].append((start, end))
    return clocks


@dataclass(frozen=True)
class StageCosts:
    """Seconds of one microbatch in one stage; B takes both halves of the backward."""

    forward_s: Seconds
    backward_input_s: Seconds
    backward_weight_s: Seconds

    @property
    def seconds(self) -> Seconds:
        """Seconds of the forward and both halves of the backward."""
        return self.forward_s + self.backward_input_s + self.backward_weight_s

    @property
    def by_kind_s(self) -> dict[ActionKind, Seconds]:
        backward_s = self.backward_input_s + self.backward_weight_s
        return {
            "F": self.forward_s,
            "B": backward_s,
            "I": self.backward_input_s,
            "W": self.backward_weight_s,
        }

    @property
    def without_split_backward(self) -> StageCosts:
        """The costs where the half of the input does both, as in compiled blocks: W takes
        nothing."""
        return StageCosts(self.forward_s, self.backward_input_s + self.backward_weight_s, 0)


@dataclass(frozen=True)
class Timeline:
    """A schedule with the (begin, end) of each action, from the same zero on all ranks:
    simulated or measured."""

    schedule: Schedule
    spans_s: tuple[tuple[tuple[Seconds, Seconds], ...], ...]

    @cached_property
    def step_s(self) -> Seconds:
        """Seconds from zero to the end of the last action."""
        return max(map(itemgetter(1), chain.from_iterable(self.spans_s)), default=0.0)

    def busy_s(self, rank: int) -> Seconds:
        """Seconds in which `rank` computes."""
        # From a Fraction, and not 0.0, which would make floats of exact sums.
        spans = self.spans_s[rank]
        return sum(map(sub, map(itemgetter(1), spans), map(itemgetter(0), spans)), Fraction(0))

    def bubble_of_rank(self, rank: int) -> Seconds:
        """The part of the step in which `rank` computes nothing, 0 to 1."""
        if not self.step_s:
            return Fraction(0)
        return 1 - self.busy_s(rank) / self.step_s

    @property
    def bubble(self) -> Seconds:
        """The part of all ranks' time that is idle, 0 to 1: the mean over ranks."""
        shares = [self.bubble_of_rank(rank) for rank in range(self.schedule.num_ranks)]
        return sum(shares, start=Fraction(0)) / len(shares)

    def to_json(self) -> dict[str, Any]:
        spans = [[[float(start), float(end)] for start, end in row] for row in self.spans_s]
        return {"schedule": self.schedule.to_json(), "spans_s": spans}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Timeline:
        rows = []
        for row in body["spans_s"]:
            rows.append(tuple((start, end) for start, end in row))
        return cls(Schedule.from_json(body["schedule"]), tuple(rows))


def simulate_timeline(
    schedule: Schedule, costs: Sequence[StageCosts], send_s: Seconds = 0
) -> Timeline:
    """The timeline of one step, exact where costs are fractions.

    `costs` has one entry per stage. `send_s` is what a microbatch's activations, or their gradient,
    take from one rank to another: beside computation, and one after the other from any rank to any
    other. Within a rank nothing is sent. Expects a schedule with which `check` finds no fault;
    raises LayoutError for one that never ends.
    """
    assert len(costs) == schedule.num_stages, "one StageCosts per stage"
    paper_run = simulate_schedule(schedule, [cost.by_kind_s for cost in costs], send_s)
    if paper_run.stuck:
        rank, needed = next(iter(paper_run.stuck.items()))
        raise LayoutError(f"schedule {schedule.name} never ends: rank {rank} waits for {needed}")
    return Timeline(schedule, paper_run.spans_s)


@dataclass(frozen=True)
class InFlightPeaks:
    """Peaks, in microbatches of one stage, from their forward until their B or W."""

    per_stage: tuple[int, ...]
    per_rank: tuple[int, ...]
    """Over all stages of the rank together."""
    only_for_weights_per_rank: tuple[int, ...]
    """At most so many at once of which no more than a W is left, so that less than all
    activations is kept."""


@dataclass
class _InFlightMicrobatches:
    """The microbatches that one rank holds at one moment, by stage: those whose activations are
    all kept, and those of which only a W is left."""

    before_backward: dict[int, int]
    for_weights: dict[int, int]

    def count_action(self, action: Action) -> None:
        """Counts what `action` takes up or releases."""
        stage = action.stage
        if action.kind == "F":
            self.before_backward[stage] += 1
        elif action.kind == "B":
            self.before_backward[stage] -= 1
        elif action.kind == "I":
            self.before_backward[stage] -= 1
            self.for_weights[stage] += 1
        else:
            self.for_weights[stage] -= 1


def count_peak_in_flight(schedule: Schedule) -> InFlightPeaks:
    """The peaks of microbatches in flight in a schedule."""
    per_stage = [0] * schedule.num_stages
    per_rank, for_weights = [0] * schedule.num_ranks, [0] * schedule.num_ranks
    for rank in range(schedule.num_ranks):
        for holding in _replay_in_flight(schedule, rank):
            for stage, count in holding.before_backward.items():
                per_stage[stage] = max(per_stage[stage], count + holding.for_weights[stage])
            waiting = sum(holding.for_weights.values())
            per_rank[rank] = max(per_rank[rank], sum(holding.before_backward.values()) + waiting)
            for_weights[rank] = max(for_weights[rank], waiting)
    return InFlightPeaks(tuple(per_stage), tuple(per_rank), tuple(for_weights))


def compute_peak_activation_bytes(
    schedule: Schedule, activation_bytes: Sequence[int], weight_input_bytes: Sequence[int]
) -> tuple[int, ...]:
    """Peak bytes of each rank: activations of its stages' microbatches until B or I, and what W
    reads between I and W."""
    peaks = []
    for row in schedule.actions:
        held_bytes = peak = 0
        for kind, stage, _ in row:
            if kind == "F":
                held_bytes += activation_bytes[stage]
                if held_bytes > peak:
                    peak = held_bytes
            elif kind == "B":
                held_bytes -= activation_bytes[stage]
            elif kind == "I":
                # What W reads may be more than what was kept: recomputed for it.
                held_bytes += weight_input_bytes[stage] - activation_bytes[stage]
                if held_bytes > peak:
                    peak = held_bytes
            else:
                held_bytes -= weight_input_bytes[stage]
        peaks.append(peak)
    return tuple(peaks)


def _replay_in_flight(schedule: Schedule, rank: int) -> Iterator[_InFlightMicrobatches]:
    """The holdings of `rank` after each of its actions; always the same object."""
    stages = {action.stage for action in schedule.actions[rank]}
    holding = _InFlightMicrobatches(dict.fromkeys(stages, 0), dict.fromkeys(stages, 0))
    for action in schedule.actions[rank]:
        holding.count_action(action)
        yield holding
