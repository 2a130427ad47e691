"""A schedule run on paper: when every action begins, which ranks wait for ever, how long a step
takes, and how many microbatches are in flight.

An action begins when its rank is free and its input has arrived. Microbatches in flight follow from
the order alone, not from the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import chain
from operator import itemgetter, sub
from typing import Any

from phalanx.core.errors import LayoutError
from phalanx.plan.pipeline.schedule import Action, ActionKind, Schedule

# Fractions where equal times must be equal: sums of floats in another order are not.
Seconds = float | Fraction
NO_RESULT = -1  # in place of the number of a result
NO_LINK = -1  # in place of the number of a link


@dataclass(frozen=True)
class ActionResults:
    """The inputs and outputs of actions as numbers: a schedule has a hundred thousand of them.

    F makes the input of the next stage. B and I make the gradient that the stage before needs: the
    same one, whether its W came along or not. W makes nothing that another action waits for.
    """

    num_stages: int
    num_microbatches: int

    def __len__(self) -> int:
        return 2 * self.num_stages * self.num_microbatches

    def output_index_of(self, action: Action) -> int:
        """The number of the result that an action makes; NO_RESULT for W."""
        number = action.stage * self.num_microbatches + action.microbatch
        if action.kind == "W":
            return NO_RESULT
        if action.kind == "F":
            return number
        return number + len(self) // 2

    def input_indices_of(self, action: Action) -> tuple[int, int]:
        """The results that an action needs: of its own stage, and of a neighbouring one; NO_RESULT
        where it needs none."""
        forward = action.stage * self.num_microbatches + action.microbatch
        gradient = forward + len(self) // 2
        if action.kind == "W":
            return gradient, NO_RESULT
        received = NO_RESULT
        if action.kind == "F":
            if action.stage > 0:
                received = forward - self.num_microbatches
            return NO_RESULT, received
        if action.stage + 1 < self.num_stages:
            received = gradient + self.num_microbatches
        return forward, received

    def action_of_result(self, number: int) -> Action:
        """The action, F or I, that makes result `number`."""
        half = len(self) // 2
        kind: ActionKind = "I"
        if number < half:
            kind = "F"
        stage, microbatch = divmod(number % half, self.num_microbatches)
        return Action(kind, stage, microbatch)


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
    return _ScheduleSimulator(schedule, seconds, send_s).run()


class _ScheduleSimulator:
    def __init__(
        self, schedule: Schedule, seconds: Sequence[Mapping[ActionKind, Seconds]], send_s: Seconds
    ) -> None:
        self.schedule, self.seconds, self.send_s = schedule, seconds, send_s
        self.results = ActionResults(schedule.num_stages, schedule.num_microbatches)
        # When each result is at the neighbour that needs it.
        self.arrived: list[Seconds | None] = [None] * len(self.results)
        self.spans_by_rank: list[list[tuple[Seconds, Seconds]]] = [[] for _ in schedule.actions]
        self.waiting: dict[int, list[int]] = {}  # result -> ranks

    def run(self) -> SimulationResult:
        """Does all actions that can be done. Inputs and outputs are those of `ActionResults`,
        written out: this loop is most of the time that planning a pipeline takes."""
        seconds, send_s = self.seconds, self.send_s
        num_microbatches, last_stage = self.results.num_microbatches, self.results.num_stages - 1
        first_gradient = self.results.num_stages * num_microbatches
        arrived, waiting = self.arrived, self.waiting
        forward_links, backward_links = self._number_links()
        # Until when a message is on its way on a link.
        link_free: list[Seconds] = [0] * (2 * len(forward_links))
        # A rank goes on until it misses a result, and is looked at again only once that is there:
        # each action is visited a few times, and not each once per round over all ranks.
        ready = deque(range(self.schedule.num_ranks))
        while ready:
            rank = ready.popleft()
            row, spans = self.schedule.actions[rank], self.spans_by_rank[rank]
            clock: Seconds = spans[-1][1] if spans else 0
            for position in range(len(spans), len(row)):
                kind, stage, microbatch = row[position]
                forward = stage * num_microbatches + microbatch
                gradient = first_gradient + forward
                own_input, received_input, output = forward, NO_RESULT, gradient
                if kind == "F":
                    own_input, output = NO_RESULT, forward
                    if stage:
                        received_input = forward - num_microbatches
                elif kind == "W":
                    own_input, output = gradient, NO_RESULT
                elif stage < last_stage:
                    received_input = gradient + num_microbatches
                start = clock
                if received_input != NO_RESULT:
                    arrival = arrived[received_input]
                    if arrival is None:
                        waiting.setdefault(received_input, []).append(rank)
                        break
                    if arrival > start:
                        start = arrival
                if own_input != NO_RESULT and arrived[own_input] is None:
                    # Nobody else makes it: it comes later in this row, which never goes on.
                    waiting.setdefault(own_input, []).append(rank)
                    break
                clock = start + seconds[stage][kind]
                spans.append((start, clock))
                if output == NO_RESULT:
                    continue
                arrived[output] = clock
                if send_s:
                    link = forward_links[stage] if kind == "F" else backward_links[stage]
                    if link != NO_LINK:
                        # One message after the other: this leaves when the one before has arrived.
                        if link_free[link] < clock:
                            link_free[link] = clock
                        link_free[link] += send_s
                        arrived[output] = link_free[link]
                if output in waiting:
                    # Popped: a rank waits for one result at a time, and is looked at once for it.
                    ready += waiting.pop(output)
        return SimulationResult(tuple(map(tuple, self.spans_by_rank)), self._find_stuck_ranks())

    def _find_stuck_ranks(self) -> dict[int, Action]:
        """Rank -> the action that makes the result it still waits for, in the order of ranks."""
        stuck = {}
        for number, ranks in self.waiting.items():
            for rank in ranks:
                stuck[rank] = self.results.action_of_result(number)
        return dict(sorted(stuck.items()))

    def _number_links(self) -> tuple[list[int], list[int]]:
        """For each stage the number of the link by which its output leaves, of a forward and of a
        backward: one for each pair of ranks and direction. NO_LINK where it stays on its rank."""
        numbers: dict[tuple[int, int], int] = {}
        rank_of_stage, last_stage = self.schedule.rank_of_stage, self.results.num_stages - 1
        links: tuple[list[int], list[int]] = ([], [])
        for stage, rank in enumerate(rank_of_stage):
            for links_of_kind, neighbour in zip(links, (stage + 1, stage - 1), strict=True):
                number = NO_LINK
                if 0 <= neighbour <= last_stage and rank_of_stage[neighbour] != rank:
                    number = numbers.setdefault((rank, rank_of_stage[neighbour]), len(numbers))
                links_of_kind.append(number)
        return links


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
