"""How long a schedule takes: every action begins when its rank is free and its input has
arrived."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from phalanx.core.errors import LayoutError
from phalanx.plan.pipeline.order import Seconds, run
from phalanx.plan.pipeline.schedule import Kind, Schedule


@dataclass(frozen=True)
class StageCosts:
    """Seconds of one microbatch in one stage; B takes both halves of the backward."""

    forward_s: Seconds
    backward_input_s: Seconds
    backward_weight_s: Seconds

    @property
    def by_kind_s(self) -> dict[Kind, Seconds]:
        whole = self.backward_input_s + self.backward_weight_s
        return {
            "F": self.forward_s,
            "B": whole,
            "I": self.backward_input_s,
            "W": self.backward_weight_s,
        }

    @property
    def unsplit(self) -> StageCosts:
        """Where the half of the input does both, as in compiled blocks: W takes nothing."""
        return StageCosts(self.forward_s, self.backward_input_s + self.backward_weight_s, 0)


@dataclass(frozen=True)
class Timeline:
    """A schedule with the (begin, end) of each action, from the same zero on all ranks:
    simulated or measured."""

    schedule: Schedule
    spans_s: tuple[tuple[tuple[Seconds, Seconds], ...], ...]

    @property
    def step_s(self) -> Seconds:
        """From zero to the end of the last action."""
        return max((end for row in self.spans_s for _, end in row), default=0.0)

    def busy_s(self, rank: int) -> Seconds:
        return sum((end - begin for begin, end in self.spans_s[rank]), start=Fraction(0))

    def bubble_of(self, rank: int) -> Seconds:
        """Which part of the step `rank` computes nothing, 0 to 1."""
        return 1 - self.busy_s(rank) / self.step_s if self.step_s else Fraction(0)

    @property
    def bubble(self) -> Seconds:
        """Which part of all ranks' time is idle: the mean over ranks."""
        shares = [self.bubble_of(rank) for rank in range(self.schedule.num_ranks)]
        return sum(shares, start=Fraction(0)) / len(shares)

    def to_json(self) -> dict[str, Any]:
        spans = [[[float(begin), float(end)] for begin, end in row] for row in self.spans_s]
        return {"schedule": self.schedule.to_json(), "spans_s": spans}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Timeline:
        spans = tuple(tuple((begin, end) for begin, end in row) for row in body["spans_s"])
        return cls(Schedule.from_json(body["schedule"]), spans)


def simulate(schedule: Schedule, costs: Sequence[StageCosts], send_s: Seconds = 0) -> Timeline:
    """The timeline of one step, exact where costs are fractions.

    `costs` has one entry per stage. `send_s` is what a microbatch's activations, or their gradient,
    take from one rank to another: beside computation, and one after the other from any rank to any
    other. Within a rank nothing is sent. Expects a schedule with which `check` finds no fault;
    raises LayoutError for one that never ends.
    """
    assert len(costs) == schedule.num_stages, "one StageCosts per stage"
    found = run(schedule, [cost.by_kind_s for cost in costs], send_s)
    if found.stuck:
        rank, needed = next(iter(found.stuck.items()))
        raise LayoutError(f"schedule {schedule.name} never ends: rank {rank} waits for {needed}")
    return Timeline(schedule, found.spans_s)
