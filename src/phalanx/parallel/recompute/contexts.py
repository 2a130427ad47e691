"""What the two forwards of a recomputed block run in: running statistics move once, dear
products are made once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from phalanx.core.errors import LayoutError
from phalanx.parallel.batchnorm.layer import RecordedBatchStatistics, SynchronisedBatchNorm
from phalanx.parallel.dropout.rng import DropoutRng
from phalanx.parallel.tensor.gathered_input import list_groups_of_region_inputs

ContextPairFactory = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]

SAVED_MATMUL_OP_NAMES = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "_scaled_mm",
    "_grouped_mm",
)
# Each device has its own: _flash_attention_for_cpu, _cudnn_attention, ...
SAVED_ATTENTION_OP_PREFIX = "_scaled_dot_product_"
# Our own operator for attention in long sequences.
SAVED_BLOCK_ATTENTION_OP_NAME = "attend_by_blocks"
SAVED_COLLECTIVE_OP_NAMESPACE = "_c10d_functional"


def make_recompute_context_factory(
    block: nn.Module, mode: str, dropout_rng: DropoutRng
) -> ContextPairFactory:
    """A maker of (context of the forward, context of the recomputation): dropout drops the same
    again, too."""
    inner = _make_module_context_factory(block, mode)
    if inner is None:
        return dropout_rng.replay_contexts

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        (recorded, replayed), (first, replay) = dropout_rng.replay_contexts(), inner()
        return _NestedReusableContext(recorded, first), _NestedReusableContext(replayed, replay)

    return contexts


def _make_module_context_factory(block: nn.Module, mode: str) -> ContextPairFactory | None:
    norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]
    of_norms = {id(buffer) for norm in norms for buffer in norm.buffers()}
    other_buffers = {
        name: buffer for name, buffer in block.named_buffers() if id(buffer) not in of_norms
    }
    name = type(block).__name__
    make_selective = functools.partial(
        make_selective_contexts, gathered_again=list_groups_of_region_inputs(block)
    )
    # Without buffers nothing can change twice, and a context costs time in every block.
    if not norms and not other_buffers:
        if mode == "selective":
            return make_selective
        return None

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        tape = RecordedBatchStatistics()
        first, replay = (
            _FirstForwardContext(name, norms, other_buffers, tape),
            _RecomputeForwardContext(norms, tape),
        )
        if mode != "selective":
            return first, replay
        caching, cached = make_selective()
        return _NestedReusableContext(first, caching), _NestedReusableContext(replay, cached)

    return contexts


def make_selective_contexts(
    gathered_again: Collection[str] = (),
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of a forward that keeps what is dear and of its recomputation. `gathered_again`:
    names of process groups whose all-gathers count as cheap."""
    contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
    contexts = create_selective_checkpoint_contexts(
        functools.partial(_choose_saved_or_recomputed, gathered_again)
    )
    return contexts


def _choose_saved_or_recomputed(
    gathered_again: Collection[str], context: object, op: Any, *args: object, **kwargs: object
) -> CheckpointPolicy:
    """Keep what is dear to make again: products, attention, and what came from other ranks.

    The inputs of regions of sequence parallelism come from them, too, but take as much memory as
    all that is kept beside them, and are gathered again without recomputation as well.
    """
    namespace, _, name = str(op.name()).split(".")[0].partition("::")
    is_product = namespace == "aten" and (
        name in SAVED_MATMUL_OP_NAMES or name.startswith(SAVED_ATTENTION_OP_PREFIX)
    )
    is_product |= namespace == "phalanx" and name == SAVED_BLOCK_ATTENTION_OP_NAME
    is_dear = is_product or (namespace == SAVED_COLLECTIVE_OP_NAMESPACE and name != "wait_tensor")
    if name.startswith("all_gather_into_tensor"):
        is_dear &= not any(isinstance(each, str) and each in gathered_again for each in args)
    if is_dear:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class _NestedReusableContext:
    """Two contexts as one, that can be entered again."""

    def __init__(
        self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]
    ) -> None:
        self._contexts, self._stack = (outer, inner), ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            # If the second cannot be entered, the first is left.
            for context in self._contexts:
                stack.enter_context(context)
            self._stack = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


class _FirstForwardContext:
    """The forward: synchronised BatchNorms record; a buffer that changes cannot be recomputed,
    and is refused."""

    def __init__(
        self,
        block: str,
        norms: Sequence[_BatchNorm],
        other_buffers: Mapping[str, torch.Tensor],
        tape: RecordedBatchStatistics,
    ) -> None:
        self._block, self._norms, self._other_buffers, self._tape = (
            block,
            norms,
            other_buffers,
            tape,
        )
        self._versions: dict[str, int] = {}

    def __enter__(self) -> None:
        self._versions = {name: buffer._version for name, buffer in self._other_buffers.items()}
        _set_statistics_of_batchnorms(self._norms, self._tape)

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        _set_statistics_of_batchnorms(self._norms, None)
        changed = []
        for name, buffer in self._other_buffers.items():
            if buffer._version != self._versions[name]:
                changed.append(name)
        # Without gradients nothing is recomputed.
        if kind is None and changed and torch.is_grad_enabled():
            raise LayoutError(
                f"the forward of {self._block} changes its buffer {changed[0]}, and recomputing"
                " would change it twice",
                fix="set train.recompute=none",
            )


class _RecomputeForwardContext:
    """The recomputation: the statistics of the forward, and running ones that stay."""

    def __init__(self, norms: Sequence[_BatchNorm], tape: RecordedBatchStatistics) -> None:
        self._norms, self._tape = norms, tape
        self._plain = [norm for norm in norms if not isinstance(norm, SynchronisedBatchNorm)]
        self._running_state: list[tuple[float | None, torch.Tensor | None]] = []

    def __enter__(self) -> None:
        self._tape.replay_at = 0
        _set_statistics_of_batchnorms(self._norms, self._tape)
        self._running_state = [(norm.momentum, norm.num_batches_tracked) for norm in self._plain]
        # The same kernel as in the forward, whose running statistics move by nothing.
        for norm in self._plain:
            norm.momentum, norm.num_batches_tracked = 0.0, None

    def __exit__(self, *_: object) -> None:
        _set_statistics_of_batchnorms(self._norms, None)
        for norm, (momentum, count) in zip(self._plain, self._running_state, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count


def _set_statistics_of_batchnorms(
    norms: Sequence[_BatchNorm], tape: RecordedBatchStatistics | None
) -> None:
    for norm in norms:
        if isinstance(norm, SynchronisedBatchNorm):
            norm._tape = tape
