"""A stretch of blocks that is recomputed at once: the input of the first is kept, and none of those
between.

torch's checkpoint wraps one function; a model's loop calls its blocks one by one. So what the
blocks of a stretch save for the backward is left out while the loop calls them, and made again, all
of it, when the backward first asks: each block is called once more, on what the block before it
gave. A block whose input is not that (the loop changed it on the way) has its input kept: that
costs memory, and never the result.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_flatten, tree_unflatten

from phalanx.core.errors import LayoutError
from phalanx.parallel.dropout.rng import DropoutRng
from phalanx.parallel.recompute.contexts import Contexts, contexts_of


class RecomputeSegment:
    """Blocks in the order in which they are called."""

    def __init__(self, blocks: Sequence[nn.Module], draws: DropoutRng) -> None:
        self._blocks, self._draws = list(blocks), draws
        self._pass: _SegmentForward | None = None

    def apply(self) -> None:
        """Replace the blocks' forwards."""
        for index, block in enumerate(self._blocks):
            maker = contexts_of(block, "full", self._draws)
            block.forward = functools.partial(self._call, index, block.forward, maker)

    def _call(
        self, index: int, forward: Callable[..., Any], contexts: Contexts, *args: Any, **kwargs: Any
    ) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if index == 0 or self._pass is None or self._pass.is_redone:
            self._pass = _SegmentForward()
        outputs = self._pass.call(self._blocks[index], forward, contexts(), args, kwargs)
        if index == len(self._blocks) - 1:
            self._pass.last_outputs.clear()
            self._pass = None
        return outputs


@dataclass(eq=False)
class _Place:
    """Stands in the graph for a saved tensor until that is made again."""

    tensor: torch.Tensor | None = None


@dataclass(frozen=True)
class _FromBefore:
    """An input that is output `index` of the call before."""

    index: int
    requires_grad: bool


@dataclass(frozen=True)
class _Kept:
    """An input that is kept: number `index` of the call's kept tensors."""

    index: int
    requires_grad: bool


@dataclass
class _Call:
    """All that a block's second forward needs."""

    block: nn.Module
    forward: Callable[..., Any]
    again: AbstractContextManager[Any]
    inputs: list[Any]
    structure: Any
    kept: (
        Any  # the autograd node that saved tensors, so that hooks around (offloading) see them, too
    )
    surroundings: Callable[[], AbstractContextManager[None]]


class _SegmentForward:
    """One forward through a stretch.

    The graph's places refer to it, and it to nothing of the graph.
    """

    def __init__(self) -> None:
        self.is_redone = False
        self.last_outputs: list[tuple[torch.Tensor, int]] = []
        """Those of the last call, detached, with their versions: alive, so that no other tensor
        gets their address."""
        self._calls: list[_Call] = []
        self._places: list[weakref.ref[_Place]] = []
        self._described: list[tuple[torch.Size, torch.dtype]] = []

    def call(
        self,
        block: nn.Module,
        forward: Callable[..., Any],
        contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        first, again = contexts
        leaves, structure = tree_flatten((args, kwargs))
        kept: list[torch.Tensor] = []
        inputs = [
            self._described_input(leaf, kept) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ]
        device = next(
            (leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), torch.device("cpu")
        )
        node = _Keep.apply(torch.empty(0, requires_grad=True), *kept).grad_fn  # type: ignore[no-untyped-call]
        self._calls.append(
            _Call(block, forward, again, inputs, structure, node, _surroundings(device))
        )
        with first, saved_tensors_hooks(self._leave_out, self._give):
            outputs = forward(*args, **kwargs)
        made = [leaf for leaf in tree_flatten(outputs)[0] if isinstance(leaf, torch.Tensor)]
        self.last_outputs = [(tensor.detach(), tensor._version) for tensor in made]
        return outputs

    def _described_input(
        self, tensor: torch.Tensor, kept: list[torch.Tensor]
    ) -> _FromBefore | _Kept:
        for index, (before, version) in enumerate(self.last_outputs):
            if _is_same(tensor, before) and tensor._version == version:
                return _FromBefore(index, tensor.requires_grad)
        kept.append(tensor.detach())
        return _Kept(len(kept) - 1, tensor.requires_grad)

    def _leave_out(self, tensor: torch.Tensor) -> _Place:
        place = _Place()
        self._places.append(weakref.ref(place))
        self._described.append((tensor.shape, tensor.dtype))
        return place

    def _give(self, place: _Place) -> torch.Tensor:
        if place.tensor is None:
            self._redo()
        assert place.tensor is not None, "a place is filled or the recomputation was refused"
        return place.tensor

    def _redo(self) -> None:
        """Call every block again, filling the places that are still waited for."""
        self.is_redone = True
        found = 0

        def fill(tensor: torch.Tensor) -> None:
            nonlocal found
            if found == len(self._places) or self._described[found] != (tensor.shape, tensor.dtype):
                raise _does_not_repeat(self._calls)
            place = self._places[found]()
            if place is not None:
                place.tensor = tensor.detach()
            found += 1
            if found == len(self._places):
                raise _AllFilled  # what follows, the last product say, nobody needs

        outputs: list[torch.Tensor] = []
        try:
            for call in self._calls:
                outputs = _call_again(call, outputs, fill)
        except _AllFilled:
            return
        if found < len(self._places):
            raise _does_not_repeat(self._calls)


class _AllFilled(Exception):
    """Ends a recomputation early."""


def _call_again(
    call: _Call, before: list[torch.Tensor], fill: Callable[[torch.Tensor], None]
) -> list[torch.Tensor]:
    """The outputs, detached.

    A sharded block is gathered, and stays so: its own backward follows, and frees it.
    """
    for module in call.block.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    kept = call.kept.saved_tensors
    leaves = []
    for given in call.inputs:
        if isinstance(given, _FromBefore | _Kept):
            tensor = (
                before[given.index]
                if isinstance(given, _FromBefore)
                else kept[given.index].detach()
            )
            given = tensor.requires_grad_(given.requires_grad)
        leaves.append(given)
    args, kwargs = tree_unflatten(leaves, call.structure)
    with torch.enable_grad(), call.surroundings(), call.again, saved_tensors_hooks(fill, _unread):
        outputs = call.forward(*args, **kwargs)
    return [leaf.detach() for leaf in tree_flatten(outputs)[0] if isinstance(leaf, torch.Tensor)]


def _unread(nothing: object) -> torch.Tensor:
    raise AssertionError("the graph of a recomputation is not used")


def _does_not_repeat(calls: Sequence[_Call]) -> LayoutError:
    return LayoutError(
        f"the forward of {type(calls[0].block).__name__} does something else when it is recomputed",
        why="it saves other tensors for the backward than the first time",
        fix="set train.recompute=none, or make the forward a function of its inputs",
    )


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same memory, seen in the same way. FSDP hands a block another tensor object over it."""
    return (
        a.numel() > 0
        and a.data_ptr() == b.data_ptr()
        and (a.dtype, a.shape, a.stride(), a.device) == (b.dtype, b.shape, b.stride(), b.device)
    )


class _Keep(torch.autograd.Function):
    """Saves tensors as an operation does; it has no backward."""

    @staticmethod
    def forward(ctx: Any, dummy: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise AssertionError("nothing depends on it")


def _surroundings(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Random numbers and autocast as they are now, for later."""
    random = torch.get_rng_state()
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    types = {device.type, "cpu"}
    casts = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in types
    ]
    caches = torch.is_autocast_cache_enabled()

    @contextmanager
    def restored() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
            torch.set_rng_state(random)
            if on_device is not None:
                torch.cuda.set_rng_state(on_device, device)
            for kind, enabled, dtype in casts:
                stack.enter_context(torch.autocast(kind, dtype, enabled, caches))
            yield

    return restored
