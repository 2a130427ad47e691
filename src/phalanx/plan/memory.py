"""Bytes per rank, by category, from published arithmetic.

States follow the ZeRO paper (arXiv 1910.02054, §5): stage 1 splits optimizer state over the
data-parallel ranks, stage 2 also gradients, stage 3 also parameters. Activations count what
autograd keeps, as the shape of the model says it (phalanx.job.shapes).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from phalanx.job.costs import ActivationCosts, ModelCosts
from phalanx.job.schema import Parallel
from phalanx.plan.host_allocator import estimate_retained_bytes, estimate_retained_gradient_bytes
from phalanx.plan.layout import choose_zero_split_dim
from phalanx.plan.segments import Segment, list_recompute_segments
from phalanx.plan.workload import Workload

MEMORY_CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "loss",
    "communication",
    "compression",
    "allocator",
    "staging",
)


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter of each kind of state.

    The default is phalanx's: everything fp32, two Adam moments.
    """

    parameters: float = 4
    gradients: float = 4
    optimizer: float = 8


# The ZeRO paper's: fp16 weights and gradients; an fp32 copy of the weights and two moments.
MIXED_FP16_ADAM_STATE_BYTES = StateBytes(2, 2, 12)


def predict_model_state_bytes(
    num_params: float,
    zero_stage: int,
    dp_size: int,
    per: StateBytes,
    uneven: float = 0,
    trained: float = 1,
) -> dict[str, float]:
    """Model-state bytes of one rank at a ZeRO stage (0: plain data parallelism).

    `uneven`: parameters that a rank has beyond an even part of what is split. `trained`: the part
    of the parameters, 0 to 1, that have gradients and optimizer state.
    """
    split = {
        kind: dp_size if zero_stage >= stage else 1
        for kind, stage in _FIRST_ZERO_STAGE_SHARDING.items()
    }
    states = {}
    for kind, parts in split.items():
        params_on_rank = num_params / parts + (uneven if parts > 1 else 0)
        # Frozen parameters have nothing but their weights.
        share = 1 if kind == "parameters" else trained
        states[kind] = params_on_rank * getattr(per, kind) * share
    return states


_FIRST_ZERO_STAGE_SHARDING = {"optimizer": 1, "gradients": 2, "parameters": 3}


def activation_bytes(shape: ModelCosts, work: Workload) -> int:
    """Bytes of what is kept from the forward to the backward, all layers, at the worst moment; 0
    where nobody knows.

    That is where the backward begins, or where blocks are redone: what earlier blocks keep is still
    there, and what the redone ones would have kept is alive.
    """
    activations = shape.activations
    if activations is None:
        return 0
    in_blocks = peak_segment_bytes(*count_segment_bytes(shape, work))
    return (
        in_blocks
        + _activation_bytes_outside_blocks(activations, work)
        + activations.count_block_mask_bytes(work)
    )


def peak_segment_bytes(saved: Sequence[int], redone: Sequence[int]) -> int:
    """The largest number of bytes that segments save and recompute at one time; arguments as
    `count_segment_bytes` returns them."""
    # The first moment: the forward is over, nothing is redone yet.
    worst, before = sum(saved), 0
    for kept_here, redone_here in zip(saved, redone, strict=True):
        before += kept_here
        # The backward comes from the end: what later segments kept is gone when this one is redone.
        worst = max(worst, before + redone_here)
    return worst


def bytes_at_forward_end(shape: ModelCosts, work: Workload) -> int:
    """Bytes of activations that exist when the forward ends; 0 where nobody knows."""
    if shape.activations is None:
        return 0
    saved, _ = count_segment_bytes(shape, work)
    return sum(saved) + _activation_bytes_outside_blocks(shape.activations, work)


def activation_bytes_on_device(shape: ModelCosts, work: Workload) -> int:
    """Bytes of activations that stay on the device when activations wait in host memory: those of
    the segment that is computed and of the next one, which is being copied."""
    activations = shape.activations
    if activations is None:
        return 0
    saved, redone = count_segment_bytes(shape, work)
    pairs = (
        now + after + recomputed
        for now, after, recomputed in zip(saved, [*saved[1:], 0], redone, strict=True)
    )
    outside = _activation_bytes_outside_blocks(
        activations, work
    ) + activations.count_block_mask_bytes(work)
    return max(pairs, default=0) + outside


def count_segment_bytes(
    shape: ModelCosts, work: Workload, start: int = 0, stop: int | None = None
) -> tuple[list[int], list[int]]:
    """Bytes of each segment (or block outside one) for one microbatch, in forward order: what it
    saves for the backward, and what its recomputation makes again.

    Counts the blocks from `start` to before `stop`, where segments must begin and end, too.
    """
    starts = work.segments_by_start
    if work.segments is None:
        segments = list_recompute_segments(work.recompute, shape.num_layers)
        starts = {segment.start: segment for segment in segments}
    assert shape.activations is not None
    kinds = shape.activations.list_block_kinds(work)
    # Each mode of each kind of blocks is counted once: a deep model has two or three of them.
    counted: dict[tuple[Hashable, ...], tuple[int, int]] = {}
    saved, redone, layer = [], [], start
    if stop is None:
        stop = shape.num_layers
    while layer < stop:
        segment = starts.get(layer)
        mode, end = ("none", layer + 1) if segment is None else (segment.mode, segment.stop)
        key = (mode, *kinds[layer:end])
        count = counted.get(key)
        if count is None:
            segment = segment or Segment(layer, end, "none")
            count = counted[key] = _count_segment_saved_and_redone_bytes(shape, work, segment)
        saved.append(count[0])
        redone.append(count[1])
        layer = end
    return saved, redone


def _count_segment_saved_and_redone_bytes(
    shape: ModelCosts, work: Workload, segment: Segment
) -> tuple[int, int]:
    """Bytes that a segment saves, and that its recomputation makes again."""
    assert shape.activations is not None
    blocks = [shape.activations.block(layer, work) for layer in range(segment.start, segment.stop)]
    total, first = sum(block.saved for block in blocks), blocks[0]
    if segment.mode == "none" and not work.is_compiled:
        return total, 0
    total += sum(block.gathered for block in blocks)
    if segment.mode == "none":
        return total, 0
    # Selective keeps the input and `products`; what autograd keeps of these is not made again.
    if segment.mode == "selective":
        return first.entering + first.products, total - first.products_in_both
    return first.entering, total


def _activation_bytes_outside_blocks(activations: ActivationCosts, work: Workload) -> int:
    ends = activations.count_embedding_bytes(work) + activations.count_final_norm_bytes(work)
    return activations.count_bytes_in_every_stage(work) + ends


def count_cast_params(shape: ModelCosts, work: Workload, *, with_ends: bool) -> int:
    """Parameters that autocast has a copy of in the compute type, on a rank of whole weights: those
    that are multiplied by, in blocks and, `with_ends`, outside of them."""
    blocks = shape.count_all_blocks_params(work.ep) - _count_fp8_params(shape, work)
    if not with_ends:
        return blocks
    parts = shape.count_part_params()
    # Rows of a table are looked up as they are.
    return blocks + parts.after + max(0, parts.before - parts.looked_up)


def count_fsdp_unit_params(shape: ModelCosts, options: Parallel, ep: int = 1) -> tuple[int, int]:
    """(parameters of a unit of blocks, parameters of the root's unit). Of the experts only those of
    one rank of ep count."""
    if options.blocks_per_unit == "all":
        return 0, count_rank_params(shape, ep)
    unit = shape.count_largest_block_params(ep) * options.blocks_per_unit
    return min(unit, shape.count_all_blocks_params(ep)), shape.num_params - shape.blocks_params


def count_rank_params(shape: ModelCosts, ep: int) -> int:
    """Parameters of one rank before data parallelism splits them: of the experts those of its
    coordinate in ep."""
    return shape.num_params - shape.blocks_params + shape.count_all_blocks_params(ep)


def compute_excess_expert_share(shape: ModelCosts, zero_stage: int, dp_size: int, ep: int) -> float:
    """The fraction of the experts' parameters that the rank with most of them holds beyond an even
    part, where they are split.

    zero1 cuts a stack of experts between experts; zero2 and zero3 elsewhere, where that makes even
    parts.
    """
    experts = shape.experts
    # Whole copies are not split, and have no uneven parts.
    if zero_stage == 0 or experts is None:
        return 0.0
    stack, ranks = (experts.count // ep, experts.width, experts.dim), dp_size // ep
    if zero_stage >= 2 and stack[choose_zero_split_dim(stack, ranks)] % ranks == 0:
        return 0.0
    # The rank with most has ceil(stack / ranks) of the experts, where 1 / dp_size would be even.
    return math.ceil(stack[0] / ranks) / experts.count - 1 / dp_size


def count_excess_expert_params(
    shape: ModelCosts,
    zero_stage: int,
    dp_size: int,
    ep: int,
    ranges: Sequence[tuple[int, int | None]] = ((0, None),),
) -> float:
    """Parameters of experts in `ranges` of blocks that the rank with most of them holds beyond an
    even part."""
    if shape.experts is None:
        return 0.0
    chosen = sum(shape.experts.count_chosen_params(*blocks) for blocks in ranges)
    return chosen * compute_excess_expert_share(shape, zero_stage, dp_size, ep)


def staging_bytes(shape: ModelCosts, work: Workload, num_ranks: int) -> int:
    """Bytes of host memory of one rank for the copy that asynchronous saves are written from: its
    part of weights and optimizer state, which is equal in every layout, because no block is written
    twice."""
    split = shape.num_params * (StateBytes().parameters + work.optimizer_bytes) / num_ranks
    return round(split + shape.num_params * work.error_feedback_bytes)


def adjust_memory_for_device(
    memory: dict[str, float],
    shape: ModelCosts,
    work: Workload,
    device: str,
    zero_stage: int,
    *,
    activations: float = 0,
    is_staged: bool = False,
) -> dict[str, int]:
    """Bytes by category, with what a device needs besides and without what waits on the host.

    `activations`: bytes of them at their highest moment; `is_staged`: of a pipeline's rank.
    """
    if device != "cpu":
        on_host = {"optimizer": work.options.has_state_on_host} | dict.fromkeys(
            ("parameters", "gradients"), work.options.has_parameters_on_host
        )
        memory |= {category: 0 for category, is_away in on_host.items() if is_away}
    else:
        memory["allocator"] = estimate_retained_bytes(work, activations, is_staged=is_staged)
        memory["allocator"] += estimate_retained_gradient_bytes(shape, work, zero_stage)
    memory = {
        category: size for category, size in memory.items() if size or category != "compression"
    }
    always = [
        category
        for category in MEMORY_CATEGORIES
        if category not in ("staging", "compression") or category in memory
    ]
    return {category: round(memory.get(category, 0)) for category in always}


def _count_fp8_params(shape: ModelCosts, work: Workload) -> int:
    """Parameters of the layers that multiply in fp8, which have no copy in the compute type."""
    if work.precision != "fp8" or shape.activations is None:
        return 0
    return shape.activations.fp8_params()


def fp8_cast_bytes(shape: ModelCosts, work: Workload) -> int:
    """Bytes of what one product casts to fp8, of the largest."""
    if work.precision != "fp8" or shape.activations is None:
        return 0
    return shape.activations.count_fp8_cast_bytes(work.tokens)
