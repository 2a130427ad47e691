"""The one loop that runs a schedule on paper: what waits for what, when everything begins, and
who waits for ever."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from phalanx.plan.pipeline.schedule import Action, Kind, Schedule

Seconds = float | Fraction

NOTHING = -1


@dataclass(frozen=True)
class Results:
    """What actions make and need, as numbers: a schedule has a hundred thousand of them.

    F makes the input of the next stage. B and I make the gradient that the stage before needs: the
    same one, whether its W came along or not. W makes nothing that anybody waits for.
    """

    num_stages: int
    num_microbatches: int

    def __len__(self) -> int:
        return 2 * self.num_stages * self.num_microbatches

    def made_by(self, action: Action) -> int:
        number = action.stage * self.num_microbatches + action.microbatch
        if action.kind == "W":
            return NOTHING
        return number if action.kind == "F" else number + len(self) // 2

    def needed_by(self, action: Action) -> tuple[int, int]:
        """What its own stage, and what a neighbouring one, must have made before."""
        forward = action.stage * self.num_microbatches + action.microbatch
        gradient = forward + len(self) // 2
        if action.kind == "W":
            return gradient, NOTHING
        if action.kind == "F":
            return NOTHING, forward - self.num_microbatches if action.stage else NOTHING
        is_last = action.stage + 1 == self.num_stages
        return forward, NOTHING if is_last else gradient + self.num_microbatches

    def name(self, number: int) -> Action:
        """F or I of the stage that makes it."""
        half = len(self) // 2
        return Action("F" if number < half else "I", *divmod(number % half, self.num_microbatches))


@dataclass(frozen=True)
class Run:
    """`spans_s`: (begin, end) of each action that could run, by rank.

    `stuck`: rank -> what it waits for, for ever.
    """

    spans_s: tuple[tuple[tuple[Seconds, Seconds], ...], ...]
    stuck: dict[int, Action]


def run(schedule: Schedule, seconds: Sequence[Mapping[Kind, Seconds]], send_s: Seconds = 0) -> Run:
    """Let every rank go on as soon as it is free and its inputs have arrived, until all are done or
    none can move.

    `seconds` by stage and kind. Expects that `check` found every action once, where it belongs.
    """
    return _Runner(schedule, seconds, send_s).run()


class _Runner:
    def __init__(
        self, schedule: Schedule, seconds: Sequence[Mapping[Kind, Seconds]], send_s: Seconds
    ) -> None:
        self.schedule, self.seconds, self.send_s = schedule, seconds, send_s
        self.results = Results(schedule.num_stages, schedule.num_microbatches)
        self.arrived: list[Seconds | None] = [None] * len(
            self.results
        )  # at the neighbour that needs it
        self.waiting: dict[int, list[int]] = {}  # result -> ranks
        self.link_free: dict[tuple[int, int], Seconds] = {}
        self.spans: list[list[tuple[Seconds, Seconds]]] = [[] for _ in schedule.actions]

    def run(self) -> Run:
        ready = deque(range(self.schedule.num_ranks))
        while ready:
            rank = ready.popleft()
            missing = self._advance(rank, ready)
            if missing != NOTHING:
                self.waiting.setdefault(missing, []).append(rank)
        stuck = {
            rank: self.results.name(number)
            for number, ranks in self.waiting.items()
            for rank in ranks
        }
        return Run(tuple(map(tuple, self.spans)), dict(sorted(stuck.items())))

    def _advance(self, rank: int, ready: deque[int]) -> int:
        """Do what can be done; the result that `rank` misses then.

        Ranks that waited for something become `ready`.
        """
        row, spans, arrived = self.schedule.actions[rank], self.spans[rank], self.arrived
        clock = spans[-1][1] if spans else 0
        while len(spans) < len(row):
            action = row[len(spans)]
            own, other = self.results.needed_by(action)
            begin = clock
            if other != NOTHING:
                arrival = arrived[other]
                if arrival is None:
                    return other
                begin = max(begin, arrival)
            if own != NOTHING and arrived[own] is None:
                return own
            clock = begin + self.seconds[action.stage][action.kind]
            spans.append((begin, clock))
            made = self.results.made_by(action)
            if made != NOTHING:
                arrived[made] = self._arrival(rank, action, clock)
                ready += self.waiting.pop(made, ())
        return NOTHING

    def _arrival(self, rank: int, action: Action, end: Seconds) -> Seconds:
        """Sends go on beside computation, but one after the other from one rank to another."""
        neighbour = action.stage + (1 if action.kind == "F" else -1)
        if not self.send_s or not 0 <= neighbour < self.schedule.num_stages:
            return end
        receiver = self.schedule.rank_of_stage[neighbour]
        if receiver == rank:
            return end
        arrival = max(end, self.link_free.get((rank, receiver), end)) + self.send_s
        self.link_free[rank, receiver] = arrival
        return arrival
