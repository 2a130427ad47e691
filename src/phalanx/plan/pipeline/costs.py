"""Costs of the parts that stages are made of (embedding, blocks, head) where nothing has been
measured: FLOPs of a built-in model, parameters of any."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from phalanx.core.errors import LayoutError, did_you_mean
from phalanx.job import counts
from phalanx.job.counts import Flops, block_flops, embedding_flops, head_flops
from phalanx.job.schema import Job
from phalanx.job.shape import Measured, ModelShape, ParamHolder
from phalanx.job.tensors import list_holders, module_names
from phalanx.plan.pipeline.cut import LayerCosts, Stages
from phalanx.plan.pipeline.simulate import Seconds, StageCosts


@dataclass(frozen=True)
class ModelFlops:
    """Forward FLOPs of one sample in each part of a model."""

    embedding: Flops
    blocks: tuple[Flops, ...]
    head: Flops
    head_is_done_at_once: bool = False
    """The loss of tokens makes both gradients of the head while it has the logits, in the
    forward."""

    @property
    def layer_costs(self) -> LayerCosts:
        """The costs to cut by: forward and backward together."""
        return LayerCosts(
            _training(self.embedding), tuple(map(_training, self.blocks)), _training(self.head)
        )


def model_flops(shape: ModelShape, seq_len: int) -> ModelFlops:
    """The FLOPs of a model's parts. Raises LayoutError for a user's own module, of which only
    parameters are known."""
    if not shape.is_known:
        raise LayoutError(
            "the blocks of your own model cannot be weighed by FLOPs",
            fix="say how many blocks each stage has",
        )
    blocks = tuple(block_flops(shape, seq_len, layer) for layer in range(shape.num_layers))
    at_once = not shape.reads_images
    return ModelFlops(
        embedding_flops(shape), blocks, head_flops(shape, seq_len), head_is_done_at_once=at_once
    )


def stage_costs(
    flops: ModelFlops,
    stages: Stages,
    *,
    samples: int,
    flops_per_s: Seconds,
    recomputed: Collection[int] = (),
) -> tuple[StageCosts, ...]:
    """Seconds of each stage for a microbatch of `samples` at a given speed.

    A product of weights costs the same again for the gradient of its input and for that of its
    weights. Attention scores have no weights, and two gradients of inputs. `recomputed`: blocks
    whose forward is done again before their backward.
    """
    costs = []
    for stage, (first, end) in enumerate(stages.ranges):
        blocks = flops.blocks[first:end]
        outer = [flops.embedding] if stage == 0 else []
        is_last = stage == len(stages.num_blocks) - 1
        at_once = _training(flops.head) if is_last and flops.head_is_done_at_once else 0
        outer += [flops.head] if is_last and not at_once else []
        parts = [*blocks, *outer]
        recomputed_flops = sum(
            flops.blocks[block].forward for block in range(first, end) if block in recomputed
        )
        amounts = (
            sum(part.forward for part in parts) + at_once,
            sum(part.matmul + 2 * part.attention for part in parts) + recomputed_flops,
            sum(part.matmul for part in parts),
        )
        costs.append(StageCosts(*(amount * samples / flops_per_s for amount in amounts)))
    return tuple(costs)


def _training(flops: Flops) -> int:
    return 3 * flops.forward


FLOPS_PER_S = 1e12  # a scale: what a plan says of a pipeline are parts of a step


@dataclass(frozen=True)
class PartParams:
    """Parameters of a model before, in and after its blocks.

    `looked_up`: those of `before` that are rows of a table. `both`: how many of `after` are the
    same as some of `before`, which a rank with both has once.
    """

    before: int
    blocks: tuple[int, ...]
    after: int
    looked_up: int = 0
    both: int = 0

    @property
    def layer_costs(self) -> LayerCosts:
        """The costs to cut by: one for each parameter; rows are looked up for nothing."""
        return LayerCosts(self.before - self.looked_up, self.blocks, self.after)

    def of_stages(self, stages: Stages, stages_held: Collection[int]) -> int:
        """Parameters of a rank that holds the stages `stages_held`."""
        last = len(stages.num_blocks) - 1
        num_params = sum(sum(self.blocks[slice(*stages.ranges[stage])]) for stage in stages_held)
        num_params += self.before * (0 in stages_held) + self.after * (last in stages_held)
        return num_params - (self.both if {0, last} <= set(stages_held) else 0)


def part_params(
    shape: ModelShape, first_stage: Sequence[str] = (), last_stage: Sequence[str] = (), ep: int = 1
) -> PartParams:
    """Parameters of a model's parts; of experts those that a rank of `ep` has.

    Of a user's own module: what is registered before the first block is before, and what
    `first_stage` names.
    """
    if shape.measured is not None:
        return _user_part_params(shape.measured, first_stage, last_stage)
    blocks = tuple(counts.params_of_block(shape, layer, ep) for layer in range(shape.num_layers))
    tied = shape.vocab_size * shape.dim if shape.tie_embeddings and not shape.reads_images else 0
    after = counts.norm_params(shape) + counts.head_params(shape) + tied
    return PartParams(counts.embedding_params(shape), blocks, after, both=tied)


def _user_part_params(
    measured: Measured, first_stage: Sequence[str], last_stage: Sequence[str]
) -> PartParams:
    before: list[ParamHolder] = []
    after: list[ParamHolder] = []
    has_met_a_block, last_stage = False, (*last_stage, *measured.last_stage)
    names = [name for name, _ in measured.blocks]
    for holder in measured.holders:
        if _is_in(holder.name, names):
            has_met_a_block = True
            continue
        if not has_met_a_block or _is_part(holder.name, first_stage):
            before.append(holder)
        if has_met_a_block or _is_part(holder.name, last_stage):
            after.append(holder)
    return PartParams(
        sum(map(_size, before)),
        tuple(size for _, size in measured.blocks),
        sum(map(_size, after)),
        looked_up=sum(_size(holder) for holder in before if holder.kind == "embedding"),
        both=sum(_size(holder) for holder in before if holder in after) + _tied_params(after),
    )


def _size(holder: ParamHolder) -> int:
    """Elements of a module's parameters. A tied weight counts where it is met first, and another
    rank has it, too."""
    return max(holder.num_params, holder.num_outputs * holder.num_inputs)


def _tied_params(holders: Collection[ParamHolder]) -> int:
    return sum(_size(holder) - holder.num_params for holder in holders)


def _is_in(name: str, parts: Collection[str]) -> bool:
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def _is_part(name: str, patterns: Collection[str]) -> bool:
    """True if `name` matches one of `patterns`, or lies inside of what does."""
    parts = name.split(".")
    heads = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(fnmatch.fnmatchcase(head, pattern) for head in heads for pattern in patterns)


def require_modules(job: Job, shape: ModelShape) -> None:
    """Raises LayoutError for names in first_stage or last_stage that there are not, or that are
    in a block."""
    if not (job.parallel.first_stage or job.parallel.last_stage):
        return
    of = shape.measured
    known = [name for name in (of.names if of is not None else module_names(shape)) if name]
    holders = {
        holder.name for holder in (of.holders if of is not None else list_holders(shape).values())
    }
    blocks = [f"blocks.{layer}" for layer in range(shape.num_layers)]
    if of is not None:
        blocks = [name for name, _ in of.blocks]
    for key in ("first_stage", "last_stage"):
        for requested in getattr(job.parallel, key):
            # It may name a parameter. What those are called is not known here, and who has some is.
            is_known = requested.rpartition(".")[0] in holders or any(
                _is_part(name, [requested]) for name in known
            )
            if not is_known:
                raise LayoutError(
                    f"parallel.{key}: the model has no {requested!r}",
                    fix=did_you_mean(requested, known) or "check the name",
                )
            if any(_is_part(block, [requested]) for block in blocks) or _is_in(requested, blocks):
                raise LayoutError(
                    f"parallel.{key}: {requested!r} is a part of the blocks, which lie where the"
                    " cut"
                    " puts them",
                    fix="set parallel.stage_blocks to move a cut",
                )


@dataclass(frozen=True)
class Parts:
    """FLOPs of a model's parts; of a user's own module, of which they are not known, its
    parameters."""

    params: PartParams
    flops: ModelFlops | None

    @property
    def layer_costs(self) -> LayerCosts:
        return self.params.layer_costs if self.flops is None else self.flops.layer_costs


def model_parts(job: Job, shape: ModelShape) -> Parts:
    """The parts of the job's model. Raises LayoutError like `require_modules`."""
    require_modules(job, shape)
    params = part_params(shape, job.parallel.first_stage, job.parallel.last_stage)
    return Parts(params, model_flops(shape, job.data.seq_len) if shape.is_known else None)


def cost_stages(
    parts: Parts, stages: Stages, *, samples: int, recomputed: Collection[int], tp: int
) -> tuple[StageCosts, ...]:
    """Seconds of each stage for one microbatch at `FLOPS_PER_S`; of a user's own module only in
    proportion."""
    if parts.flops is not None:
        return stage_costs(
            parts.flops,
            stages,
            samples=samples,
            flops_per_s=FLOPS_PER_S * tp,
            recomputed=recomputed,
        )
    blocks = parts.params.blocks
    recomputed_costs = LayerCosts(
        0, tuple(size if block in recomputed else 0 for block, size in enumerate(blocks)), 0
    )
    scale = samples / (FLOPS_PER_S * tp)
    return tuple(
        StageCosts(once * scale, (once + more) * scale, once * scale)
        for once, more in zip(
            parts.layer_costs.of_stages(stages), recomputed_costs.of_stages(stages), strict=True
        )
    )
