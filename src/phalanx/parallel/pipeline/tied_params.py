"""Parameters that several stages hold (a tied embedding: the first and the last): their gradients
are added up.

After data parallelism has reduced its share, once a step, between the ranks that hold the same
part. Copies begin alike, get the same gradient and are updated alike, so they stay equal to the
last bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from phalanx.core.phases import PhaseTimer
from phalanx.mesh.logical import full_name, get_local_tensor
from phalanx.parallel.pipeline.staged import PipelineOfRank
from phalanx.parallel.protocol import ParallelContext, TransformOrder
from phalanx.plan.plan import Plan


class SumTiedParameterGradients:
    order = TransformOrder.TIED_PARAMS

    def is_needed(self, plan: Plan) -> bool:
        return plan.layout.pp > 1

    def apply(self, context: ParallelContext) -> None:
        staged = context.axes.find(PipelineOfRank)
        assert staged is not None
        if staged.holders:
            module, phases = context.root.module, context.phases
            context.optimizer_params.before_update.append(
                lambda: sum_gradients_of_tied_parameters(staged, module, phases)
            )


@torch.no_grad()
def sum_gradients_of_tied_parameters(
    staged: PipelineOfRank, module: nn.Module, phases: PhaseTimer
) -> None:
    """Sum the gradients of tied parameters over the stages that hold them, in place.

    All parameters of one set of holders travel together; each rank adds in the order of the stages.
    """
    by_holders: dict[tuple[tuple[int, ...], torch.dtype], list[nn.Parameter]] = {}
    for raw_name, parameter in module.named_parameters():
        holders = staged.holders.get(full_name(raw_name))
        if holders is not None and parameter.requires_grad:
            by_holders.setdefault((holders, parameter.dtype), []).append(parameter)
    # Sorted, for both sides of an exchange must come to it in one order; by text, for torch's types
    # cannot be compared.
    for (holders, dtype), parameters in sorted(by_holders.items(), key=lambda item: str(item[0])):
        own_part = torch.cat([_gradient_or_zeros(p).flatten() for p in parameters]).to(dtype)
        with phases("collective", "exchange gradients of parameters of several stages", axis="pp"):
            total = _sum_over_holding_ranks(staged, holders, own_part)
        for parameter, part in zip(
            parameters,
            total.split([_gradient_or_zeros(p).numel() for p in parameters]),
            strict=True,
        ):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = get_local_tensor(parameter.grad)
            gradient.copy_(part.view(gradient.shape))


def _gradient_or_zeros(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        return torch.zeros_like(get_local_tensor(parameter.detach()))
    return get_local_tensor(parameter.grad)


def _sum_over_holding_ranks(
    staged: PipelineOfRank, holders: tuple[int, ...], own_part: torch.Tensor
) -> torch.Tensor:
    stage_group = staged.stage_group
    parts_by_rank, works = {stage_group.rank: own_part}, []
    for holder in holders:
        if holder != stage_group.rank:
            stage_group.sent_bytes += own_part.nbytes
            parts_by_rank[holder] = torch.empty_like(own_part)
            # The way down first, on both ranks: NCCL opens a way when it is first used, and waits
            # for the other rank.
            if stage_group.rank < holder:
                works += [
                    stage_group.start_send(own_part, holder),
                    stage_group.start_receive(parts_by_rank[holder], holder),
                ]
            else:
                works += [
                    stage_group.start_receive(parts_by_rank[holder], holder),
                    stage_group.start_send(own_part, holder),
                ]
    _wait_for_all_messages(works)
    total = parts_by_rank[holders[0]].clone()
    for holder in holders[1:]:
        total += parts_by_rank[holder]
    return total


def _wait_for_all_messages(works: list[Any]) -> None:
    for work in works:
        work.wait()


parallelism = SumTiedParameterGradients()
