"""Costs of blocks and stages from a model's FLOPs, where nothing has been measured."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from phalanx.core.errors import LayoutError
from phalanx.job.counts import Flops, block_flops, embedding_flops, head_flops
from phalanx.job.shape import ModelShape
from phalanx.plan.pipeline.cut import LayerCosts, Stages
from phalanx.plan.pipeline.order import Seconds
from phalanx.plan.pipeline.simulate import StageCosts


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
        """Forward and backward together, to cut by."""
        return LayerCosts(
            _training(self.embedding), tuple(map(_training, self.blocks)), _training(self.head)
        )


def model_flops(shape: ModelShape, seq_len: int) -> ModelFlops:
    """Raises LayoutError for a user's own module, of which only parameters are known."""
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
    found = []
    for stage, (begin, end) in enumerate(stages.ranges):
        blocks = flops.blocks[begin:end]
        outer = [flops.embedding] if stage == 0 else []
        is_last = stage == len(stages.num_blocks) - 1
        at_once = _training(flops.head) if is_last and flops.head_is_done_at_once else 0
        outer += [flops.head] if is_last and not at_once else []
        parts = [*blocks, *outer]
        again = sum(
            flops.blocks[block].forward for block in range(begin, end) if block in recomputed
        )
        amounts = (
            sum(part.forward for part in parts) + at_once,
            sum(part.matmul + 2 * part.attention for part in parts) + again,
            sum(part.matmul for part in parts),
        )
        found.append(StageCosts(*(amount * samples / flops_per_s for amount in amounts)))
    return tuple(found)


def _training(flops: Flops) -> int:
    return 3 * flops.forward
