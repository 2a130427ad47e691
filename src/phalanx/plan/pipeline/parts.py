"""What the parts of a model weigh that stages are made of: embedding, blocks, head; for models of any kind."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from phalanx.core.errors import LayoutError, did_you_mean
from phalanx.job.schema import Job
from phalanx.job.shape import Holder, Measured, ModelShape
from phalanx.job.tensors import module_names
from phalanx.plan.pipeline.costs import ModelFlops, model_flops, stage_costs
from phalanx.plan.pipeline.cut import LayerCosts, Stages
from phalanx.plan.pipeline.simulate import StageCosts

FLOPS_PER_S = 1e12  # a scale: what a plan says of a pipeline are parts of a step


@dataclass(frozen=True)
class OwnParts:
    """Parameters of a user's own module, by place. `looked_up`: those of `before` that are rows of a table."""

    before: int
    looked_up: int
    blocks: tuple[int, ...]
    after: int

    @property
    def layer_costs(self) -> LayerCosts:
        """A parameter costs what any other does; rows are looked up for nothing."""
        return LayerCosts(self.before - self.looked_up, self.blocks, self.after)


def own_parts(measured: Measured, first_stage: Sequence[str] = (), last_stage: Sequence[str] = ()) -> OwnParts:
    """What stands before the first block in the order of registration, or is named in `first_stage`, is before."""
    before: list[Holder] = []
    after: list[Holder] = []
    has_met_a_block = False
    names = [name for name, _ in measured.blocks]
    for holder in measured.holders:
        if _is_in(holder.name, names):
            has_met_a_block = True
        elif _is_in(holder.name, last_stage) or (has_met_a_block and not _is_in(holder.name, first_stage)):
            after.append(holder)
        else:
            before.append(holder)
    return OwnParts(
        sum(holder.num_params for holder in before),
        sum(holder.num_params for holder in before if holder.kind == "embedding"),
        tuple(size for _, size in measured.blocks),
        sum(holder.num_params for holder in after),
    )


def _is_in(name: str, parts: Collection[str]) -> bool:
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def parts_of(job: Job, shape: ModelShape) -> ModelFlops | OwnParts:
    """Raises LayoutError for modules of first_stage or last_stage that there are not."""
    for key in ("first_stage", "last_stage"):
        _require_modules(key, getattr(job.parallel, key), shape)
    if shape.measured is not None:
        return own_parts(shape.measured, job.parallel.first_stage, job.parallel.last_stage)
    return model_flops(shape, job.data.seq_len)


def costs_of(
    parts: ModelFlops | OwnParts, stages: Stages, *, samples: int, recomputed: Collection[int], tp: int
) -> tuple[StageCosts, ...]:
    """Seconds of each stage for one microbatch at `FLOPS_PER_S`; of a user's own module only in proportion."""
    if isinstance(parts, ModelFlops):
        return stage_costs(parts, stages, samples=samples, flops_per_s=FLOPS_PER_S * tp, recomputed=recomputed)
    again = LayerCosts(0, tuple(n if block in recomputed else 0 for block, n in enumerate(parts.blocks)), 0)
    scale = samples / (FLOPS_PER_S * tp)
    return tuple(
        StageCosts(once * scale, (once + more) * scale, once * scale)
        for once, more in zip(parts.layer_costs.of_stages(stages), again.of_stages(stages), strict=True)
    )


def _require_modules(key: str, wanted: Sequence[str], shape: ModelShape) -> None:
    if shape.measured is None and shape.kv_rank:
        return  # not built yet: nobody knows its modules by name
    known = shape.measured.names if shape.measured is not None else module_names(shape)
    blocks = [name for name, _ in shape.measured.blocks] if shape.measured is not None else []
    for name in wanted:
        if name not in known:
            raise LayoutError(
                f"parallel.{key}: no module of the model is named {name!r}", fix=did_you_mean(name, known)
            )
        if _is_in(name, blocks):
            raise LayoutError(
                f"parallel.{key}: {name!r} is in a block, and blocks lie where the cut puts them",
                fix="set parallel.stage_blocks to move a cut",
            )
