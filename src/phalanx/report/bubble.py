"""A measured pipeline, explained: how much its ranks wait, whether that is too much, and what to
do about it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from phalanx.core.errors import LayoutError
from phalanx.core.files import read_whole_regular_file
from phalanx.job.schema import Job
from phalanx.job.shapes.stored import parse_stored_shape
from phalanx.observe.events import PipelineMeasured
from phalanx.plan.pipeline.bubble import (
    MAX_BUBBLE_WITHOUT_WARNING,
    MAX_SIMULATED_ACTIONS,
    MIN_UNEVEN_RATIO,
    find_microbatches_for_small_bubble,
    predict_bubble_with_halved_stages,
)
from phalanx.plan.pipeline.costs import compute_model_part_costs
from phalanx.plan.pipeline.cut import LayerCosts, StageCut
from phalanx.plan.pipeline.pipeline_plan import Pipeline
from phalanx.plan.pipeline.simulate import StageCosts, Timeline
from phalanx.plan.pipeline.trace import (
    ProposedCut,
    propose_cut_from_measurement,
    scale_timeline_to_measurement,
    sum_forward_backward_s,
)
from phalanx.report import formats
from phalanx.report.formats import finite_or_zero, number_or_nan

# Of the ranks' time: what the schedule and the stages' times do not account for.
MAX_UNEXPLAINED_SHARE = 0.05


@dataclass(frozen=True)
class MoreMicrobatches:
    """So many microbatches, `factor` times those of now, by a setting of the job, "" where only a
    larger batch has them; `bubble` of the schedule then, 0 to 1."""

    count: int
    factor: float
    setting: str
    bubble: float


@dataclass(frozen=True)
class MeasuredPipeline:
    """A PipelineMeasured beside the plan of its run.

    `from_event` makes it from what files say, and trusts nothing.
    """

    event: PipelineMeasured
    pipeline: Pipeline
    costs: tuple[StageCosts, ...]
    samples_per_rank: int
    """Samples of a step in each data-parallel share; 0 where the plan does not say."""
    run_dir: Path
    weights: LayerCosts | None = None
    """What the model's parts should cost; None where job or plan do not say."""

    @classmethod
    def from_event(
        cls, event: PipelineMeasured | None, plan: dict[str, Any], run_dir: Path
    ) -> MeasuredPipeline | None:
        """The event beside its plan; None without an event, or if the files do not fit together."""
        pipeline = parse_pipeline_of_plan(plan)
        if event is None or pipeline is None:
            return None
        try:
            costs = tuple(StageCosts(*map(float, row)) for row in event.stage_seconds)
            in_flight = [int(count) for count in event.in_flight]
            is_whole = all(math.isfinite(sum_forward_backward_s(cost)) for cost in costs)
        except (TypeError, ValueError):
            return None
        fits = len(costs) == pipeline.num_stages and len(in_flight) == pipeline.num_ranks
        if not (is_whole and fits):
            return None
        num_microbatches = number_or_nan(plan.get("num_microbatches"))
        samples = num_microbatches * number_or_nan(plan.get("micro_batch_size"))
        return cls(
            event,
            pipeline,
            costs,
            samples_per_rank=int(finite_or_zero(samples)),
            run_dir=run_dir,
            weights=_load_layer_costs_of_run(plan, run_dir),
        )

    @property
    def slowest_stage(self) -> tuple[int, float]:
        """The slowest stage, and how many times the mean it takes."""
        totals = [sum_forward_backward_s(cost) for cost in self.costs]
        mean = sum(totals) / len(totals)
        slowest = max(range(len(totals)), key=totals.__getitem__)
        if not mean:
            return slowest, 1.0
        return slowest, totals[slowest] / mean

    @cached_property
    def proposed_cut(self) -> ProposedCut | None:
        """The cut by what was measured; None where it cannot be told."""
        if self.weights is None:
            return None
        try:
            return propose_cut_from_measurement(
                self.pipeline,
                StageCut(tuple(map(int, self.event.num_blocks))),
                self.costs,
                self.weights,
            )
        except (LayoutError, TypeError, ValueError):
            return None

    @property
    def is_worth_recutting(self) -> bool:
        """True if a stage is slow, and another cut would mend it as far as is known."""
        return self.slowest_stage[1] > MIN_UNEVEN_RATIO and (
            self.proposed_cut is None or self.proposed_cut.is_worth_it
        )

    @property
    def has_long_bubble(self) -> bool:
        """True if the measured bubble is above the limit."""
        return self.event.bubble_measured > MAX_BUBBLE_WITHOUT_WARNING

    def plan_timeline(self) -> Timeline | None:
        """The plan's timeline on the scale of what was measured; None where the plan has no
        costs."""
        return scale_timeline_to_measurement(self.pipeline, self.costs)

    def describe_wait(self) -> str:
        """ "ranks wait 23.1 % of the step for other stages (predicted 21.0 %)"."""
        predicted = formats.format_percent(self.event.bubble_predicted, 1.0)
        measured = formats.format_percent(self.event.bubble_measured, 1.0)
        return f"ranks wait {measured} of the step for other stages (predicted {predicted})"

    def suggest_remedies(self) -> list[str]:
        """Sentences that say what to do; an empty list if ranks wait little and stages are even."""
        advice = []
        if self.is_worth_recutting:
            stage, ratio = self.slowest_stage
            how = (
                "cut the model again by what was measured, phalanx plan JOB.toml --recut"
                f" {self.run_dir}."
            )
            if self.proposed_cut is not None:
                blocks = ", ".join(map(str, self.proposed_cut.stages.num_blocks))
                how = (
                    f"parallel.stage_blocks=[{blocks}] would make a step"
                    f" {formats.format_percent(self.proposed_cut.gain, 1.0)} shorter."
                )
            advice.append(
                f"Stage {stage} is the slowest, at {ratio:.2f} times the mean of all: {how}"
            )
        if not self.has_long_bubble:
            return advice
        more = self._suggest_microbatches() + self._suggest_interleaving()
        advice += more
        extra = self.event.bubble_measured - self.event.bubble_predicted
        if extra > MAX_UNEXPLAINED_SHARE:
            advice.append(
                f"{formats.format_percent(extra, 1.0)} of the ranks' time follows from neither"
                " schedule nor stages: it is sending, or ranks that share cores or wait for"
                " something else."
            )
        if not advice:
            advice.append(
                "More microbatches, or fewer pipeline ranks (parallel.pp), make it shorter."
            )
        return advice

    @property
    def _measured_or_even_costs(self) -> tuple[StageCosts, ...]:
        """The measured costs of the stages, or their mean for every stage if the model should be
        cut again: no other remedy helps a slow stage."""
        if not self.is_worth_recutting:
            return self.costs
        num_stages = len(self.costs)
        mean = StageCosts(
            sum(cost.forward_s for cost in self.costs) / num_stages,
            sum(cost.backward_input_s for cost in self.costs) / num_stages,
            sum(cost.backward_weight_s for cost in self.costs) / num_stages,
        )
        return (mean,) * num_stages

    @property
    def _get_wait_noun(self) -> str:
        if self.is_worth_recutting:
            return "the wait of even stages"
        return "the wait"

    @cached_property
    def more_microbatches(self) -> MoreMicrobatches | None:
        """The least number with which the schedule keeps to the limit; None where none does."""
        remedy = find_microbatches_for_small_bubble(
            self.pipeline, self.samples_per_rank, self._measured_or_even_costs
        )
        if remedy is None:
            return None
        count, is_divided, bubble = remedy
        setting = ""
        if is_divided:
            setting = f"train.micro_batch_size={self.samples_per_rank // count}"
        return MoreMicrobatches(count, count / self.pipeline.num_microbatches, setting, bubble)

    def shrink_wait(self, more: MoreMicrobatches) -> float:
        """The seconds that ranks wait for each second of work with so many microbatches, over those
        they wait now, as the schedule has both; 1 where it does not tell."""
        now, then = self.event.bubble_predicted, more.bubble
        if not (0 < then <= now < 1):
            return 1.0
        return (then / (1 - then)) / (now / (1 - now))

    def _suggest_microbatches(self) -> list[str]:
        more = self.more_microbatches
        if more is None:
            return []
        share = formats.format_percent(more.bubble, 1.0)
        how = more.setting or f"a train.global_batch_size {more.factor:g} times as large"
        return [
            f"{more.count} microbatches instead of {self.pipeline.num_microbatches} ({how}) would"
            f" bring {self._get_wait_noun} to about {share}."
        ]

    def _suggest_interleaving(self) -> list[str]:
        """Two stages on each rank instead of one, if blocks can be cut so."""
        bubble = predict_bubble_with_halved_stages(self.pipeline, self._measured_or_even_costs)
        # Less than a tenth shorter is not worth another schedule.
        if bubble is None or bubble > 0.9 * self.event.bubble_predicted:
            return []
        share = formats.format_percent(bubble, 1.0)
        return [
            'parallel.schedule="interleaved", two stages on each rank, would bring'
            f" {self._get_wait_noun} to about {share}."
        ]


def _load_layer_costs_of_run(plan: dict[str, Any], run_dir: Path) -> LayerCosts | None:
    """The costs of the model's parts, from the run's own job.json and plan.json; None if those
    do not fit together."""
    try:
        job = Job.model_validate_json(read_whole_regular_file(run_dir / "job.json"))
        return compute_model_part_costs(job, parse_stored_shape(plan["shape"])).layer_costs
    except (OSError, ValueError, TypeError, KeyError, LayoutError):
        return None


def parse_pipeline_of_plan(plan: dict[str, Any]) -> Pipeline | None:
    """The plan's pipeline, if it has one and it can be looked at: plan.json may hold anything."""
    body = plan.get("pipeline")
    if not isinstance(body, dict):
        return None
    try:
        pipeline = Pipeline.from_json(body)
        if (
            # Before a schedule is made: it has at most three actions (F, I, W) for each of these.
            not 0 < pipeline.num_stages * pipeline.num_microbatches * 3 <= MAX_SIMULATED_ACTIONS
            or pipeline.num_ranks > pipeline.num_stages
        ):
            return None
        schedule = pipeline.schedule()
        is_whole = len(pipeline.stages.num_blocks) == schedule.num_stages == pipeline.num_stages
        has_costs = len(pipeline.costs) in (0, pipeline.num_stages)
        if not (is_whole and has_costs and schedule.num_ranks == pipeline.num_ranks):
            return None
        # Tried here, so that no later call fails for what the file holds.
        pipeline.timeline()
    except (LayoutError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError):
        return None
    return pipeline
