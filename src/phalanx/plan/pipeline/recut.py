"""Another cut, by what stages were measured to take. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from phalanx.core.errors import LayoutError
from phalanx.plan.pipeline.cut import LayerCosts, Stages
from phalanx.plan.pipeline.measured import total_s
from phalanx.plan.pipeline.order import Seconds
from phalanx.plan.pipeline.planned import Pipeline
from phalanx.plan.pipeline.simulate import StageCosts, simulate
from phalanx.plan.pipeline.spread import cut_for_ranks

WORTH_S = 0.005  # of a step: what a cut must gain to be worth the change


@dataclass(frozen=True)
class Recut:
    """`stages` with which a step would take `step_s`, as the schedule goes, where it takes
    `measured_step_s` now."""

    measured: Stages
    stages: Stages
    measured_step_s: float
    step_s: float

    @property
    def gain(self) -> float:
        """The part of a step that is saved."""
        return 1 - self.step_s / self.measured_step_s if self.measured_step_s else 0.0

    @property
    def is_worth_it(self) -> bool:
        return self.stages != self.measured and self.gain >= WORTH_S


def recut(
    pipeline: Pipeline, measured: Stages, seconds: Sequence[StageCosts], weights: LayerCosts
) -> Recut:
    """The cut of `pipeline`'s schedule by the `seconds` that stages with `measured` blocks took of
    one microbatch.

    `weights`: what the model's parts should cost, on any scale. A stage's seconds are shared out
    among its blocks, embedding and head in these proportions, each kind of work for itself. Raises
    LayoutError for the measurement of other stages, or of another number of blocks.
    """
    if len(seconds) != pipeline.num_stages or len(measured.num_blocks) != pipeline.num_stages:
        raise LayoutError(
            f"{len(seconds)} stages were measured, and the job has {pipeline.num_stages}",
            fix="give a run of this job: parallel.pp, schedule and stages_per_rank as they are now",
        )
    if sum(measured.num_blocks) != len(weights.blocks):
        raise LayoutError(
            f"stages of {sum(measured.num_blocks)} blocks were measured, and the model has"
            f" {len(weights.blocks)}",
            fix="give a run of this model",
        )
    forward = _shared_out([cost.forward_s for cost in seconds], measured, weights)
    inputs = _shared_out([cost.backward_input_s for cost in seconds], measured, weights)
    of_weights = _shared_out([cost.backward_weight_s for cost in seconds], measured, weights)
    whole = _shared_out([total_s(cost) for cost in seconds], measured, weights)
    stages = cut_for_ranks(whole, pipeline.rank_of_stage)
    kinds = [kind.of_stages(stages) for kind in (forward, inputs, of_weights)]
    costs = [StageCosts(*of_stage) for of_stage in zip(*kinds, strict=True)]
    schedule = replace(pipeline, stages=stages).schedule()
    now_s, then_s = (float(simulate(schedule, of).step_s) for of in (seconds, costs))
    return Recut(measured, stages, now_s, then_s)


def _shared_out(seconds: Sequence[Seconds], stages: Stages, weights: LayerCosts) -> LayerCosts:
    """Seconds of each part, from those of stages.

    Where parts are said to cost nothing, blocks share them alike.
    """
    blocks: list[Seconds] = []
    embedding: Seconds = 0
    head: Seconds = 0
    last = len(stages.num_blocks) - 1
    for stage, ((begin, end), took) in enumerate(zip(stages.ranges, seconds, strict=True)):
        before = weights.embedding if stage == 0 else 0
        after = weights.head if stage == last else 0
        here = list(weights.blocks[begin:end])
        if not before + sum(here) + after:
            here = [1] * len(here)
        total = before + sum(here) + after
        blocks += [took * part / total for part in here]
        embedding += took * before / total if total else 0
        head += took * after / total if total else 0
    return LayerCosts(embedding, tuple(blocks), head)
