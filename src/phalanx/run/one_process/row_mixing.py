"""Which rows of a batch a loss lets see each other, and whether it calls collectives, for which
nobody waits."""

from __future__ import annotations

import dataclasses
import math
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import phalanx
from phalanx.core.errors import LayoutError
from phalanx.run.one_process.dropout_masks import DropoutMasks
from phalanx.run.one_process.plain_loss import Batch

MixingPart = Literal["", "model", "objective"]

# Far above the rounding of a sum, far below what another row does to a loss.
MIN_MIXING_DIFFERENCE = 1e-4
# The same of float64, where other rows may move a loss by less.
MIN_MIXING_DIFFERENCE_IN_FLOAT64 = 1e-9
COLLECTIVE_OP_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")
_PHALANX_DIR = str(Path(phalanx.__file__).parent)
_TORCH_DIR = str(Path(torch.__file__).parent)


class SplitLoss(Protocol):
    """A loss in two halves: what a module makes of a batch, and the sum over that with the
    number of its targets."""

    def compute_outputs(self, module: nn.Module, batch: Batch) -> Any: ...

    def __call__(self, module: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]: ...


@torch.no_grad()
def mixes_rows(
    module: nn.Module,
    loss: SplitLoss,
    batch: Batch,
    masks: DropoutMasks,
    total: float,
    num_targets: int,
    tolerance: float = MIN_MIXING_DIFFERENCE,
) -> bool:
    """True if the mean loss of a batch, `total` over `num_targets`, is not that of its halves:
    off by more than `tolerance`, relative."""
    rows, apart, count = count_batch_rows(batch), 0.0, 0
    for start, stop in ((0, rows // 2), (rows // 2, rows)):
        # The masks of the same rows of the whole batch: dropout alone must make no difference.
        with masks.dropping_by_masks(1, start, stop - start), restoring_buffers(module):
            part, targets = loss(module, {key: tensor[start:stop] for key, tensor in batch.items()})
        apart, count = apart + part.item(), count + int(targets)
    if not num_targets:
        return False
    # Targets that only the whole has: of pairs of rows, say.
    if not count:
        return True
    mean = total / num_targets
    # Of a loss that is no number its parts say nothing.
    if not math.isfinite(mean):
        return False
    # `not <=`, and not `>`: a NaN is a difference, too.
    return not abs(apart / count - mean) <= tolerance * abs(mean)


@torch.no_grad()
def find_part_that_mixes_rows(
    module: nn.Module,
    loss: SplitLoss,
    batch: Batch,
    masks: DropoutMasks,
    tolerance: float = MIN_MIXING_DIFFERENCE,
) -> MixingPart:
    """The part of a loss that mixes rows: "model" if its outputs for some rows change with the
    others.

    Else "objective".
    """
    change = measure_change_by_other_rows(module, loss, batch, masks)
    # It returns no row, but the loss itself, say.
    if change is None or change > tolerance:
        return "model"
    return "objective"


@torch.no_grad()
def measure_change_by_other_rows(
    module: nn.Module, loss: SplitLoss, batch: Batch, masks: DropoutMasks
) -> float | None:
    """By how much, relative, a module's outputs for one half of a batch's rows change when the
    other half are others, the larger of both; None if it returns no rows."""
    rows = count_batch_rows(batch)
    half = rows // 2
    # Copies of a row: other rows, and surely some that the model can read. Each half in its turn,
    # for a module may look at the first row alone: then that is the one with which the second half
    # begins, as it does where `mixes_rows` takes it alone.
    other_last_rows = {
        key: torch.cat((t[:half], t[:1].expand(rows - half, *t.shape[1:])))
        for key, t in batch.items()
    }
    other_first_rows = {
        key: torch.cat((t[half : half + 1].expand(half, *t.shape[1:]), t[half:]))
        for key, t in batch.items()
    }
    outputs: list[list[torch.Tensor]] = []
    for each in (batch, other_last_rows, other_first_rows):
        with masks.dropping_by_masks(1, 0, rows), restoring_buffers(module):
            outputs.append(list(_list_floating_point_outputs(loss.compute_outputs(module, each))))
    usual, with_other_last, with_other_first = outputs
    changes = [
        *_measure_changes_of_rows(usual, with_other_last, rows, slice(0, half)),
        *_measure_changes_of_rows(usual, with_other_first, rows, slice(half, rows)),
    ]
    return max(changes) if changes else None


def _measure_changes_of_rows(
    usual: list[torch.Tensor], others: list[torch.Tensor], num_rows: int, compared: slice
) -> Iterator[float]:
    """The relative change of the rows `compared` of each output that has a number of rows for each
    of the batch's; only such can be cut by rows."""
    for a, b in zip(usual, others, strict=False):
        if not a.ndim or len(a) != len(b) or len(a) % num_rows:
            continue
        size = len(a) // num_rows
        rows = slice(size * compared.start, size * compared.stop)
        before = a[rows].double()
        difference = (before - b[rows].double()).norm()
        yield float(difference / before.norm()) if difference > 0 else 0.0


@contextmanager
def restoring_buffers(module: nn.Module) -> Iterator[None]:
    """Restore the buffers after a forward: the next one must not see what it did to them."""
    before = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def _list_floating_point_outputs(outputs: Any) -> Iterator[torch.Tensor]:
    """The tensors of numbers in what a module returns."""
    if isinstance(outputs, torch.Tensor):
        if outputs.is_floating_point() or outputs.is_complex():
            yield outputs
    elif isinstance(outputs, Mapping):
        for value in outputs.values():
            yield from _list_floating_point_outputs(value)
    elif isinstance(outputs, list | tuple):
        for value in outputs:
            yield from _list_floating_point_outputs(value)
    elif dataclasses.is_dataclass(outputs):
        for field in dataclasses.fields(outputs):
            yield from _list_floating_point_outputs(getattr(outputs, field.name))


def count_batch_rows(batch: Batch) -> int:
    return len(next(iter(batch.values())))


class CollectiveCalledError(LayoutError):
    """`call` says which collective, and where."""

    def __init__(self, call: str) -> None:
        super().__init__(
            f"a collective of torch.distributed is called in the loss: {call}",
            why="other ranks are at something else in a layout, and in one process there are none",
            fix=(
                "compute the loss of the rows that are given: sums over ranks and microbatches are"
                " phalanx's"
            ),
        )
        self.call = call


class RefuseCollectivesMode(TorchDispatchMode):
    """Raises CollectiveCalledError in place of any collective: alone in one, a rank waits, or
    takes others' answers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse_if_collective(func)
        return func(*args, **(kwargs or {}))


def refuse_if_collective(func: Any) -> None:
    """Raise CollectiveCalledError if an operation of torch is a collective."""
    if func.namespace in COLLECTIVE_OP_NAMESPACES:
        raise CollectiveCalledError(_describe_collective_call(func))


def _describe_collective_call(func: Any) -> str:
    """ "all_gather (loss.py:12)", by the function of torch.distributed that was called and the
    line that did."""
    name = str(func.overloadpacket.__name__).strip("_")
    # From the innermost frame on: torch's own, then the first line of the user's.
    for entry in reversed(traceback.extract_stack(sys._getframe(1))):
        if entry.filename.startswith(_TORCH_DIR):
            is_public = f"{_TORCH_DIR}/distributed" in entry.filename and not entry.name.startswith(
                "_"
            )
            name = entry.name if is_public and entry.name != "wrapper" else name
        elif not entry.filename.startswith((_PHALANX_DIR, "<")):
            return f"{name} ({Path(entry.filename).name}:{entry.lineno})"
    return name
