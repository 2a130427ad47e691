"""dp_replicate: every rank holds the whole model; gradients are averaged in buckets while the
backward runs (DDP)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from phalanx.core.errors import LayoutError
from phalanx.core.units import MIB, plural
from phalanx.mesh.compat import build_ddp_buffer_option
from phalanx.mesh.devices import is_on_cpu
from phalanx.mesh.logical import full_name
from phalanx.parallel.batchnorm.layer import find_buffers_that_differ_between_ranks
from phalanx.parallel.data_parallel.bucket_bytes import choose_bucket_bytes
from phalanx.parallel.data_parallel.compression import attach_gradient_reduction_to_ddp
from phalanx.parallel.data_parallel.own_rows import OwnRowsReduction
from phalanx.parallel.data_parallel.unsharded_params import average_gradients_in_one_collective
from phalanx.parallel.expert.transform import ShardedExperts
from phalanx.parallel.pipeline.staged import PipelineOfRank
from phalanx.parallel.protocol import ParallelContext, TransformOrder
from phalanx.plan.plan import Plan


class DpReplicate:
    order = TransformOrder.REPLICATE

    def is_needed(self, plan: Plan) -> bool:
        return (
            plan.layout.gradient_reduction_layout.data_parallel_size > 1
            and plan.parallel.zero_stage <= 1
            and not plan.is_layout_free
        )

    def apply(self, context: ParallelContext) -> None:
        context.materialize()
        if context.axes.find(PipelineOfRank) is not None:
            average_gradients_after_pipeline(context)
            return
        options = context.plan.parallel
        experts = context.axes.find(ShardedExperts)
        if experts is not None:
            _average_experts_after_backward(context, experts)
        has_buffers = bool(find_buffers_that_differ_between_ranks(context.root))
        accumulator = None
        if accumulates_in_buckets(context.plan):
            accumulator = BucketAccumulator(context, experts)
        # Gradients as views of the buckets: DDP would keep a second copy of them otherwise.
        ddp = DistributedDataParallel(
            context.root,
            process_group=context.mesh.data_parallel_group(),
            gradient_as_bucket_view=True,
            bucket_cap_mb=choose_bucket_bytes(context.plan) / MIB,
            static_graph=options.static_graph,
            # With a static graph DDP finds them by itself, and warns if it is asked to.
            find_unused_parameters=options.unused_parameters == "allow"
            and not options.static_graph,
            **build_ddp_buffer_option(has_buffers),
            # Equal already: initialised by name and index, or compared by `parallelize`.
            init_sync=False,
        )
        if accumulator is not None:
            context.hooks.around_microbatch.append(accumulator.restore_gradients)
        reduction = attach_gradient_reduction_to_ddp(context, ddp)
        watch = BackwardCommunicationTimer(context, experts, reduction.collective)
        context.axes.add(watch)
        is_learning = options.static_graph

        @contextmanager
        def reduce_if_last_microbatch(is_last: bool) -> Iterator[None]:
            nonlocal is_learning
            # The backward from which DDP learns a static graph must be one that reduces: the first
            # one is, always. What it leaves is averaged already, and averaging that again changes
            # nothing.
            reduces, is_learning = is_last or is_learning, False
            if not reduces:
                with ddp.no_sync():
                    yield
                return
            watch.start_before_backward()
            reduction.count_step()
            yield

        context.outer = ddp
        context.hooks.around_microbatch.append(reduce_if_last_microbatch)
        context.hooks.after_backward.append(watch.stop_after_backward)
        if accumulator is not None:
            context.hooks.after_backward.append(accumulator.remember_gradients)


def accumulates_in_buckets(plan: Plan) -> bool:
    """True if gradients of several microbatches add up in DDP's buckets.

    Not where a parameter may have no gradient, which zeros would stand for, nor with a static
    graph, which the first backward is to show.
    """
    options = plan.parallel
    may_lack_gradients = options.unused_parameters == "allow" or options.static_graph
    return plan.num_microbatches > 1 and not may_lack_gradients


class BucketAccumulator:
    """Keeps gradients in DDP's buckets, so that microbatches before the last add to these. Where a
    gradient is None, autograd allocates a new one: whole gradients beside whole buckets."""

    def __init__(self, context: ParallelContext, experts: ShardedExperts | None) -> None:
        separate = _find_expert_parameters(experts)
        self._parameters: list[nn.Parameter] = []
        for parameter in context.root.parameters():
            if parameter.requires_grad and parameter not in separate:
                self._parameters.append(parameter)
                # DDP's constructor lets a gradient that exists lie in its bucket; this one takes
                # no memory.
                zero = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
                parameter.grad = zero.expand(parameter.shape)
        self._views: dict[nn.Parameter, torch.Tensor] = {}

    @contextmanager
    def restore_gradients(self, is_last: bool) -> Iterator[None]:
        """Before a microbatch: gradients that the optimizer has let go are zeros in the buckets."""
        for parameter, view in self._views.items():
            if parameter.grad is None:
                parameter.grad = view.zero_()
        # DDP may set its buckets anew, and these views would keep the old ones.
        self._views.clear()
        yield

    def remember_gradients(self) -> None:
        """After a backward: where in the buckets the gradients lie."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                self._views[parameter] = parameter.grad


def _find_expert_parameters(experts: ShardedExperts | None) -> set[nn.Parameter]:
    """Parameters that are reduced over other ranks than the rest."""
    if experts is None:
        return set()
    return set(experts.parameters())


def _average_experts_after_backward(context: ParallelContext, experts: ShardedExperts) -> None:
    """They are on fewer ranks than the rest, which DDP does not know: averaged over these after
    the last backward."""
    names = []
    for name, _ in context.root.named_parameters():
        if full_name(name.removeprefix("module.")) in experts.names:
            names.append(name)
    # Left out of DDP's buckets, which are averaged over all ranks of data parallelism.
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(context.root, names)
    if experts.num_ranks_with_same_experts == 1:
        return
    parameters = [p for p in experts.parameters() if p.requires_grad]
    _average_in_buckets_after_backward(
        context, parameters, experts.get_group(), experts.num_ranks_with_same_experts
    )


def _average_in_buckets_after_backward(
    context: ParallelContext,
    parameters: Sequence[nn.Parameter],
    group: dist.ProcessGroup,
    num_ranks: int,
    own_rows: OwnRowsReduction | None = None,
) -> None:
    """After the last backward, from the last parameter on; never a copy of all gradients at
    once. With `own_rows` a rank gets no more than those."""
    # Buckets are in fp32, the type that gradients are averaged in.
    buckets = list(
        _split_parameters_into_buckets(parameters[::-1], choose_bucket_bytes(context.plan))
    )

    def reduce() -> None:
        context.missing_gradients.note_before_reduction(parameters)
        for bucket in buckets:
            if own_rows is not None:
                own_rows.average_after_backward(bucket, context.phases)
                continue
            context.traffic.gradients.add_all_reduce(sum(p.numel() * 4 for p in bucket), num_ranks)
            average_gradients_in_one_collective(bucket, group, context.phases)

    context.optimizer_params.before_update.append(reduce)


def average_gradients_after_pipeline(context: ParallelContext) -> None:
    """DDP cannot follow forwards and backwards of several microbatches at once: gradients are
    averaged after all."""
    group = context.mesh.data_parallel_group()
    experts = context.axes.find(ShardedExperts)
    separate = _find_expert_parameters(experts)
    if experts is not None:
        _average_experts_after_backward(context, experts)
    parameters = [
        p for p in context.root.module.parameters() if p.requires_grad and p not in separate
    ]
    own_rows = None
    # On CPUs there is no bucket that others see, and a message costs more than it saves.
    if context.plan.scatters_gradients and parameters and not is_on_cpu(parameters[0]):
        own_rows = OwnRowsReduction(group, context.traffic.gradients)
    num_ranks = context.plan.layout.gradient_reduction_layout.data_parallel_size
    _average_in_buckets_after_backward(context, parameters, group, num_ranks, own_rows)
    buffers = find_buffers_that_differ_between_ranks(context.root)

    @contextmanager
    def share_buffers(is_last: bool) -> Iterator[None]:
        """Begin every step with the first rank's running statistics, as DDP does."""
        for buffer in buffers:
            dist.broadcast(buffer, dist.get_global_rank(group, 0), group=group)
        yield

    context.hooks.around_microbatch.append(share_buffers)


def _split_parameters_into_buckets(
    parameters: Sequence[nn.Parameter], num_bytes: int
) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        if bucket and sum(p.numel() * 4 for p in bucket) + parameter.numel() * 4 > num_bytes:
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket


class BackwardCommunicationTimer:
    """Charges to "collective" what remains of the backward once the last gradient exists: pure
    waiting. `collective`: which one that is. `unused`: names of parameters that had no part in a
    loss of some step, where that is allowed.

    Who never had a part in one is not waited for. Where a parameter that had one has none, the
    last gradient is unknown, and the waiting of that step stays in the backward.

    DDP starts to reduce a bucket when its gradients are ready and waits for all of them at the end,
    inside C++. What is reduced before the last gradient overlaps with the backward and costs
    nothing visible.
    """

    def __init__(
        self, context: ParallelContext, experts: ShardedExperts | None, collective: str
    ) -> None:
        self.unused: set[str] = set()
        self._collective = collective
        self._phases = context.phases
        self._allows_unused = context.plan.parallel.unused_parameters == "allow"
        separate = _find_expert_parameters(experts)
        self._names: list[str] = []
        # Numbers of parameters, in the order of `_names`: a tensor's hash is a call of Python.
        self._missing: set[int] = set()
        # Without a gradient so far; known once a backward has ended.
        self._never_used: set[int] = set()
        self._is_first_backward = True
        self._armed = self._waiting = False
        for name, parameter in context.root.module.named_parameters():
            if parameter.requires_grad and parameter not in separate:
                # DDP tells nobody when a bucket is due: the last gradient that exists marks the
                # moment.
                record = partial(self._record_ready_gradient, len(self._names))
                parameter.register_post_accumulate_grad_hook(record)
                self._names.append(name)

    def _record_ready_gradient(self, number: int, _: torch.Tensor) -> None:
        # This runs for each parameter in every backward.
        self._missing.discard(number)
        if self._never_used:
            self._never_used.discard(number)
        if self._armed and not self._missing and self._phases.current == "backward":
            self._waiting = True
            self._phases.enter("collective", self._collective, axis="dp")

    def start_before_backward(self) -> None:
        """Before a forward-backward whose gradients are reduced."""
        self._missing = set(range(len(self._names))) - self._never_used
        self._armed, self._waiting = True, False

    def stop_after_backward(self) -> None:
        """When the backward has returned: every bucket has arrived.

        Raises LayoutError if a parameter had no part in the loss: its bucket was not reduced, and
        so its neighbours' gradients are those of this rank alone.
        """
        missing = self._missing if self._armed else ()
        self._armed = False
        if missing:
            names = sorted(full_name(self._names[number]) for number in missing)
        if missing and self._allows_unused:
            self.unused.update(names)
            if self._is_first_backward:
                self._never_used = set(missing)
        elif missing:
            listed_names = ", ".join(names[:3])
            if len(names) > 3:
                listed_names += f" and {len(names) - 3} more"
            raise LayoutError(
                f"{plural(len(names), 'parameter')} had no part in the loss: {listed_names}",
                fix=(
                    "freeze them (requires_grad_(False)), use them in every microbatch, or set "
                    "parallel.unused_parameters=allow"
                ),
            )
        self._is_first_backward = False
        if self._waiting:
            self._waiting = False
            self._phases.leave("collective")


parallelism = DpReplicate()
