"""Costs of the parts that stages are made of (embedding, blocks, head) where nothing has been
measured: FLOPs where the model's shape knows them, parameters of any."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from phalanx.core.errors import LayoutError, format_nearest_word_hint
from phalanx.job.costs import ModelCosts, ModelFlops, PartParams
from phalanx.job.module_names import is_module_inside, matches_module
from phalanx.job.schema import Job
from phalanx.plan.pipeline.cut import LayerCosts, StageCut
from phalanx.plan.pipeline.simulate import Seconds, StageCosts


def compute_stage_costs(
    flops: ModelFlops,
    stages: StageCut,
    *,
    samples: int,
    flops_per_s: Seconds,
    recomputed: Collection[int] = (),
) -> tuple[StageCosts, ...]:
    """Seconds of each stage for a microbatch of `samples` at a given speed.

    `recomputed`: blocks whose forward is done again before their backward.
    """
    costs = []
    for stage, (first, end) in enumerate(stages.block_ranges):
        blocks = flops.blocks[first:end]
        parts, at_once = list(blocks), 0
        if stage == 0:
            parts.append(flops.embedding)
        if stage == len(stages.num_blocks) - 1:
            # The loss makes both gradients of the head in its forward: no backward of it is left.
            if flops.head_is_done_at_once:
                at_once = flops.head.training
            if not at_once:
                parts.append(flops.head)
        recomputed_flops = sum(
            flops.blocks[block].forward for block in range(first, end) if block in recomputed
        )
        # A product of weights costs the same again for the gradient of its input and for that of
        # its weights. Attention scores have no weights, and two gradients of inputs.
        amounts = (
            sum(part.forward for part in parts) + at_once,
            sum(part.matmul + 2 * part.attention for part in parts) + recomputed_flops,
            sum(part.matmul for part in parts),
        )
        costs.append(StageCosts(*(amount * samples / flops_per_s for amount in amounts)))
    return tuple(costs)


ASSUMED_FLOPS_PER_S = 1e12  # a scale: what a plan says of a pipeline are parts of a step


def count_params_of_stages(
    params: PartParams, stages: StageCut, stages_held: Collection[int]
) -> int:
    """Parameters of a rank that holds the stages `stages_held` of a model whose parts have
    `params`."""
    last = len(stages.num_blocks) - 1
    num_params = 0
    for stage in stages_held:
        first, end = stages.block_ranges[stage]
        num_params += sum(params.blocks[first:end])
    if 0 in stages_held:
        num_params += params.before
    if last in stages_held:
        num_params += params.after
    # A tied table is counted in both ends, and this rank has it once.
    if {0, last} <= set(stages_held):
        num_params -= params.both
    return num_params


def require_valid_stage_modules(job: Job, shape: ModelCosts) -> None:
    """Raises LayoutError for names in first_stage or last_stage that there are not, or that are
    in a block."""
    if not (job.parallel.first_stage or job.parallel.last_stage):
        return
    known = [name for name in shape.module_names if name]
    holders, blocks = {holder.name for holder in shape.holders}, shape.block_names
    for key in ("first_stage", "last_stage"):
        for requested in getattr(job.parallel, key):
            # It may name a parameter. What those are called is not known here, and who has some is.
            is_known = requested.rpartition(".")[0] in holders or any(
                matches_module(name, [requested]) for name in known
            )
            if not is_known:
                raise LayoutError(
                    f"parallel.{key}: the model has no {requested!r}",
                    fix=format_nearest_word_hint(requested, known) or "check the name",
                )
            if any(matches_module(block, [requested]) for block in blocks) or is_module_inside(
                requested, blocks
            ):
                raise LayoutError(
                    f"parallel.{key}: {requested!r} is a part of the blocks, which lie where the"
                    " cut"
                    " puts them",
                    fix="set parallel.stage_blocks to move a cut",
                )


@dataclass(frozen=True)
class ModelPartCosts:
    """FLOPs of a model's parts, where they are known, and its parameters."""

    params: PartParams
    flops: ModelFlops | None

    @property
    def layer_costs(self) -> LayerCosts:
        """The costs to cut by: forward and backward together; without FLOPs one for each
        parameter, where rows are looked up for nothing."""
        if self.flops is None:
            before = self.params.before - self.params.looked_up
            # Looking up rows is no product: `before` counts without the table.
            return LayerCosts(before, self.params.blocks, self.params.after)
        flops = self.flops
        blocks = tuple(block.training for block in flops.blocks)
        return LayerCosts(flops.embedding.training, blocks, flops.head.training)


def compute_model_part_costs(job: Job, shape: ModelCosts) -> ModelPartCosts:
    """The parts of the job's model. Raises LayoutError like `require_valid_stage_modules`."""
    require_valid_stage_modules(job, shape)
    params = shape.count_part_params(job.parallel.first_stage, job.parallel.last_stage)
    return ModelPartCosts(params, shape.flops(job.data.seq_len))


def predict_stage_costs(
    parts: ModelPartCosts,
    stages: StageCut,
    *,
    samples: int,
    recomputed: Collection[int],
    tp: int,
) -> tuple[StageCosts, ...]:
    """Seconds of each stage for one microbatch at `ASSUMED_FLOPS_PER_S`; of a user's own module
    only in proportion."""
    if parts.flops is not None:
        return compute_stage_costs(
            parts.flops,
            stages,
            samples=samples,
            flops_per_s=ASSUMED_FLOPS_PER_S * tp,
            recomputed=recomputed,
        )
    blocks = parts.params.blocks
    recomputed_costs = LayerCosts(
        0, tuple(size if block in recomputed else 0 for block, size in enumerate(blocks)), 0
    )
    scale = samples / (ASSUMED_FLOPS_PER_S * tp)
    return tuple(
        StageCosts(once * scale, (once + more) * scale, once * scale)
        for once, more in zip(
            parts.layer_costs.sum_by_stage(stages),
            recomputed_costs.sum_by_stage(stages),
            strict=True,
        )
    )
