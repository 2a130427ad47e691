"""A stretch of blocks that is recomputed at once: the input of the first is kept, and none of those
between.

torch's checkpoint wraps one function; a model's loop calls its blocks one by one. So what the
blocks of a segment save for the backward is left out while the loop calls them, and made again, all
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
from phalanx.parallel.recompute.contexts import ContextPairFactory, make_recompute_context_factory


class RecomputeSegment:
    """Blocks in the order in which they are called."""

    def __init__(self, blocks: Sequence[nn.Module], dropout_rng: DropoutRng) -> None:
        self._blocks, self._dropout_rng = list(blocks), dropout_rng
        self._pass: _SegmentForward | None = None

    def apply(self) -> None:
        """Replace the blocks' forwards."""
        for index, block in enumerate(self._blocks):
            maker = make_recompute_context_factory(block, "full", self._dropout_rng)
            block.forward = functools.partial(
                self._call_block_in_segment, index, block.forward, maker
            )

    def _call_block_in_segment(
        self,
        index: int,
        forward: Callable[..., Any],
        contexts: ContextPairFactory,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # A loop that left a segment early (an error, an early exit) begins anew with the first
        # block.
        if index == 0 or self._pass is None or self._pass.is_recomputed:
            self._pass = _SegmentForward()
        outputs = self._pass.call_block(self._blocks[index], forward, contexts(), args, kwargs)
        if index == len(self._blocks) - 1:
            self._pass.last_outputs.clear()
            self._pass = None
        return outputs


@dataclass(eq=False)
class _SavedTensorSlot:
    """Stands in the graph for a saved tensor until that is made again."""

    tensor: torch.Tensor | None = None


@dataclass(frozen=True)
class _InputFromPreviousCall:
    """An input that is output `index` of the call before."""

    index: int
    requires_grad: bool


@dataclass(frozen=True)
class _InputKeptInMemory:
    """An input that is kept: number `index` of the call's kept tensors."""

    index: int
    requires_grad: bool


@dataclass
class _RecordedBlockCall:
    """All that a block's second forward needs."""

    block: nn.Module
    forward: Callable[..., Any]
    replay: AbstractContextManager[Any]
    inputs: list[Any]
    structure: Any
    # Its autograd node saved the inputs, so that hooks around it (offload) see them. Its output is
    # kept: without one torch 2.11 frees what a node has saved.
    saver: torch.Tensor
    ambient: Callable[[], AbstractContextManager[None]]


class _SegmentForward:
    """One forward through a stretch.

    The graph's places refer to it, and it to nothing of the graph.
    """

    def __init__(self) -> None:
        self.is_recomputed = False
        self.last_outputs: list[tuple[torch.Tensor, int]] = []
        """Those of the last call, detached, with their versions: alive, so that no other tensor
        gets their address."""
        self._calls: list[_RecordedBlockCall] = []
        # Weak references: what the graph has let go is not filled again.
        self._slots: list[weakref.ref[_SavedTensorSlot]] = []
        self._described: list[tuple[torch.Size, torch.dtype]] = []

    def call_block(
        self,
        block: nn.Module,
        forward: Callable[..., Any],
        contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        first, replay = contexts
        leaves, structure = tree_flatten((args, kwargs))
        saved: list[torch.Tensor] = []
        inputs = [
            self._describe_input(leaf, saved) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ]
        device = next(
            (leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), torch.device("cpu")
        )
        # The dummy needs a gradient: without any such input autograd makes no node, and saves
        # nothing.
        saver = _SaveTensorsFunction.apply(torch.empty(0, requires_grad=True), *saved)  # type: ignore[no-untyped-call]
        self._calls.append(
            _RecordedBlockCall(
                block,
                forward,
                replay,
                inputs,
                structure,
                saver,
                _capture_rng_and_autocast_state(device),
            )
        )
        with (
            first,
            saved_tensors_hooks(self._replace_saved_tensor_by_slot, self._recompute_saved_tensor),
        ):
            outputs = forward(*args, **kwargs)
        tensors = [leaf for leaf in tree_flatten(outputs)[0] if isinstance(leaf, torch.Tensor)]
        self.last_outputs = [(tensor.detach(), tensor._version) for tensor in tensors]
        return outputs

    def _describe_input(
        self, tensor: torch.Tensor, saved: list[torch.Tensor]
    ) -> _InputFromPreviousCall | _InputKeptInMemory:
        for index, (before, version) in enumerate(self.last_outputs):
            if _is_same_tensor_memory(tensor, before) and tensor._version == version:
                return _InputFromPreviousCall(index, tensor.requires_grad)
        saved.append(tensor.detach())
        return _InputKeptInMemory(len(saved) - 1, tensor.requires_grad)

    def _replace_saved_tensor_by_slot(self, tensor: torch.Tensor) -> _SavedTensorSlot:
        slot = _SavedTensorSlot()
        self._slots.append(weakref.ref(slot))
        self._described.append((tensor.shape, tensor.dtype))
        return slot

    def _recompute_saved_tensor(self, slot: _SavedTensorSlot) -> torch.Tensor:
        if slot.tensor is None:
            self._recompute_all_slots()
        assert slot.tensor is not None, "a place is filled or the recomputation was refused"
        return slot.tensor

    def _recompute_all_slots(self) -> None:
        """Call every block again, filling the places that are still waited for."""
        self.is_recomputed = True
        num_filled = 0

        def fill(tensor: torch.Tensor) -> None:
            nonlocal num_filled
            if num_filled == len(self._slots) or self._described[num_filled] != (
                tensor.shape,
                tensor.dtype,
            ):
                raise _non_repeatable_forward_error(self._calls)
            slot = self._slots[num_filled]()
            if slot is not None:
                slot.tensor = tensor.detach()
            num_filled += 1
            if num_filled == len(self._slots):
                # All that was saved is filled: what follows, the last product say, is not needed.
                raise _AllSlotsFilledSignal

        outputs: list[torch.Tensor] = []
        try:
            for call in self._calls:
                outputs = _replay_block_call(call, outputs, fill)
        except _AllSlotsFilledSignal:
            return
        if num_filled < len(self._slots):
            raise _non_repeatable_forward_error(self._calls)


class _AllSlotsFilledSignal(Exception):
    """Ends a recomputation early."""


def _replay_block_call(
    call: _RecordedBlockCall, before: list[torch.Tensor], fill: Callable[[torch.Tensor], None]
) -> list[torch.Tensor]:
    """The outputs, detached.

    A sharded block is gathered, and stays so: its own backward follows, and frees it.
    """
    for module in call.block.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    saved = call.saver.grad_fn.saved_tensors  # type: ignore[union-attr]
    leaves = []
    for leaf in call.inputs:
        if isinstance(leaf, _InputFromPreviousCall | _InputKeptInMemory):
            if isinstance(leaf, _InputFromPreviousCall):
                tensor = before[leaf.index]
            else:
                tensor = saved[leaf.index].detach()
            # What operations save depends on which inputs need a gradient.
            leaf = tensor.requires_grad_(leaf.requires_grad)
        leaves.append(leaf)
    args, kwargs = tree_unflatten(leaves, call.structure)
    with (
        torch.enable_grad(),
        call.ambient(),
        call.replay,
        saved_tensors_hooks(fill, _refuse_use_of_recomputed_graph),
    ):
        outputs = call.forward(*args, **kwargs)
    return [leaf.detach() for leaf in tree_flatten(outputs)[0] if isinstance(leaf, torch.Tensor)]


def _refuse_use_of_recomputed_graph(nothing: object) -> torch.Tensor:
    raise AssertionError("the graph of a recomputation is not used")


def _non_repeatable_forward_error(calls: Sequence[_RecordedBlockCall]) -> LayoutError:
    return LayoutError(
        f"the forward of {type(calls[0].block).__name__} does something else when it is recomputed",
        why="it saves other tensors for the backward than the first time",
        fix="set train.recompute=none, or make the forward a function of its inputs",
    )


def _is_same_tensor_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same memory, seen in the same way. FSDP hands a block another tensor object over it."""
    return (
        # Empty tensors have no memory, and all the same address.
        a.numel() > 0
        and a.data_ptr() == b.data_ptr()
        and (a.dtype, a.shape, a.stride(), a.device) == (b.dtype, b.shape, b.stride(), b.device)
    )


class _SaveTensorsFunction(torch.autograd.Function):
    """Saves tensors as an operation does; it has no backward."""

    @staticmethod
    def forward(ctx: Any, dummy: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise AssertionError("nothing depends on it")


def _capture_rng_and_autocast_state(
    device: torch.device,
) -> Callable[[], AbstractContextManager[None]]:
    """Random numbers and autocast as they are now, for later."""
    # The second forward must draw what the first one drew, in the same types.
    random = torch.get_rng_state()
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    types = {device.type, "cpu"}
    casts = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in types
    ]
    caches = torch.is_autocast_cache_enabled()

    @contextmanager
    def restore() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
            torch.set_rng_state(random)
            if on_device is not None:
                torch.cuda.set_rng_state(on_device, device)
            for kind, enabled, dtype in casts:
                stack.enter_context(torch.autocast(kind, dtype, enabled, caches))
            yield

    return restore
