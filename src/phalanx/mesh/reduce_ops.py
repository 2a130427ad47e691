"""The reduce operation of a collective that is called from Python: torch's dispatcher passes it on
as an object that cannot be read."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

_METHODS = (
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    # Names of torch 2.13 for the last two.
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
)
# Their second argument is its name.
_FUNCTIONAL_OPERATORS = (
    "all_reduce",
    "all_reduce_",
    "all_reduce_coalesced",
    "all_reduce_coalesced_",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
)


class ReduceOps(threading.local):
    """`current`: the name of the reduce operation of the call that this thread is in; empty where
    it has none or is not known."""

    current = ""

    @contextlib.contextmanager
    def using(self, name: str) -> Iterator[None]:
        before, self.current = self.current, name
        try:
            yield
        finally:
            self.current = before


_ops = ReduceOps()
_followers: list[ReduceOps] = []
_following_lock = threading.Lock()
_installation = contextlib.ExitStack()


@contextlib.contextmanager
def following_reduce_ops() -> Iterator[ReduceOps]:
    """Yield what is known of each thread's call: of functions of torch.distributed and functional
    collectives, and not of DDP's reducer, which sums."""
    # Calls are followed once, whoever asks: kernels of two would replace each other.
    with _following_lock:
        _followers.append(_ops)
        if len(_followers) == 1:
            _installation.enter_context(_installed(_ops))
    try:
        yield _ops
    finally:
        with _following_lock:
            _followers.pop()
            if not _followers:
                _installation.close()


@contextlib.contextmanager
def _installed(ops: ReduceOps) -> Iterator[None]:
    library = torch.library.Library("_c10d_functional", "IMPL")
    for name in _FUNCTIONAL_OPERATORS:
        # Another version of torch may have fewer.
        packet = getattr(torch.ops._c10d_functional, name, None)
        if packet is not None:
            kernel = _follow_operator(ops, packet.default)
            library.impl(name, kernel, "BackendSelect", with_keyset=True)
    # As they stand in the class: `getattr` would take off what binds them to an instance, and put
    # back like that they could not be called any more.
    methods = {name: inspect.getattr_static(dist.ProcessGroup, name, None) for name in _METHODS}
    originals = {name: method for name, method in methods.items() if method is not None}
    for name, method in originals.items():
        setattr(dist.ProcessGroup, name, _follow_method(ops, method))
    try:
        yield
    finally:
        for name, method in originals.items():
            setattr(dist.ProcessGroup, name, method)
        library._destroy()


def _follow_method(ops: ReduceOps, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(group: dist.ProcessGroup, *args: Any, **options: Any) -> Any:
        name = ""
        for each in (*args, *options.values()):
            op = getattr(each, "reduceOp", None)
            if op is None and isinstance(each, dist.ReduceOp | dist.ReduceOp.RedOpType):
                op = each
            if op is not None:
                name = _name_op(op)
        with ops.using(name):
            return method(group, *args, **options)

    return call


def _follow_operator(ops: ReduceOps, call: Any) -> Callable[..., Any]:
    after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def kernel(keys: Any, tensors: Any, reduce_op: str, *args: Any) -> Any:
        with ops.using(reduce_op.lower()):
            return call.redispatch(keys & after, tensors, reduce_op, *args)

    return kernel


def _name_op(op: Any) -> str:
    """ "sum" for ReduceOp.SUM; of an operation with a factor its kind alone."""
    kind = getattr(op, "op", op)
    name = _names_of_kinds.get(kind)
    if name is None:
        name = _names_of_kinds[kind] = str(kind).rpartition(".")[2].lower()
    return name


_names_of_kinds: dict[Any, str] = {}
