"""dp_shard: parameters, gradients and optimizer state are split over ranks (FSDP2); with
dp_replicate, HSDP.

Each block is one unit: gathered before use, freed after (zero_stage 3) or kept until the backward
(zero_stage 2).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from phalanx.mesh.compat import (
    add_written_gradients_to_fsdp,
    hide_fsdp_hooks_from_recompute,
    make_fsdp_reduce_unused_parameters,
    run_fsdp_post_backward,
    watch_fsdp_gradients,
)
from phalanx.mesh.devices import is_cpu
from phalanx.parallel.batchnorm.layer import find_buffers_that_differ_between_ranks
from phalanx.parallel.data_parallel.freed_head import FreedHead
from phalanx.parallel.data_parallel.fsdp_communication import set_fsdp_communication
from phalanx.parallel.data_parallel.replaced_parameters import ReplacedParameters
from phalanx.parallel.data_parallel.shared_shards import (
    UnchangedShards,
    move_shards_to_shared_memory,
)
from phalanx.parallel.data_parallel.unsharded_params import find_parameters_left_unsharded
from phalanx.parallel.expert.transform import ShardedExperts
from phalanx.parallel.pipeline.staged import PipelineOfRank
from phalanx.parallel.protocol import ParallelContext, TransformOrder
from phalanx.plan.choice import AUTO
from phalanx.plan.layout import choose_zero_split_dim
from phalanx.plan.plan import Plan


class DpShard:
    order = TransformOrder.SHARD

    def is_needed(self, plan: Plan) -> bool:
        return plan.layout.gradient_reduction_layout.dp_shard > 1 and plan.parallel.zero_stage >= 2

    def apply(self, context: ParallelContext) -> None:
        options, staged = context.plan.parallel, context.axes.find(PipelineOfRank)
        groups = _shard_units_with_fsdp(context, staged)
        units = [module for module in context.root.modules() if isinstance(module, FSDPModule)]
        shards = UnchangedShards(context.root, context.phases)
        for unit in units:
            set_fsdp_communication(unit, context, shards)
        make_fsdp_reduce_unused_parameters(context.root)
        watch_fsdp_gradients(context.root, context.missing_gradients.note_after_backward)
        group = context.mesh.submesh("dp_shard").get_group()
        context.when_materialized.append(
            functools.partial(move_shards_to_shared_memory, context.root, group)
        )
        replaced = ReplacedParameters(context.root, context.root.module)
        context.axes.add(replaced)
        context.when_materialized.append(replaced.start)
        if options.prefetch != AUTO:
            _set_fsdp_prefetch_depth(
                [context.root, *(group[0] for group in groups)], options.prefetch
            )
        elif is_cpu(context.mesh.device):
            _gather_no_unit_ahead(units)
        if staged is not None:
            keep_weights_gathered_for_pipeline(context, units)
        else:
            _reduce_in_last_microbatch(context, units, shards)
            # A root that is one unit with the blocks is gathered again for the backward.
            if groups:
                context.axes.add(FreedHead(context.root, context.root.module))


def _shard_units_with_fsdp(
    context: ParallelContext, staged: PipelineOfRank | None
) -> list[list[nn.Module]]:
    """Hand each unit to FSDP: experts, runs of blocks, and the root with all else; the runs of
    blocks."""
    layout, options = context.plan.layout.gradient_reduction_layout, context.plan.parallel
    experts = context.axes.find(ShardedExperts)
    unsharded = find_parameters_left_unsharded(context.root.module, options.keep_whole_below)
    if experts is not None:
        unsharded -= set(experts.parameters())
    groups = _group_blocks_into_fsdp_units(
        _find_blocks_without_shared_parameters(context), options.blocks_per_unit
    )
    # A model may say that its blocks get activations in the compute type already: casting what
    # is left would only round what must stay wide (rotary tables). Other modules keep autocast
    # as well, as under DDP. What stays whole is not cast by FSDP either, and meets cast
    # tensors: autocast makes them one type.
    cast = bool(unsharded) or not getattr(context.root.module, "block_inputs_are_cast", False)
    # In a pipeline a unit is used again and again within a step, by microbatches that overlap:
    # it stays whole.
    free = context.plan.parallel.zero_stage == 3 and staged is None
    shared: dict[str, Any] = {
        "mesh": context.mesh.submesh(*context.fsdp_mesh_axes),
        "ignored_params": unsharded,
        "shard_placement_fn": _choose_placement_by_zero_split_dim(layout.dp_shard),
    }
    if options.has_parameters_on_host:
        is_pinned = context.mesh.device.type == "cuda"
        shared["offload_policy"] = CPUOffloadPolicy(pin_memory=is_pinned)
    block_policy = _build_mixed_precision_policy(context.compute_dtype, cast_inputs=cast)
    # From the inside out: `fully_shard` leaves out the modules that are units already.
    # Experts are units of their own, inside of a block's unit, over `Mesh.expert_mesh`: other ranks
    # hold the same ones.
    if experts is not None:
        placement = _choose_placement_by_zero_split_dim(layout.dp_shard // experts.ep)
        expert_options = shared | {"mesh": experts.mesh, "shard_placement_fn": placement}
        for module in experts.modules:
            fully_shard(
                module, reshard_after_forward=free, mp_policy=block_policy, **expert_options
            )
            hide_fsdp_hooks_from_recompute(module)
    for group in groups:
        fully_shard(group, reshard_after_forward=free, mp_policy=block_policy, **shared)
    # The root holds embedding and head, which the backward needs at once: freeing them would
    # gather them twice.
    root_policy = _build_mixed_precision_policy(context.compute_dtype, cast_inputs=True)
    fully_shard(
        context.root, reshard_after_forward=free and not groups, mp_policy=root_policy, **shared
    )
    context.autocast = cast
    return groups


def _reduce_in_last_microbatch(
    context: ParallelContext, units: list[FSDPModule], shards: UnchangedShards
) -> None:
    """Reduce gradients in a step's last microbatch, or in each (parallel.accumulate)."""
    plan = context.plan
    each_time = plan.parallel.accumulate == "sharded"
    is_hybrid = plan.layout.gradient_reduction_layout.dp_replicate > 1
    root, buffers = context.root, find_buffers_that_differ_between_ranks(context.root)

    @contextmanager
    def reduce_if_last_microbatch(is_last: bool) -> Iterator[None]:
        root.set_requires_gradient_sync(is_last or each_time)
        root.set_is_last_backward(is_last or each_time)
        # Copies of a shard are averaged once per step.
        if is_hybrid:
            root.set_requires_all_reduce(is_last)
        # As DDP does: every forward begins with rank 0's running statistics.
        for buffer in buffers:
            dist.broadcast(buffer, 0)
        with shards.in_microbatch():
            yield

    context.hooks.around_microbatch.append(reduce_if_last_microbatch)
    context.hooks.release_weights.append(functools.partial(_free_gathered_weights, units))


def _choose_placement_by_zero_split_dim(num_ranks: int) -> Callable[[nn.Parameter], Shard]:
    return lambda parameter: Shard(choose_zero_split_dim(parameter.shape, num_ranks))


def keep_weights_gathered_for_pipeline(context: ParallelContext, units: list[FSDPModule]) -> None:
    """Weights are gathered once per step and stay whole until all of a schedule is done; gradients
    as well, and are reduced then: with a backward in two halves, FSDP's own hooks would reduce
    after the first."""
    root, buffers, group = (
        context.root,
        find_buffers_that_differ_between_ranks(context.root),
        context.mesh.data_parallel_group(),
    )

    def gather() -> None:
        for unit in units:
            unit.unshard()

    @contextmanager
    def keep_weights(is_last: bool) -> Iterator[None]:
        root.set_requires_gradient_sync(False)
        root.set_is_last_backward(False)
        root.set_reshard_after_backward(False)
        for buffer in buffers:
            dist.broadcast(buffer, dist.get_global_rank(group, 0), group=group)
        gather()
        yield

    def reduce() -> None:
        root.set_requires_gradient_sync(True)
        root.set_is_last_backward(True)
        root.set_reshard_after_backward(True)
        run_fsdp_post_backward(root)

    context.hooks.around_microbatch.append(keep_weights)
    context.hooks.gather_weights.append(gather)
    context.hooks.release_weights.append(functools.partial(_free_gathered_weights, units))
    # FSDP accumulates in a hook of the backward, which never ran for gradients made by hand.
    context.hooks.after_weight_grads.append(functools.partial(add_written_gradients_to_fsdp, root))
    context.optimizer_params.before_update.append(reduce)


def _free_gathered_weights(units: list[FSDPModule]) -> None:
    """Free the gathered weights that a forward without a backward has left."""
    for unit in units:
        unit.reshard()


def _group_blocks_into_fsdp_units(
    blocks: list[nn.Module], per_unit: int | Literal["all"]
) -> list[list[nn.Module]]:
    """`blocks` in runs of `per_unit`; none for the whole model, whose root is a unit anyway."""
    if per_unit == "all":
        return []
    return [blocks[start : start + per_unit] for start in range(0, len(blocks), per_unit)]


def _set_fsdp_prefetch_depth(units: list[Any], depth: int) -> None:
    """While a unit computes, the `depth` units that come next are gathered.

    `units`: in forward order, root first.
    """
    for index, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + depth])
        # Without the root, which is whole from the forward on.
        before = units[max(1, index - depth) : index]
        unit.set_modules_to_backward_prefetch(before[::-1])


def _gather_no_unit_ahead(units: list[FSDPModule]) -> None:
    """Have FSDP gather a unit when its backward begins, and not while the one before it computes.

    On a CPU the cores that compute gather, where it is asked for: ahead of its use a unit is only
    there longer, beside all activations, in the first backward.
    """
    for unit in units:
        # Where nothing is named FSDP takes the next unit; this one is there already.
        unit.set_modules_to_backward_prefetch([unit])


def _find_blocks_without_shared_parameters(context: ParallelContext) -> list[nn.Module]:
    """The blocks that share no parameter with anything outside; the others stay in the root's unit.

    A unit gathers and frees its parameters alone, so a parameter can belong to one unit only.
    """
    uses = Counter(p for _, p in context.root.named_parameters(remove_duplicate=False))
    separable = []
    for block in context.blocks:
        block_uses = Counter(p for _, p in block.named_parameters(remove_duplicate=False))
        if all(uses[p] == num_uses for p, num_uses in block_uses.items()):
            separable.append(block)
    return separable


def _build_mixed_precision_policy(
    compute_dtype: torch.dtype, *, cast_inputs: bool
) -> MixedPrecisionPolicy:
    if compute_dtype is torch.float32:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=cast_inputs
    )


parallelism = DpShard()
