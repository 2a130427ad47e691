"""Pipeline: how a plan cuts its model into stages and in which order they run.

Part of a Plan where pp > 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from phalanx.plan.pipeline.cut import StageCut
from phalanx.plan.pipeline.execution import ExecutionOrder, find_execution_order
from phalanx.plan.pipeline.generate import generate_schedule
from phalanx.plan.pipeline.schedule import Action, Schedule, place_stages_in_loop, place_stages_in_v
from phalanx.plan.pipeline.simulate import (
    StageCosts,
    Timeline,
    compute_step_s,
    simulate_timeline,
)

V_SHAPED_SCHEDULES = ("zb-v", "dualpipe-v")
SCHEDULE_FROM_FILE = "file"
# Microbatches in flight do not grow beyond a few times the stages, and a schedule of thousands
# takes seconds to simulate: longer ones are planned with fewer microbatches.
MAX_SIMULATED_ACTIONS = 4096


@dataclass(frozen=True)
class Pipeline:
    """The pipeline of a plan.

    `schedule_name` is one of SCHEDULE_NAMES, or "file": then `rows` are its actions, rank by rank
    ("0F0,0F1,0B0").

    `costs`: predicted seconds of each stage for one microbatch, on any one scale; empty where
    nobody can say. `first_stage` and `last_stage`: modules outside the blocks that these hold
    besides what follows from the order in which a module registers its parts. `rank_memory`:
    predicted bytes of each pipeline rank by category, as a plan's candidates have them for the rank
    that needs most.
    """

    schedule_name: str
    num_ranks: int
    num_microbatches: int
    stages: StageCut
    rank_of_stage: tuple[int, ...]
    rows: tuple[str, ...] = ()
    costs: tuple[StageCosts, ...] = ()
    first_stage: tuple[str, ...] = ()
    last_stage: tuple[str, ...] = ()
    rank_memory: tuple[dict[str, int], ...] = ()

    @property
    def predicted_rank_bytes(self) -> tuple[int, ...]:
        """Predicted bytes of each pipeline rank, beyond interpreter and torch; empty where none
        were predicted."""
        return tuple(sum(memory.values()) for memory in self.rank_memory)

    @property
    def num_stages(self) -> int:
        return len(self.rank_of_stage)

    @property
    def stages_per_rank(self) -> int:
        """Stages on each rank of a named schedule."""
        return self.num_stages // self.num_ranks

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """The stages of a pipeline rank, in ascending order."""
        return self._stages_by_rank.get(rank, ())

    @cached_property
    def _stages_by_rank(self) -> dict[int, tuple[int, ...]]:
        stages: dict[int, tuple[int, ...]] = {}
        for stage, rank in enumerate(self.rank_of_stage):
            stages[rank] = (*stages.get(rank, ()), stage)
        return stages

    def schedule(self) -> Schedule:
        """The actions of each rank, in order."""
        if self.rows:
            rows = tuple(_parse_action_row(row) for row in self.rows)
            return Schedule(self.schedule_name, self.num_microbatches, self.rank_of_stage, rows)
        return _generate_cached_schedule(
            self.schedule_name, self.num_ranks, self.num_microbatches, self.stages_per_rank
        )

    def schedule_of_peaks(self) -> Schedule:
        """A schedule in which each rank holds as much at once as in `schedule`: of fewer
        microbatches, where those that are left out repeat the others."""
        number = self.num_microbatches
        # GPipe keeps the activations of every microbatch.
        if not self.rows and self.schedule_name != "gpipe":
            number = count_microbatches_to_simulate(self.num_ranks, self.stages_per_rank, number)
        return self.change_num_microbatches(number).schedule()

    def change_num_microbatches(self, num_microbatches: int) -> Pipeline:
        """The same stages for a step of another number of microbatches.

        Not for a schedule from a file.
        """
        return replace(self, num_microbatches=num_microbatches)

    def timeline(self) -> Timeline | None:
        """One step as it is predicted, on the scale of `costs`; None if these are not known."""
        if not self.costs:
            return None
        # The memory takes no part in it, and has dicts, which a cache cannot look up.
        return _simulate_pipeline_cached(replace(self, rank_memory=()))

    def estimate_bubble(self) -> float | None:
        """The bubble of `timeline`, 0 to 1, as `estimate_step_s` has it; None if the costs are not
        known."""
        if not self.costs:
            return None
        costs = [StageCosts(*map(float, astuple(cost))) for cost in self.costs]
        step_s = self.estimate_step_s(costs, self.num_microbatches)
        if not step_s:
            return 0.0
        mean_s = sum(float(cost.seconds) for cost in costs) / self.num_ranks
        return 1 - self.num_microbatches * mean_s / step_s

    def estimate_step_s(
        self, costs: Sequence[StageCosts], num_microbatches: int, send_s: float = 0.0
    ) -> float:
        """Seconds of a step of so many microbatches with such stages.

        Of a named schedule with very many only the first and last ones are simulated. All those
        between add the same each: what two simulations differ by, and no less than what the busiest
        rank computes. Within 2 % of simulating all (0.8 % with one stage a rank), for stages
        that differ by up to 30 % and messages of up to 0.3 of a forward. `send_s`: of one message.
        """

        seconds = [cost.by_kind_s for cost in costs]
        if self.rows:
            return float(simulate_timeline(self.schedule(), costs, send_s).step_s)

        def simulate_step_s(num_microbatches: int) -> float:
            order = _find_cached_execution_order(
                self.schedule_name, self.num_ranks, num_microbatches, self.stages_per_rank
            )
            return float(compute_step_s(order, seconds, send_s))

        more = count_microbatches_to_simulate(
            self.num_ranks, self.stages_per_rank, num_microbatches
        )
        if self.stages_per_rank > 1:
            # It takes longer until their steps repeat.
            more = min(more + self.num_ranks, num_microbatches)
        step_s = simulate_step_s(more)
        if more == num_microbatches:
            return step_s
        fewer = more - self.num_ranks
        fewer_step_s = simulate_step_s(fewer)
        busy_s = [0.0] * self.num_ranks
        for rank, cost in zip(self.rank_of_stage, costs, strict=True):
            busy_s[rank] += float(cost.seconds)
        added_s = max(*busy_s, (step_s - fewer_step_s) / (more - fewer))
        return step_s + (num_microbatches - more) * added_s

    def to_json(self) -> dict[str, Any]:
        return {
            "schedule_name": self.schedule_name,
            "num_ranks": self.num_ranks,
            "num_microbatches": self.num_microbatches,
            "stages": self.stages.to_json(),
            "rank_of_stage": list(self.rank_of_stage),
            "rows": list(self.rows),
            "costs": [list(map(float, astuple(cost))) for cost in self.costs],
            "first_stage": list(self.first_stage),
            "last_stage": list(self.last_stage),
            "rank_memory": list(self.rank_memory),
            "rank_bytes": list(self.predicted_rank_bytes),
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Pipeline:
        return cls(
            body["schedule_name"],
            body["num_ranks"],
            body["num_microbatches"],
            StageCut.from_json(body["stages"]),
            tuple(body["rank_of_stage"]),
            tuple(body["rows"]),
            tuple(StageCosts(*cost) for cost in body["costs"]),
            tuple(body["first_stage"]),
            tuple(body["last_stage"]),
            tuple(body.get("rank_memory", ())),
        )


def count_microbatches_to_simulate(
    num_ranks: int, stages_per_rank: int, num_microbatches: int
) -> int:
    """Microbatches with which a named schedule is in the state that all further ones repeat: all of
    them where a simulation of all is quick.

    A multiple of the ranks unless it is all of them, as interleaved schedules want.
    """
    num_stages = num_ranks * stages_per_rank
    enough = 2 * num_ranks
    while num_stages * enough < MAX_SIMULATED_ACTIONS // 4:
        enough += num_ranks
    if num_stages * num_microbatches <= MAX_SIMULATED_ACTIONS or num_microbatches <= enough:
        return num_microbatches
    return enough


def _parse_action_row(row: str) -> tuple[Action, ...]:
    return tuple(map(Action.from_text, row.split(",")))


# A plan asks for one schedule and its timeline again and again, and they may have a hundred
# thousand actions.
_generate_cached_schedule = lru_cache(maxsize=8)(generate_schedule)


@lru_cache(maxsize=8)
def _find_cached_execution_order(
    name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> ExecutionOrder:
    schedule = _generate_cached_schedule(name, num_ranks, num_microbatches, stages_per_rank)
    order = find_execution_order(schedule)
    assert not order.stuck, "named schedules end"
    return order


@lru_cache(maxsize=4)
def _simulate_pipeline_cached(pipeline: Pipeline) -> Timeline:
    return simulate_timeline(pipeline.schedule(), pipeline.costs)


def map_stages_to_ranks(name: str, num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """The rank of each stage of a named schedule."""
    if name in V_SHAPED_SCHEDULES:
        return place_stages_in_v(num_ranks, stages_per_rank)
    return place_stages_in_loop(num_ranks, stages_per_rank)


def build_named_pipeline(
    name: str, num_ranks: int, num_microbatches: int, stages: StageCut, **more: Any
) -> Pipeline:
    """A pipeline with one of the named schedules and as many stages as are given."""
    num_stages = len(stages.num_blocks)
    placement = map_stages_to_ranks(name, num_ranks, num_stages // num_ranks)
    return Pipeline(name, num_ranks, num_microbatches, stages, placement, **more)
