"""Offload: what autograd keeps from the forward waits for the backward in host memory.

Each storage goes once, on a stream of its own beside the computation, and comes back before the
backward needs it: the backward asks in about the reverse order, so the next ones are fetched ahead.
Weights stay, and so does what is small. On a CPU the same path copies from memory to memory.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from phalanx.parallel.protocol import ParallelContext, TransformOrder
from phalanx.parallel.saved_tensors import is_parameter_or_derived
from phalanx.plan.plan import Plan

# Below this a copy costs more than it frees; a CPU rehearses with everything.
MIN_OFFLOAD_BYTES_BY_DEVICE_TYPE = {
    "cuda": 1 << 16,
    "cpu": 1,
}
# So many storages are fetched before the backward asks for them.
NUM_PREFETCHED_STORAGES = 2


class OffloadActivations:
    order = TransformOrder.ACTIVATION_OFFLOAD

    def is_needed(self, plan: Plan) -> bool:
        return plan.activations.offload

    def apply(self, context: ParallelContext) -> None:
        """Around the whole forward; the hooks of recomputed blocks are inside, so of these their
        inputs go."""
        copy_stream = HostCopyStream(context.mesh.device)
        context.root.forward = functools.partial(  # type: ignore[method-assign]
            _wrap_forward_with_activation_offload, copy_stream, context.root.forward
        )


def _wrap_forward_with_activation_offload(
    copy_stream: HostCopyStream, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    # Without gradients autograd saves nothing.
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    offload_pass = SavedTensorOffloader(copy_stream)
    with saved_tensors_hooks(offload_pass.offload_saved_tensor, offload_pass.restore_saved_tensor):
        return forward(*args, **kwargs)


class HostCopyStream:
    """The stream for copies: on CUDA one beside the computation's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def use_copy_stream(self) -> AbstractContextManager[Any]:
        if self.stream is None:
            return nullcontext()
        return torch.cuda.stream(self.stream)

    def make_copies_wait_for_computation(self) -> None:
        """Let later copies see what was computed so far."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def make_computation_wait_for_copy(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def record_event_after_copies(self) -> torch.cuda.Event | None:
        if self.stream is None:
            return None
        return self.stream.record_event()


@dataclass(eq=False)
class OffloadedTensorStorage:
    """A storage in host memory.

    `num_left`: saved tensors of it that the backward has not asked for.
    """

    host: torch.Tensor
    # Storages are numbered in the order in which the forward saved them.
    number: int
    num_left: int = 0
    back: torch.Tensor | None = None
    arrived: torch.cuda.Event | None = None


@dataclass(frozen=True)
class OffloadedTensorView:
    """A saved tensor: how it lies in its storage."""

    offloaded: OffloadedTensorStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class SavedTensorOffloader:
    """One forward and its backward."""

    def __init__(self, copy_stream: HostCopyStream) -> None:
        self.num_bytes = 0
        """Bytes in host memory, over forward and backward."""
        self._copy_stream = copy_stream
        # Weak references: the graph alone decides how long a copy lives.
        self._in_order: list[weakref.ref[OffloadedTensorStorage]] = []
        self._known: dict[
            int, tuple[weakref.ref[torch.UntypedStorage], int, weakref.ref[OffloadedTensorStorage]]
        ] = {}

    def offload_saved_tensor(self, tensor: torch.Tensor) -> torch.Tensor | OffloadedTensorView:
        if not self._is_offloadable(tensor):
            return tensor
        storage = tensor.untyped_storage()
        offloaded = self._find_host_copy(storage, tensor._version) or self._copy_storage_to_host(
            storage, tensor._version
        )
        offloaded.num_left += 1
        return OffloadedTensorView(
            offloaded, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()
        )

    def restore_saved_tensor(self, packed: torch.Tensor | OffloadedTensorView) -> torch.Tensor:
        if not isinstance(packed, OffloadedTensorView):
            return packed
        offloaded = packed.offloaded
        self._fetch_storage_to_device(offloaded)
        self._copy_stream.make_computation_wait_for_copy(offloaded.arrived)
        back = offloaded.back
        assert back is not None
        self._prefetch_storages_offloaded_before(offloaded)
        offloaded.num_left -= 1
        # From here on the tensors made of it keep the memory alive. Below 0: a graph that is run
        # again.
        if offloaded.num_left <= 0:
            offloaded.back = None
        view = torch.empty(0, dtype=packed.dtype, device=back.device)
        return view.set_(back.untyped_storage(), packed.offset, packed.size, packed.stride)

    def _is_offloadable(self, tensor: torch.Tensor) -> bool:
        return (
            tensor.device.type == self._copy_stream.device.type
            # Of a tensor that is subclassed, not strided, or lazily conjugated or negated, bytes do
            # not say all.
            and type(tensor) is torch.Tensor
            and tensor.layout is torch.strided
            and not tensor.is_conj()
            and not tensor.is_neg()
            and tensor.untyped_storage().nbytes()
            >= MIN_OFFLOAD_BYTES_BY_DEVICE_TYPE.get(tensor.device.type, 1 << 16)
            and not is_parameter_or_derived(tensor)
        )

    def _find_host_copy(
        self, storage: torch.UntypedStorage, version: int
    ) -> OffloadedTensorStorage | None:
        owner, then, offloaded = self._known.get(storage.data_ptr(), (None, 0, None))
        # The address of a storage that is gone may come again, and one that was written to since
        # differs from its copy.
        if owner is None or offloaded is None or owner() is None or then != version:
            return None
        return offloaded()

    def _copy_storage_to_host(
        self, storage: torch.UntypedStorage, version: int
    ) -> OffloadedTensorStorage:
        # The whole storage as bytes: all saved views of it share one copy.
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        host = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
        self._copy_stream.make_copies_wait_for_computation()
        with self._copy_stream.use_copy_stream():
            host.copy_(flat, non_blocking=True)
        if self._copy_stream.stream is not None:
            # The allocator must not give its memory away before the copy has read it.
            flat.record_stream(self._copy_stream.stream)
        offloaded = OffloadedTensorStorage(host, len(self._in_order))
        self.num_bytes += host.numel()
        self._in_order.append(weakref.ref(offloaded))
        self._known[storage.data_ptr()] = (weakref.ref(storage), version, weakref.ref(offloaded))
        return offloaded

    def _fetch_storage_to_device(self, offloaded: OffloadedTensorStorage) -> None:
        if offloaded.back is not None:
            return
        with self._copy_stream.use_copy_stream():
            offloaded.back = torch.empty(
                offloaded.host.shape, dtype=torch.uint8, device=self._copy_stream.device
            )
            offloaded.back.copy_(offloaded.host, non_blocking=True)
            offloaded.arrived = self._copy_stream.record_event_after_copies()
        # The copy stream made it and the computation reads it: the allocator must know of both.
        if self._copy_stream.stream is not None:
            offloaded.back.record_stream(torch.cuda.current_stream(self._copy_stream.device))

    def _prefetch_storages_offloaded_before(self, offloaded: OffloadedTensorStorage) -> None:
        """Fetch the activations that were offloaded just before: the backward asks for them
        next."""
        if self._copy_stream.stream is None:
            return
        for earlier in (
            ref()
            for ref in self._in_order[
                max(0, offloaded.number - NUM_PREFETCHED_STORAGES) : offloaded.number
            ]
        ):
            if earlier is not None and earlier.num_left > 0:
                self._fetch_storage_to_device(earlier)


parallelism = OffloadActivations()
