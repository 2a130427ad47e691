"""Gradients of data parallelism, compressed on their way: the hook a job names, and what it
keeps between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from phalanx.core.registry import import_object_of_kind
from phalanx.mesh.logical import Box, LogicalShard, full_name, get_dtype_name, make_logical_shard
from phalanx.mesh.mesh import Mesh
from phalanx.parallel.data_parallel.ddp_buckets import (
    ALL_REDUCE_GRADIENTS,
    WholeReduction,
    reduce_buckets_on_own_stream,
)
from phalanx.parallel.data_parallel.own_rows import (
    REDUCE_SCATTER_GRADIENTS,
    OwnRowsReduction,
    can_scatter_gradients,
)
from phalanx.parallel.expert.transform import ShardedExperts
from phalanx.parallel.hooks._protocol import ERROR, CompressionOptions, Gradient, Hook
from phalanx.parallel.loss_scale import LossScale
from phalanx.parallel.protocol import ParallelContext
from phalanx.parallel.traffic import GradientTraffic
from phalanx.parallel.wire import Wire

COMPRESSION_HOOKS_PACKAGE = "phalanx.parallel.hooks"
# Names of its state in checkpoints begin with this.
COMPRESSION_STATE_PREFIX = "comm/"


# By parameter, and not by bucket, whose borders torch moves after the first step: what a rank has
# not sent is then state with a name, and a continued run repeats it.
class GradientCompression:
    """One hook over the parameters of a model, which every rank of `wire` holds whole.

    The state exists from the start. A parameter's error is in the units of its gradient without
    loss scaling. The rank that sees a gradient which is not finite keeps the error it had; of a
    step that is not applied for another reason, what was sent is lost and what was not is kept.
    """

    def __init__(
        self,
        hook: Hook,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        wire: Wire,
        loss_scale: LossScale | None = None,
    ) -> None:
        self._hook, self._wire, self._loss_scale = hook, wire, loss_scale
        self._names: dict[nn.Parameter, str] = {}
        self._slots: dict[str, dict[str, torch.Tensor]] = {}
        for raw_name, parameter in named_parameters:
            if not parameter.requires_grad:
                continue
            name, tensor = full_name(raw_name), parameter.detach()
            self._names[parameter] = name
            slots = {ERROR: torch.zeros_like(tensor)} if hook.keeps_error else {}
            self._slots[name] = slots | hook.shared_slots(name, tensor)

    def surround_hook(self, observer: Hook) -> Hook:
        """Reduce through `observer` from now on; return the hook, which it is to call."""
        hook, self._hook = self._hook, observer
        return hook

    def attach_to_ddp(self, ddp: DistributedDataParallel) -> None:
        """From now on `ddp` reduces its buckets through the hook."""
        reduce_buckets_on_own_stream(
            ddp,
            lambda bucket: self.average_gradients_over_ranks(
                bucket.parameters(), bucket.gradients()
            ),
        )

    @torch.no_grad()
    def average_gradients_over_ranks(
        self, parameters: Iterable[nn.Parameter], tensors: Iterable[torch.Tensor]
    ) -> None:
        """Make each of `tensors`, gradients of `parameters`, the mean over ranks; in place.

        Collective.
        """
        scale = 1.0 if self._loss_scale is None else self._loss_scale.scale
        gradients = []
        for parameter, tensor in zip(parameters, tensors, strict=True):
            if tensor.numel():
                name = self._names[parameter]
                gradients.append(Gradient(name, tensor, self._slots[name]))
        if not gradients:
            return
        # Errors are kept without the loss scale, which may be another one in the next step.
        if self._hook.keeps_error:
            for gradient in gradients:
                gradient.tensor.add_(gradient.slots[ERROR], alpha=scale)
        new_errors = self._hook.reduce(gradients, self._wire)
        # A hook without error feedback returns no errors at all.
        for gradient, rest in zip(gradients, new_errors, strict=self._hook.keeps_error):
            error = gradient.slots[ERROR]
            # `where` and no `if`: the host need not wait for a GPU to know it.
            error.copy_(torch.where(rest.isfinite().all(), rest / scale, error))

    def error_feedback_gradients(self) -> dict[str, torch.Tensor]:
        """Gradients, by parameter, that this rank has not sent yet; none for hooks that send
        all."""
        return {name: slots[ERROR] for name, slots in self._slots.items() if ERROR in slots}

    @property
    def num_bytes(self) -> int:
        """Bytes of the hooks' state on this rank."""
        return sum(tensor.nbytes for slots in self._slots.values() for tensor in slots.values())

    def list_state_tensors(self) -> list[torch.Tensor]:
        """The hooks' state on this rank."""
        return list(self.map_state_tensors().values())

    def map_state_tensors(self) -> dict[str, torch.Tensor]:
        """The hooks' state on this rank, by `<parameter>/<slot>`."""
        named_tensors = {}
        for name, slots in self._slots.items():
            for slot, tensor in slots.items():
                named_tensors[f"{name}/{slot}"] = tensor
        return named_tensors

    def collect_state_shards(
        self, model: Mapping[str, LogicalShard], mesh: Mesh
    ) -> dict[str, LogicalShard]:
        """The state as logical tensors `comm/<parameter>/<slot>`.

        Errors differ between ranks: together they are one tensor, [ranks, *parameter], of which
        each rank holds a row.
        """
        named_shards: dict[str, LogicalShard] = {}
        for name, slots in self._slots.items():
            for slot, tensor in slots.items():
                key = f"{COMPRESSION_STATE_PREFIX}{name}/{slot}"
                if slot != ERROR:
                    named_shards[key] = make_logical_shard(
                        key, tensor, replica=mesh.rank, num_replicas=mesh.world_size
                    )
                    continue
                owner, row = model[name], self._wire.rank
                boxes = tuple(
                    Box((row, *box.global_offset), (0, *box.local_offset), (1, *box.size))
                    for box in owner.boxes
                )
                shape = (self._wire.num_ranks, *owner.global_shape)
                named_shards[key] = LogicalShard(
                    key, shape, get_dtype_name(tensor.dtype), boxes, tensor[None]
                )
        return named_shards


@dataclass(frozen=True)
class AttachedReduction:
    """How a DDP model reduces its buckets: `collective` says it to people, `count_step` counts the
    bytes of a step that torch reduces by itself."""

    collective: str
    count_step: Callable[[], None]


def attach_gradient_reduction_to_ddp(
    context: ParallelContext, ddp: DistributedDataParallel
) -> AttachedReduction:
    """Have `ddp` reduce as the plan says."""
    group, traffic = context.mesh.data_parallel_group(), context.traffic.gradients
    experts = context.axes.find(ShardedExperts)
    # DDP leaves these out: they are reduced, and counted, over the ranks that hold the same ones.
    separate = set() if experts is None else set(experts.parameters())
    trained = [p for p in context.root.parameters() if p.requires_grad]
    averaged = [p for p in trained if p not in separate]
    reduction: OwnRowsReduction | WholeReduction = WholeReduction(group)
    if averaged and can_scatter_gradients(context.plan, group, averaged[0]):
        reduction = OwnRowsReduction(group, traffic)
    plain = GradientTraffic()
    reduction.count_bytes(averaged, plain)
    if experts is not None:
        num_elements = sum(p.numel() for p in trained if p in separate)
        plain.add_all_reduce(4 * num_elements, experts.num_ranks_with_same_experts)
    traffic.plain_bytes = round(plain.sent_bytes)
    wire = Wire(group, traffic, context.phases)
    compression = build_gradient_compression(context, wire)
    if compression is not None:
        context.axes.add(compression)
        compression.attach_to_ddp(ddp)
        return AttachedReduction(ALL_REDUCE_GRADIENTS, _count_nothing)
    reduction.attach_to_ddp(ddp)
    if isinstance(reduction, OwnRowsReduction):
        # It counts what it sends.
        return AttachedReduction(REDUCE_SCATTER_GRADIENTS, _count_nothing)
    return AttachedReduction(ALL_REDUCE_GRADIENTS, lambda: reduction.count_bytes(averaged, traffic))


def _count_nothing() -> None:
    pass


def build_gradient_compression(context: ParallelContext, wire: Wire) -> GradientCompression | None:
    """Build the compression that the plan asks for; None if gradients travel as they are."""
    plan = context.plan
    if plan.parallel.compress == "none":
        return None
    settings = CompressionOptions(
        plan.parallel.compress_rank, plan.parallel.compress_fraction, plan.seed
    )
    hook: Hook = import_object_of_kind(plan.parallel.compress, COMPRESSION_HOOKS_PACKAGE, "build")(
        settings
    )
    named_parameters = context.root.module.named_parameters()
    return GradientCompression(hook, named_parameters, wire, context.normalizer.loss_scale)
