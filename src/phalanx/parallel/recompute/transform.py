"""Recompute: blocks keep little from the forward and compute the rest again in the backward, as
the plan says."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from phalanx.core.errors import LayoutError
from phalanx.parallel.pipeline.staged import PipelineOfRank
from phalanx.parallel.protocol import ParallelContext, TransformOrder
from phalanx.parallel.recompute.contexts import (
    make_recompute_context_factory,
    make_selective_contexts,
)
from phalanx.parallel.recompute.segment import RecomputeSegment
from phalanx.parallel.tensor.gathered_input import keep_gathered_inputs_of
from phalanx.plan.plan import Plan
from phalanx.plan.segments import Segment, list_recompute_segments


class Recompute:
    order = TransformOrder.RECOMPUTE

    def is_needed(self, plan: Plan) -> bool:
        return plan.activations.recompute != "none"

    def apply(self, context: ParallelContext) -> None:
        """Replaces blocks' forwards; no wrapper module, so that names stay the user's own."""
        for segment in list_recompute_segments_of_rank(context):
            blocks = context.blocks[segment.start : segment.stop]
            for block in blocks:
                keep_gathered_inputs_of(block)
            if context.plan.compile:
                _refuse_uncompilable_recompute(blocks)
            if len(blocks) > 1:
                RecomputeSegment(blocks, context.dropout_rng).apply()
            else:
                _wrap_block_with_recompute(blocks[0], segment, context)


def list_recompute_segments_of_rank(context: ParallelContext) -> Iterator[Segment]:
    """Segments of the blocks that this rank has, counted among these. A segment ends where a
    stage does."""
    staged = context.axes.find(PipelineOfRank)
    if staged is None:
        yield from choose_recompute_segments(context.plan, len(context.blocks))
        return
    pipeline, first = staged.pipeline, 0
    planned = choose_recompute_segments(context.plan, sum(pipeline.stages.num_blocks))
    mode = context.plan.activations.recompute
    for stage in staged.stages_of_this_rank:
        stage_start, end = pipeline.stages.block_ranges[stage]
        if stage_start == end:
            continue
        rank_segments = list_recompute_segments("sqrt", end - stage_start) if mode == "sqrt" else ()
        for segment in planned if mode != "sqrt" else ():
            start, stop = max(segment.start, stage_start), min(segment.stop, end)
            if start < stop:
                rank_segments = (
                    *rank_segments,
                    Segment(start - stage_start, stop - stage_start, segment.mode),
                )
        for segment in rank_segments:
            yield Segment(first + segment.start, first + segment.stop, segment.mode)
        # `context.blocks` has the blocks of this rank's stages one after another.
        first += end - stage_start


def choose_recompute_segments(plan: Plan, num_blocks: int) -> tuple[Segment, ...]:
    """Segments of the plan; for a module with other blocks than were planned for, those that the
    mode means."""
    num_planned, policy = plan.model_shape.num_layers, plan.activations
    if num_blocks == num_planned:
        return policy.recompute_segments
    if policy.recompute == "budget":
        raise LayoutError(
            f"train.recompute=budget is planned for {num_planned} blocks and the module has"
            f" {num_blocks}",
            fix="set train.recompute to selective, full, every-k or sqrt",
        )
    return list_recompute_segments(policy.recompute, num_blocks, policy.recompute_every)


def _wrap_block_with_recompute(
    block: nn.Module, segment: Segment, context: ParallelContext
) -> None:
    options: dict[str, Any] = {
        "context_fn": make_recompute_context_factory(block, segment.mode, context.dropout_rng)
    }
    # A compiler follows torch's own contexts, and no others.
    if context.plan.compile:
        options = {"context_fn": make_selective_contexts} if segment.mode == "selective" else {}
    # Not reentrant: torch takes a context_fn for that kind only.
    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)
    if context.plan.compile:
        block.forward = _as_own_function(block.forward)


def _as_own_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` within one of ours: a compiler begins with none of torch's, and `checkpoint` alone
    would run as it is, compiled nowhere."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return forward


def _refuse_uncompilable_recompute(blocks: list[nn.Module]) -> None:
    for block in blocks:
        if any(isinstance(module, _BatchNorm) for module in block.modules()):
            raise LayoutError(
                f"{type(block).__name__} has BatchNorm, which cannot be compiled and recomputed"
                " together",
                fix="set train.compile=false or train.recompute=none",
            )
    if len(blocks) > 1:
        raise LayoutError(
            "train.recompute=sqrt redoes several blocks at once, and train.compile compiles each by"
            " itself",
            fix="set train.compile=false or train.recompute=full",
        )


parallelism = Recompute()
