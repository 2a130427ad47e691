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

from phalanx.parallel.protocol import Order, ParallelContext
from phalanx.parallel.saved_tensors import is_weight
from phalanx.plan.plan import Plan

SMALLEST_BYTES = {
    "cuda": 1 << 16,
    "cpu": 1,
}  # below, a copy costs more than it frees; a CPU rehearses with everything
NUM_AHEAD = 2  # storages that are fetched before they are asked for


class OffloadActivations:
    order = Order.ACTIVATION_OFFLOAD

    def wanted(self, plan: Plan) -> bool:
        return plan.offload_activations

    def apply(self, context: ParallelContext) -> None:
        """Around the whole forward; the hooks of recomputed blocks are inside, so of these their
        inputs go."""
        lane = CopyStream(context.mesh.device)
        context.root.forward = functools.partial(_offloading, lane, context.root.forward)  # type: ignore[method-assign]


def _offloading(lane: CopyStream, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    trip = OffloadPass(lane)
    with saved_tensors_hooks(trip.pack, trip.unpack):
        return forward(*args, **kwargs)


class CopyStream:
    """Where copies run: on CUDA a stream beside the computation's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def after_computation(self) -> None:
        """What is copied from now on sees what was computed so far."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def before_computation(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def mark(self) -> torch.cuda.Event | None:
        return None if self.stream is None else self.stream.record_event()


@dataclass(eq=False)
class OffloadedStorage:
    """A storage in host memory.

    `num_left`: saved tensors of it that the backward has not asked for.
    """

    host: torch.Tensor
    place: int  # in the order of parking
    num_left: int = 0
    back: torch.Tensor | None = None
    arrived: torch.cuda.Event | None = None


@dataclass(frozen=True)
class OffloadHandle:
    """A saved tensor: how it lies in its storage."""

    parked: OffloadedStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class OffloadPass:
    """One forward and its backward."""

    def __init__(self, lane: CopyStream) -> None:
        self.num_bytes = 0
        """Bytes in host memory, over the whole trip."""
        self._lane = lane
        self._order: list[weakref.ref[OffloadedStorage]] = []
        self._known: dict[
            int, tuple[weakref.ref[torch.UntypedStorage], int, weakref.ref[OffloadedStorage]]
        ] = {}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | OffloadHandle:
        if not self._goes(tensor):
            return tensor
        storage = tensor.untyped_storage()
        parked = self._already(storage, tensor._version) or self._park(storage, tensor._version)
        parked.num_left += 1
        return OffloadHandle(
            parked, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()
        )

    def unpack(self, packed: torch.Tensor | OffloadHandle) -> torch.Tensor:
        if not isinstance(packed, OffloadHandle):
            return packed
        parked = packed.parked
        self._fetch(parked)
        self._lane.before_computation(parked.arrived)
        back = parked.back
        assert back is not None
        self._fetch_before(parked)
        parked.num_left -= 1
        if parked.num_left <= 0:
            parked.back = None
        found = torch.empty(0, dtype=packed.dtype, device=back.device)
        return found.set_(back.untyped_storage(), packed.offset, packed.size, packed.stride)

    def _goes(self, tensor: torch.Tensor) -> bool:
        return (
            tensor.device.type == self._lane.device.type
            and type(tensor) is torch.Tensor
            and tensor.layout is torch.strided
            and not tensor.is_conj()
            and not tensor.is_neg()
            and tensor.untyped_storage().nbytes() >= SMALLEST_BYTES.get(tensor.device.type, 1 << 16)
            and not is_weight(tensor)
        )

    def _already(self, storage: torch.UntypedStorage, version: int) -> OffloadedStorage | None:
        owner, then, parked = self._known.get(storage.data_ptr(), (None, 0, None))
        if owner is None or parked is None or owner() is None or then != version:
            return None
        return parked()

    def _park(self, storage: torch.UntypedStorage, version: int) -> OffloadedStorage:
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        host = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
        self._lane.after_computation()
        with self._lane.run():
            host.copy_(flat, non_blocking=True)
        if self._lane.stream is not None:
            flat.record_stream(
                self._lane.stream
            )  # its memory is not given away before it has been read
        parked = OffloadedStorage(host, len(self._order))
        self.num_bytes += host.numel()
        self._order.append(weakref.ref(parked))
        self._known[storage.data_ptr()] = (weakref.ref(storage), version, weakref.ref(parked))
        return parked

    def _fetch(self, parked: OffloadedStorage) -> None:
        if parked.back is not None:
            return
        with self._lane.run():
            parked.back = torch.empty(
                parked.host.shape, dtype=torch.uint8, device=self._lane.device
            )
            parked.back.copy_(parked.host, non_blocking=True)
            parked.arrived = self._lane.mark()
        if self._lane.stream is not None:  # made on the lane, read by the computation
            parked.back.record_stream(torch.cuda.current_stream(self._lane.device))

    def _fetch_before(self, parked: OffloadedStorage) -> None:
        """Those that were parked just before: the backward asks for them next."""
        if self._lane.stream is None:
            return
        for other in (
            ref() for ref in self._order[max(0, parked.place - NUM_AHEAD) : parked.place]
        ):
            if other is not None and other.num_left > 0:
                self._fetch(other)


parallelism = OffloadActivations()
