"""train.deterministic = "layout-free": every rank holds the whole model, and gradients of
microbatches are added along one tree, whatever rank has them (`plan.leaf_tree`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from phalanx.core.errors import LayoutError
from phalanx.core.phases import PhaseTimer
from phalanx.mesh.logical import full_name
from phalanx.parallel.batchnorm.layer import find_buffers_that_differ_between_ranks
from phalanx.parallel.data_parallel.bucket_bytes import choose_bucket_bytes
from phalanx.parallel.protocol import ParallelContext, TransformOrder
from phalanx.plan.leaf_tree import LeafTree
from phalanx.plan.plan import Plan

Gradients = list[torch.Tensor]


class GradientTreeTransform:
    order = TransformOrder.GRADIENT_TREE

    def is_needed(self, plan: Plan) -> bool:
        return plan.is_layout_free

    def apply(self, context: ParallelContext) -> None:
        context.materialize()
        if find_buffers_that_differ_between_ranks(context.root):
            raise LayoutError(
                "running statistics follow the batch of a rank, and train.deterministic is"
                ' "layout-free"',
                fix="use another norm than BatchNorm, or set train.deterministic=true",
            )
        tree = GradientTree(context)
        context.axes.add(tree)
        context.hooks.after_backward.append(tree.take_gradients_of_microbatch)
        context.optimizer_params.before_update.append(tree.finish_sum)


class GradientTree:
    """Adds the gradients of a step: those of this rank's microbatches as they come, then over
    ranks. The sum, and not a mean, becomes the gradient."""

    def __init__(self, context: ParallelContext) -> None:
        plan = context.plan
        self._num_ranks = plan.layout.data_parallel_size
        self._parameters = {
            p: full_name(name)
            for name, p in context.root.module.named_parameters()
            if p.requires_grad
        }
        self._sums = PartialSums(leaves_per_class=1)
        self._context = context
        self._exchange: TreeExchange | None = None
        if self._num_ranks > 1:
            group = context.mesh.data_parallel_group()
            self._exchange = TreeExchange(group, choose_bucket_bytes(plan), context.phases)

    def begin_step(self, num_microbatches: int) -> Sequence[int]:
        """The order in which this rank takes the microbatches of a step; every rank has as
        many."""
        tree = LeafTree(num_microbatches * self._num_ranks)
        self._sums = PartialSums(tree.leaves_per_class)
        return tree.order_microbatches(num_microbatches)

    def take_gradients_of_microbatch(self) -> None:
        """Raises LayoutError for parameters without a gradient: others may have one."""
        gradients = []
        for parameter, name in self._parameters.items():
            if parameter.grad is None:
                raise LayoutError(
                    f"{name} had no part in the loss of a microbatch",
                    fix="freeze it (requires_grad_(False)), or use it in every microbatch",
                )
            gradients.append(parameter.grad)
            parameter.grad = None
        with torch.no_grad():
            self._sums.add(gradients)

    @torch.no_grad()
    def finish_sum(self) -> None:
        """After the last backward: every rank has the sum over all microbatches."""
        drawing = self._context.dropout_rng.left_to_torch
        if drawing:
            raise LayoutError(
                f"{next(iter(drawing))} draws random numbers that depend on the rank:"
                f" {next(iter(drawing.values()))}",
                fix='draw by dropout alone, or leave train.deterministic = "layout-free"',
            )
        total = self._sums.take_total()
        if self._exchange is not None:
            num_bytes = sum(gradient.nbytes for gradient in total)
            self._context.traffic.gradients.add_all_reduce(num_bytes, self._num_ranks)
            self._exchange.add_over_ranks(total)
        for parameter, gradient in zip(self._parameters, total, strict=True):
            parameter.grad = gradient


class PartialSums:
    """Adds gradients that come one microbatch after another along a binary tree, of which only the
    sums that wait for a neighbour are held. `leaves_per_class`: so many in a row are added in
    order."""

    def __init__(self, leaves_per_class: int) -> None:
        self._leaves_per_class = leaves_per_class
        self._class: Gradients = []
        self._num_in_class = 0
        self._waiting: list[tuple[int, Gradients]] = []

    def add(self, gradients: Gradients) -> None:
        """Add those of the next microbatch, whose memory is taken over."""
        if self._num_in_class:
            torch._foreach_add_(self._class, gradients)
        else:
            self._class = gradients
        self._num_in_class += 1
        if self._num_in_class < self._leaves_per_class:
            return
        level, total = 0, self._class
        self._class, self._num_in_class = [], 0
        while self._waiting and self._waiting[-1][0] == level:
            _, earlier = self._waiting.pop()
            torch._foreach_add_(earlier, total)
            level, total = level + 1, earlier
        self._waiting.append((level, total))

    @property
    def num_held(self) -> int:
        """Sets of gradients that wait for others."""
        return len(self._waiting) + (self._num_in_class > 0)

    def take_total(self) -> Gradients:
        """The sum over all; then nothing is held any more."""
        ((_, total),) = self._waiting
        self._waiting = []
        return total


class TreeExchange:
    """Adds tensors over the ranks of `group` along a binary tree, in place: each rank gets its part
    of every rank's, adds these in the order of the tree, and gives the sum to all. As many bytes
    as a ring sends."""

    def __init__(self, group: dist.ProcessGroup, bucket_bytes: int, phases: PhaseTimer) -> None:
        self._group, self._bucket_bytes, self._phases = group, bucket_bytes, phases
        self._num_ranks = dist.get_world_size(group)

    def add_over_ranks(self, tensors: Sequence[torch.Tensor]) -> None:
        with self._phases("collective", "add gradients along the tree", axis="dp"):
            for bucket in self._split_into_buckets(tensors):
                self._add_bucket(bucket)

    def _split_into_buckets(self, tensors: Sequence[torch.Tensor]) -> Iterator[Gradients]:
        """From the last parameter on, each of one type and of at most `bucket_bytes`, or of one
        tensor."""
        bucket: Gradients = []
        num_bytes = 0
        for tensor in reversed(tensors):
            is_full = num_bytes + tensor.nbytes > self._bucket_bytes
            if bucket and (is_full or bucket[0].dtype != tensor.dtype):
                yield bucket
                bucket, num_bytes = [], 0
            bucket.append(tensor)
            num_bytes += tensor.nbytes
        if bucket:
            yield bucket

    def _add_bucket(self, bucket: Gradients) -> None:
        num_elements = sum(tensor.numel() for tensor in bucket)
        part = -(-num_elements // self._num_ranks)
        flat = bucket[0].new_zeros(part * self._num_ranks)
        torch.cat([tensor.flatten() for tensor in bucket], out=flat[:num_elements])
        rows = torch.empty_like(flat).view(self._num_ranks, part)
        dist.all_to_all_single(rows.view(-1), flat, group=self._group)
        total = add_rows_along_tree(rows)
        gathered = list(flat.chunk(self._num_ranks))
        dist.all_gather(gathered, total, group=self._group)
        at = 0
        for tensor in bucket:
            tensor.copy_(flat[at : at + tensor.numel()].view_as(tensor))
            at += tensor.numel()


def add_rows_along_tree(rows: torch.Tensor) -> torch.Tensor:
    """The sum of [ranks, elements] over ranks, a power of two: first those whose numbers differ in
    the highest bit. In place."""
    num_rows = len(rows)
    while num_rows > 1:
        num_rows //= 2
        rows[:num_rows] += rows[num_rows : 2 * num_rows]
    return rows[0]


parallelism = GradientTreeTransform()
