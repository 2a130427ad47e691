"""ep: each rank holds a part of the experts; tokens travel to the experts that they chose, and
back.

Arithmetic. ep adds no ranks: it folds over dp_shard x cp, whose neighbours are its ranks. Each has
its own tokens, and the experts e of [E / ep * r, E / ep * (r + 1)). A rank's gradient of its
experts is that of the tokens of all ep ranks, whose gradients came through the second all-to-all of
the backward. So the gradient G of a step is the sum over the D / ep ranks that hold the same
experts, where D = dp_replicate x dp_shard x cp. Data parallelism averages over these D / ep;
divided by ep this is the mean over D that it is for all other parameters, and `reduce_and_clip`
does with both the same.

Shape suffixes: R rows (a token and an expert that it chose), D model width, E experts, P ranks of
ep.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from phalanx.core.errors import LayoutError
from phalanx.core.phases import PhaseTimer
from phalanx.mesh.grouped import cache_group_sizes
from phalanx.mesh.logical import Box, TensorParallelCut, full_name, get_local_tensor
from phalanx.parallel.pipeline.staged import PipelineOfRank
from phalanx.parallel.protocol import ParallelContext, TransformOrder
from phalanx.plan.plan import Plan

Rows = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class ExpertParallel:
    order = TransformOrder.EXPERTS

    def is_needed(self, plan: Plan) -> bool:
        return plan.layout.ep > 1

    def apply(self, context: ParallelContext) -> None:
        """Cuts the experts of each mixture, and has it dispatch between ranks."""
        module, layout = context.root.module, context.plan.layout
        _require_features_compatible_with_ep(context.plan)
        mixtures = {
            full_name(name): part
            for name, part in module.named_modules()
            if is_mixture_of_experts(part)
        }
        if not mixtures and context.axes.find(PipelineOfRank) is None:
            raise LayoutError(
                "parallel.ep needs a model whose experts can be dispatched to, and"
                f" {type(module).__name__} has none",
                fix="leave parallel.ep out",
            )
        mesh = context.mesh.submesh("ep")
        group = ExpertGroup(mesh.get_group(), layout.ep, context.phases)
        cuts: dict[str, TensorParallelCut] = {}
        for name, part in mixtures.items():
            part.dispatch = ExpertDispatchBetweenRanks(group)
            cuts |= _keep_experts_of_rank(
                part.experts, f"{name}.experts", group, context.cuts, tp=layout.tp
            )
        context.cuts.update(cuts)
        axes = ("dp_replicate", "expert_shard") if layout.dp_replicate > 1 else ("expert_shard",)
        modules = tuple(part.experts for part in mixtures.values())
        context.axes.add(
            ShardedExperts(frozenset(cuts), modules, context.mesh.submesh(*axes), layout.ep)
        )
        context.traffic.count_axis_by_sender("ep", group)
        context.hooks.before_reduce.append(
            lambda named: rescale_expert_gradients_to_all_ranks(named, frozenset(cuts), layout.ep)
        )


def is_mixture_of_experts(part: nn.Module) -> bool:
    """True for the seam: a module with a router, experts and a dispatch between them."""
    return all(hasattr(part, name) for name in ("router", "experts", "dispatch"))


def rescale_expert_gradients_to_all_ranks(
    named: Iterable[tuple[str, nn.Parameter]], names: Collection[str], ep: int
) -> None:
    """From the mean over the ranks that hold the same experts to that over all ranks of data
    parallelism."""
    expert_grads = [
        get_local_tensor(p.grad)
        for name, p in named
        if full_name(name) in names and p.grad is not None
    ]
    if expert_grads:
        torch._foreach_div_(expert_grads, ep)


def _require_features_compatible_with_ep(plan: Plan) -> None:
    conflict = ""
    # The optimizer's part of ZeRO-1 would need a second cut of the same rows.
    if plan.parallel.zero_stage == 1:
        conflict = "parallel.zero_stage=1"
    elif plan.parallel.compress != "none":
        conflict = f"parallel.compress={plan.parallel.compress}"
    elif plan.compile:
        conflict = "train.compile"
    if not conflict:
        return
    why, fix = None, f"leave {conflict} out"
    if not plan.compile:
        why = "gradients of experts are reduced over other ranks than the rest"
    if plan.parallel.zero_stage == 1:
        fix = "set parallel.zero_stage=2 or 3"
    raise LayoutError(f"parallel.ep and {conflict} do not go together", why=why, fix=fix)


def _keep_experts_of_rank(
    experts: nn.Module, prefix: str, group: ExpertGroup, cuts: Any, *, tp: int
) -> dict[str, TensorParallelCut]:
    """Every parameter [E, ...] of `experts` becomes this rank's [E / P, ...]."""
    expert_cuts: dict[str, TensorParallelCut] = {}
    for path, parameter in list(experts.named_parameters()):
        name, total = f"{prefix}.{full_name(path)}", parameter.shape[0]
        if total % group.size:
            raise LayoutError(f"ep {group.size} does not divide the {total} experts of {prefix}")
        if tp > 1 and name not in cuts:
            raise LayoutError(
                f"no sharding rule cuts {name} over tp {tp}",
                fix="leave its rules as the model has them",
            )
        size = total // group.size
        start = group.rank * size
        owner = experts.get_submodule(path.rpartition(".")[0])
        # A copy: a slice would keep the memory of all experts.
        local = nn.Parameter(
            parameter.detach()[start : start + size].clone(), requires_grad=parameter.requires_grad
        )
        setattr(owner, path.rpartition(".")[2], local)
        full_boxes = (Box((0,) * parameter.ndim, (0,) * parameter.ndim, tuple(parameter.shape)),)
        before = cuts.get(name) or TensorParallelCut(tuple(parameter.shape), full_boxes)
        boxes = (
            replace(box, global_offset=(start, *box.global_offset[1:]), size=(size, *box.size[1:]))
            for box in before.boxes
        )
        expert_cuts[name] = TensorParallelCut(before.global_shape, tuple(boxes), ep=group.size)
    return expert_cuts


@dataclass(frozen=True)
class ShardedExperts:
    """Parameters that data parallelism reduces over other ranks than the rest: `mesh`, those
    that hold the same."""

    names: frozenset[str]
    modules: tuple[nn.Module, ...]
    mesh: DeviceMesh
    ep: int

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for module in self.modules for parameter in module.parameters()]

    @property
    def num_ranks_with_same_experts(self) -> int:
        return self.mesh.size()

    def get_group(self) -> dist.ProcessGroup:
        """Process group of the ranks that hold the same experts."""
        # A process group is of one dimension: with copies of shards both axes are one.
        mesh = self.mesh if self.mesh.ndim == 1 else self.mesh._flatten("experts_dp")
        return mesh.get_group()


@dataclass
class ExpertGroup:
    """The ranks that have different experts.

    `sent_bytes` counts what this rank has sent to others, `num_exchanges` the all-to-alls of rows.
    """

    group: dist.ProcessGroup
    size: int
    phases: PhaseTimer
    sent_bytes: int = field(default=0)
    num_exchanges: int = field(default=0)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def exchange_counts(self, counts_PE: torch.Tensor) -> torch.Tensor:
        """[P, E / P]: how many rows for each of another rank's experts -> how many of each rank
        for each of its own."""
        arrived = torch.empty_like(counts_PE)
        self.sent_bytes += counts_PE.nbytes // self.size * (self.size - 1)
        with self.phases("collective", "all_to_all counts of rows", axis="ep"):
            dist.all_to_all_single(arrived, counts_PE.contiguous(), group=self.group)
        return arrived

    def exchange_rows(
        self, rows_RD: torch.Tensor, to: Sequence[int], of: Sequence[int]
    ) -> torch.Tensor:
        """The first to[0] rows go to rank 0, and so on; of[0] rows of rank 0 come first in what
        is returned."""
        arrived = rows_RD.new_empty(sum(of), rows_RD.shape[1])
        self.sent_bytes += (
            (len(rows_RD) - to[self.rank]) * rows_RD.shape[1] * rows_RD.element_size()
        )
        self.num_exchanges += 1
        with self.phases("collective", "all_to_all rows of experts", axis="ep"):
            dist.all_to_all_single(
                arrived, rows_RD.contiguous(), list(of), list(to), group=self.group
            )
        return arrived


@dataclass(frozen=True)
class ExpertDispatchBetweenRanks:
    """Dispatch to the experts of all ranks of `group`; the interface is that of the seam."""

    group: ExpertGroup

    def __call__(self, x_RD: torch.Tensor, counts_E: torch.Tensor, experts: Rows) -> torch.Tensor:
        size = self.group.size
        # Experts lie rank by rank, so a row of this view is what one rank gets.
        counts_PE = counts_E.view(size, -1)
        arrived_PE = self.group.exchange_counts(counts_PE)
        sent_counts, arrived_counts = read_sent_and_arriving_counts(
            counts_PE, arrived_PE, len(x_RD), self.group.rank
        )
        sent, received = [sum(row) for row in sent_counts], [sum(row) for row in arrived_counts]
        rows = _ExchangeRowsFunction.apply(x_RD, sent, received, self.group)
        # They come rank by rank, and of each rank expert by expert: a stable sort makes runs of one
        # expert.
        numbers = torch.arange(arrived_PE.shape[1], device=x_RD.device).repeat(size)
        # With output_size, or the host would wait for a GPU to know how long the result is.
        order = numbers.repeat_interleave(arrived_PE.flatten(), output_size=sum(received)).argsort(
            stable=True
        )
        counts_here = cache_group_sizes(
            arrived_PE.sum(0), [sum(column) for column in zip(*arrived_counts, strict=True)]
        )
        outputs = experts(rows.index_select(0, order), counts_here)
        # The inverse of `order`: outputs go back in the order in which their rows came.
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        out: torch.Tensor = _ExchangeRowsFunction.apply(
            outputs.index_select(0, back), received, sent, self.group
        )
        return out


def read_sent_and_arriving_counts(
    counts_PE: torch.Tensor, arrived_PE: torch.Tensor, num_rows: int, rank: int
) -> tuple[list[list[int]], list[list[int]]]:
    """The numbers of rows that `rank` sends, of `num_rows` in all, and of those that come to it:
    by rank, and of each its experts."""
    # All that the host must know of the counts, in one read: a GPU is waited for once.
    sent, arrived = torch.stack((counts_PE, arrived_PE)).tolist()
    return sent, arrived


class _ExchangeRowsFunction(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, rows: torch.Tensor, to: list[int], of: list[int], group: ExpertGroup
    ) -> torch.Tensor:
        ctx.to, ctx.of, ctx.group = to, of, group
        return group.exchange_rows(rows, to, of)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.group.exchange_rows(grad, ctx.of, ctx.to), None, None, None


parallelism = ExpertParallel()
