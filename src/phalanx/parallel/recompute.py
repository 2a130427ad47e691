"""Recompute: a block keeps its inputs and computes the rest again in the backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from phalanx.core.errors import LayoutError
from phalanx.parallel.batchnorm import Synchronised, Tape
from phalanx.parallel.protocol import Order, Workpiece
from phalanx.plan.planner import Plan


class Recompute:
    order = Order.RECOMPUTE

    def wanted(self, plan: Plan) -> bool:
        return plan.recompute == "full"

    def apply(self, piece: Workpiece) -> None:
        """Replaces each block's forward; no wrapper module, so that names stay the user's own."""
        for block in piece.blocks:
            options: dict[str, Any] = {}
            if piece.plan.compile:
                _refuse_batchnorm(block)
            elif any(True for _ in block.buffers()):
                options = {"context_fn": _contexts(block)}
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)


def _refuse_batchnorm(block: nn.Module) -> None:
    if any(isinstance(module, _BatchNorm) for module in block.modules()):
        raise LayoutError(
            f"{type(block).__name__} has BatchNorm, which cannot be compiled and recomputed together",
            fix="set train.compile=false or train.recompute=none",
        )


def _contexts(block: nn.Module) -> Callable[[], tuple[_First, _Again]]:
    """What the two forwards of a block with buffers run in: its running statistics must move once."""
    norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]
    own = {id(buffer) for norm in norms for buffer in norm.buffers()}
    others = {name: buffer for name, buffer in block.named_buffers() if id(buffer) not in own}

    def contexts() -> tuple[_First, _Again]:
        tape = Tape()
        return _First(type(block).__name__, norms, others, tape), _Again(norms, tape)

    return contexts


class _First:
    """The forward: synchronised BatchNorms record; a buffer that changes cannot be recomputed, and is refused."""

    def __init__(self, block: str, norms: Sequence[_BatchNorm], others: Mapping[str, torch.Tensor], tape: Tape) -> None:
        self._block, self._norms, self._others, self._tape = block, norms, others, tape
        self._versions: dict[str, int] = {}

    def __enter__(self) -> None:
        self._versions = {name: buffer._version for name, buffer in self._others.items()}
        _hand_out(self._norms, self._tape)

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        _hand_out(self._norms, None)
        changed = [name for name, buffer in self._others.items() if buffer._version != self._versions[name]]
        if kind is None and changed and torch.is_grad_enabled():
            raise LayoutError(
                f"the forward of {self._block} changes its buffer {changed[0]}, and recomputing would change it twice",
                fix="set train.recompute=none",
            )


class _Again:
    """The recomputation: the statistics of the forward, and running ones that stay."""

    def __init__(self, norms: Sequence[_BatchNorm], tape: Tape) -> None:
        self._norms, self._tape = norms, tape
        self._plain = [norm for norm in norms if not isinstance(norm, Synchronised)]
        self._kept: list[tuple[float | None, torch.Tensor | None]] = []

    def __enter__(self) -> None:
        self._tape.replay_at = 0
        _hand_out(self._norms, self._tape)
        self._kept = [(norm.momentum, norm.num_batches_tracked) for norm in self._plain]
        for norm in self._plain:  # the same kernel, whose running statistics move by nothing
            norm.momentum, norm.num_batches_tracked = 0.0, None

    def __exit__(self, *_: object) -> None:
        _hand_out(self._norms, None)
        for norm, (momentum, count) in zip(self._plain, self._kept, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count


def _hand_out(norms: Sequence[_BatchNorm], tape: Tape | None) -> None:
    for norm in norms:
        if isinstance(norm, Synchronised):
            norm._tape = tape


parallelism = Recompute()
