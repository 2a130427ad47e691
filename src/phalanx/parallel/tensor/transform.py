"""tp: matrices are cut between ranks that work on the same tokens, by sharding rules, which are
data.

A cut parameter is a plain local tensor; `ParallelContext.cuts` says which blocks of the full one it
is. So data parallelism wraps what is left as if it were the whole model, and optimizers see
ordinary tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from phalanx.core.errors import LayoutError
from phalanx.mesh.linear import (
    collect_shard_rules_of_module,
)
from phalanx.mesh.tensor_group import TensorParallelGroup
from phalanx.parallel.pipeline.staged import PipelineOfRank
from phalanx.parallel.protocol import ParallelContext, TransformOrder
from phalanx.parallel.tensor.grad_sync import PartialGradientSum
from phalanx.parallel.tensor.shape_errors import (
    explain_cut_sequence_mismatch,
    explain_shard_width_mismatch,
)
from phalanx.parallel.tensor.sharder import ModuleSharder
from phalanx.plan.choice import AUTO
from phalanx.plan.plan import Plan
from phalanx.plan.rule_checks import (
    missing_rules_error,
    require_rule_matches_module,
)
from phalanx.plan.rules import CUTTING_KINDS, ShardingRule, parse_sharding_rules


class TensorParallel:
    order = TransformOrder.TENSOR

    def is_needed(self, plan: Plan) -> bool:
        return plan.layout.tp > 1

    def apply(self, context: ParallelContext) -> None:
        module, plan = context.root.module, context.plan
        mesh = context.mesh.submesh("tp")
        cuts_sequence = _is_sequence_parallel(module, plan)
        group = TensorParallelGroup(
            name=mesh.get_group().group_name,
            rank=mesh.get_local_rank(),
            size=plan.layout.tp,
            phases=context.phases,
            cuts_sequence=cuts_sequence,
            # A compiler schedules collectives itself.
            chunks=1 if plan.compile else plan.parallel.tp_chunks,
            # It chooses what to keep itself, too.
            gathers_input_again=cuts_sequence and not plan.compile,
        )
        rules = merge_job_and_module_shard_rules(module, plan.parallel.rules, context.names)
        staged = context.axes.find(PipelineOfRank)
        sharder = ModuleSharder(
            module,
            group,
            rules,
            absent=frozenset() if staged is None else staged.absent,
            is_stage=staged is not None,
        )
        sharder.shard()
        sharder.require_dropout_of_full_tensors(context)
        context.cuts.update(sharder.cuts)
        # Once a step and not in each backward: the sum is linear, and goes behind data
        # parallelism's own.
        partial = sharder.list_parameters_with_partial_gradients()
        partial_gradients = PartialGradientSum(group, partial, sharder.cuts)
        context.hooks.before_reduce.append(partial_gradients.sum_over_ranks)
        context.axes.add(group)
        # Compiled code counts nothing: no number is better than a part of it.
        if not plan.compile:
            context.traffic.count_axis_by_sender("tp", group)
        context.hooks.explain_error.append(
            functools.partial(
                explain_cut_sequence_mismatch, module_name=type(module).__name__, group=group
            )
        )
        explain = functools.partial(
            explain_shard_width_mismatch, columns=sharder.list_ungathered_column_layers()
        )
        context.hooks.explain_error.append(explain)


def merge_job_and_module_shard_rules(
    module: nn.Module, job_rules: Mapping[str, str], names: Iterable[str]
) -> tuple[ShardingRule, ...]:
    """The job's rules, then those that the model brings (`shard_rules`).

    Raises LayoutError where there are none.

    `names`: of all modules of the whole model, of which a pipeline stage has a part.
    """
    brought = {
        pattern: text
        for pattern, text in collect_shard_rules_of_module(module).items()
        if pattern not in job_rules
    }
    rules = parse_sharding_rules({**job_rules, **brought})
    if not any(rule.kind in CUTTING_KINDS for rule in rules):
        raise missing_rules_error(type(module).__name__)
    require_rule_matches_module(rules, list(names))
    return rules


def _is_sequence_parallel(module: nn.Module, plan: Plan) -> bool:
    can = bool(getattr(module, "is_per_token_outside_regions", False))
    requested = plan.parallel.sequence_parallel
    if requested is True and not can:
        raise LayoutError(
            f"{type(module).__name__} does not say that its tokens are independent outside its"
            " regions",
            fix=(
                "leave parallel.sequence_parallel out, or give the module"
                " is_per_token_outside_regions = True"
            ),
        )
    if requested == AUTO:
        return can
    return requested


parallelism: Any = TensorParallel()
