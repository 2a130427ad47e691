"""ZeRO-1: parameters and gradients whole on every rank (DDP), the optimizer's state and its work
split over dp_shard.

Each rank updates its rows of every parameter, in place; then the rows of all ranks are gathered,
bucket by bucket. Ranks that share memory read each other's rows where these lie.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from phalanx.core.phases import PhaseTimer
from phalanx.mesh.compat import wrap_local_as_dtensor
from phalanx.mesh.gloo_collectives import all_gather_rows_in_place
from phalanx.mesh.shared_memory.in_place import GatheredTensor
from phalanx.mesh.shared_memory.opening import find_transport_in_place
from phalanx.parallel.data_parallel.bucket_bytes import choose_bucket_bytes
from phalanx.parallel.optimizer_params import OptimizerParameterSubstitute
from phalanx.parallel.protocol import ParallelContext, TransformOrder
from phalanx.plan.plan import Plan


class Zero1:
    order = TransformOrder.ZERO1

    def is_needed(self, plan: Plan) -> bool:
        return plan.parallel.zero_stage == 1 and plan.layout.gradient_reduction_layout.dp_shard > 1

    def apply(self, context: ParallelContext) -> None:
        context.materialize()
        axes = context.fsdp_mesh_axes
        mesh, group = context.mesh.submesh(*axes), context.mesh.submesh("dp_shard").get_group()
        _move_to_shared_memory(context.root.module.parameters(), group)
        cut = []
        for parameter in context.root.module.parameters():
            if not parameter.requires_grad:
                continue
            rows = find_rows_of_rank(parameter, dist.get_rank(group), dist.get_world_size(group))
            last: Placement = Replicate() if rows is None else Shard(rows.dim)
            placements = (Replicate(),) * (len(axes) - 1) + (last,)
            take = rows.slice_tensor if rows is not None else _select_unsplit_tensor
            local = take(parameter.detach())
            # A DTensor over the rows, so that optimizers and checkpoints know its place in the
            # whole.
            trained = nn.Parameter(wrap_local_as_dtensor(local, mesh, placements, parameter))
            context.optimizer_params.shards[parameter] = OptimizerParameterSubstitute(
                parameter, trained, take
            )
            if rows is not None:
                cut.append((parameter, rows))
        num_bytes = choose_bucket_bytes(context.plan)
        gather = UpdatedParameterGather(cut, group, bucket_bytes=num_bytes, phases=context.phases)
        context.optimizer_params.after_update.append(gather.gather_updated_parameters)


def _move_to_shared_memory(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Have trained parameters lie where the other ranks of `group` read the rows that this one
    updates, if there is such memory."""
    transport = find_transport_in_place(group)
    if transport is None:
        return
    for parameter in parameters:
        is_cut = find_rows_of_rank(parameter, 0, dist.get_world_size(group)) is not None
        if parameter.requires_grad and is_cut:
            values = transport.make_tensor(parameter.numel(), parameter.dtype)
            if values is not None:
                parameter.data = values.view(parameter.shape).copy_(parameter.data)


def _select_unsplit_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass(frozen=True)
class RowsOfRank:
    """A rank's rows of a tensor along `dim`, cut as torch.chunk cuts.

    `chunk`: rows of a rank that is not the last.
    """

    dim: int
    start: int
    length: int
    chunk: int

    def slice_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view."""
        return tensor.narrow(self.dim, self.start, self.length)


def find_rows_of_rank(tensor: torch.Tensor, rank: int, num_ranks: int) -> RowsOfRank | None:
    """Along the first dimension longer than one, so that each rank's rows lie together.

    None for a single number, and for a tensor that does not lie in the order of its dimensions:
    every rank updates all of these.
    """
    dim = next((dim for dim, size in enumerate(tensor.shape) if size > 1), None)
    if dim is None or not tensor.is_contiguous():
        return None
    size = tensor.shape[dim]
    chunk = -(-size // num_ranks)
    start = min(rank * chunk, size)
    return RowsOfRank(dim, start, min(chunk, size - start), chunk)


@dataclass(frozen=True)
class _ParameterSpanInBucket:
    """Elements [start, start + length) of each rank's `chunk` elements of a flat parameter; at
    `offset` in a bucket."""

    flat: torch.Tensor
    chunk: int
    start: int
    length: int
    offset: int

    def write_to_bucket(self, segment: torch.Tensor, rank: int) -> None:
        """This rank's elements into its segment of the bucket; the last ranks may have fewer, or
        none."""
        first = rank * self.chunk + self.start
        rank_part = self.flat[first : min(first + self.length, (rank + 1) * self.chunk)]
        segment[self.offset : self.offset + rank_part.numel()] = rank_part

    def read_from_bucket(self, bucket: torch.Tensor, rank: int) -> None:
        """The other ranks' elements, from [ranks, segment] to where they belong."""
        for other, row in enumerate(bucket):
            first = other * self.chunk + self.start
            end = min(first + self.length, (other + 1) * self.chunk, self.flat.numel())
            if other != rank and end > first:
                self.flat[first:end] = row[self.offset : self.offset + end - first]


class UpdatedParameterGather:
    """Brings together what each rank updated, in collectives of `bucket_bytes` over all ranks at
    most."""

    def __init__(
        self,
        cut: Iterable[tuple[nn.Parameter, RowsOfRank]],
        group: dist.ProcessGroup,
        *,
        bucket_bytes: int,
        phases: PhaseTimer,
    ) -> None:
        self._group, self._phases = group, phases
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._buckets: list[list[_ParameterSpanInBucket]] = []
        cut = list(cut)
        self._cut = cut
        by_type: dict[torch.dtype, list[tuple[torch.Tensor, int]]] = defaultdict(list)
        for parameter, rows in cut:
            # In elements: dimensions before that of the rows are of size 1, so a rank's rows lie
            # together.
            chunk = rows.chunk * parameter.stride(rows.dim)
            by_type[parameter.dtype].append((parameter.detach().view(-1), chunk))
        for dtype, tensors in by_type.items():
            self._assign_spans_to_buckets(
                tensors, max(1, bucket_bytes // (dtype.itemsize * self._num_ranks))
            )

    def _assign_spans_to_buckets(
        self, tensors: Iterable[tuple[torch.Tensor, int]], room: int
    ) -> None:
        """Buckets of at most `room` elements per rank; a large parameter takes several."""
        spans: list[_ParameterSpanInBucket] = []
        used = 0
        for flat, chunk in tensors:
            start = 0
            # A span ends where its parameter or its bucket does; `used` elements of each rank's
            # segment are taken.
            while start < chunk:
                if used == room:
                    self._buckets.append(spans)
                    spans, used = [], 0
                length = min(chunk - start, room - used)
                spans.append(_ParameterSpanInBucket(flat, chunk, start, length, used))
                start, used = start + length, used + length
        if spans:
            self._buckets.append(spans)

    @torch.no_grad()
    def gather_updated_parameters(self) -> None:
        if not self._cut:
            # Nothing is trained here, as in a pipeline's stage without parameters: on all ranks of
            # the group, which have the same part of the model.
            return
        transport = find_transport_in_place(self._group)
        if transport is None:
            self._gather_by_buckets()
            return
        with self._phases("collective", "all_gather updated weights", axis="dp"):
            gathered = [self._show_parameter(parameter, rows) for parameter, rows in self._cut]
            transport.gather_in_place(self._group, gathered).wait()

    def _show_parameter(self, parameter: nn.Parameter, rows: RowsOfRank) -> GatheredTensor:
        """A parameter, of which each rank shows all and has updated a chunk."""
        flat, chunk = parameter.detach().view(-1), rows.chunk * parameter.stride(rows.dim)
        starts = [min(rank * chunk, flat.numel()) for rank in range(self._num_ranks)]
        return GatheredTensor(flat, [flat[start : start + chunk] for start in starts], starts)

    def _gather_by_buckets(self) -> None:
        for spans in self._buckets:
            flat, size = spans[0].flat, spans[-1].offset + spans[-1].length
            bucket = torch.empty(self._num_ranks, size, dtype=flat.dtype, device=flat.device)
            for span in spans:
                span.write_to_bucket(bucket[self._rank], self._rank)
            # One collective per bucket: a gather per parameter would cost its latency each time.
            with self._phases("collective", "all_gather updated weights", axis="dp"):
                all_gather_rows_in_place(bucket, self._group)
            for span in spans:
                span.read_from_bucket(bucket, self._rank)


parallelism = Zero1()
