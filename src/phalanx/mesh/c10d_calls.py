"""Where calls of collectives, sends and receives can be seen, and taken, whoever makes them.

Functions of torch.distributed, DDP's reducer, FSDP, DTensor and functional collectives all end in
operators of c10d, which torch dispatches to the kernel of a backend. Just before that, at the key
BackendSelect, kernels of this module hand the call to handlers, outermost first: no group, backend
or function of torch is replaced.
"""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch


class Operator(NamedTuple):
    """An operator of c10d: its name for people, and which argument is what.

    The tensors are what a rank gives, where that is one list. `peer_at`: root, source or target.
    """

    name: str
    words: str
    tensors_at: int
    group_at: int
    peer_at: int = -1
    is_p2p: bool = False


OPERATORS = (
    Operator("allreduce_", "all_reduce", 0, 1),
    Operator("allreduce_coalesced_", "all_reduce", 0, 1),
    Operator("allgather_", "all_gather", 1, 2),
    Operator("_allgather_base_", "all_gather", 1, 2),
    Operator("allgather_coalesced_", "all_gather", 1, 2),
    Operator("allgather_into_tensor_coalesced_", "all_gather", 1, 2),
    Operator("reduce_scatter_", "reduce_scatter", 0, 2),
    Operator("_reduce_scatter_base_", "reduce_scatter", 1, 2),
    Operator("reduce_scatter_tensor_coalesced_", "reduce_scatter", 1, 2),
    Operator("alltoall_", "all_to_all", 1, 2),
    Operator("alltoall_base_", "all_to_all", 1, 2),
    Operator("broadcast_", "broadcast", 0, 1, peer_at=2),
    Operator("reduce_", "reduce", 0, 1, peer_at=3),
    Operator("gather_", "gather", 1, 2, peer_at=3),
    Operator("scatter_", "scatter", 0, 2, peer_at=3),
    Operator("barrier", "barrier", 0, 1),
    Operator("monitored_barrier_", "barrier", 0, 1),
    Operator("send", "send", 0, 1, peer_at=2, is_p2p=True),
    Operator("recv_", "recv", 0, 1, peer_at=2, is_p2p=True),
    Operator("recv_any_source_", "recv", 0, 1, is_p2p=True),
)


class CallHandler(Protocol):
    def handle(self, operator: Operator, args: Sequence[Any], proceed: Callable[[], Any]) -> Any:
        """Return what the operator returns: by `proceed`, which makes the call, or without it."""
        ...


class HandlerDepth(enum.IntEnum):
    """Who sees a call first: those that watch, then those that take it."""

    WATCHES = 0
    TAKES = 1


_handlers: list[tuple[HandlerDepth, CallHandler]] = []
_library: torch.library.Library | None = None


@contextlib.contextmanager
def handling_c10d_calls(handler: CallHandler, depth: HandlerDepth) -> Iterator[None]:
    """Have every call of this process's groups go through `handler` while the body runs."""
    global _library
    entry = depth, handler
    _handlers.append(entry)
    _handlers.sort(key=lambda each: each[0])
    if _library is None:
        _library = _install_kernels()
    try:
        yield
    finally:
        _handlers.remove(entry)
        if not _handlers:
            _library._destroy()
            _library = None


def pass_to_handlers(operator: Operator, args: Sequence[Any], proceed: Callable[[], Any]) -> Any:
    """Make a call, by `proceed`, that handlers see as one of c10d though it is none. Returns what
    it returns."""
    for _, handler in reversed(_handlers):
        proceed = functools.partial(handler.handle, operator, args, proceed)
    return proceed()


def keys_after_backend_select() -> Any:
    """The dispatch keys that come after these kernels."""
    return torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


def _install_kernels() -> torch.library.Library:
    library = torch.library.Library("c10d", "IMPL")
    for operator in OPERATORS:
        # Another version of torch may have fewer.
        packet = getattr(torch.ops.c10d, operator.name, None)
        if packet is not None:
            kernel = _make_kernel(operator, packet.default)
            library.impl(operator.name, kernel, "BackendSelect", with_keyset=True)
    return library


def _make_kernel(operator: Operator, call: Any) -> Callable[..., Any]:
    after = keys_after_backend_select()

    def kernel(keys: Any, *args: Any) -> Any:
        # No function that refers to itself: its cycle would hold the tensors until a collection.
        return pass_to_handlers(
            operator, args, functools.partial(call.redispatch, keys & after, *args)
        )

    return kernel
