"""A forward of the job's own module, and what it shows: an order, draws, digits, mixed rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.core.errors import LayoutError
from phalanx.mesh.logical import full_name
from phalanx.run.one_process.dropout_masks import DropoutMasks
from phalanx.run.one_process.row_mixing import (
    MIN_MIXING_DIFFERENCE,
    MIN_MIXING_DIFFERENCE_IN_FLOAT64,
    MixingPart,
    SplitLoss,
    count_batch_rows,
    find_part_that_mixes_rows,
    measure_change_by_other_rows,
    mixes_rows,
    refuse_if_collective,
)
from phalanx.verify.number_types import EPSILON_OF_DTYPE
from phalanx.verify.reference import Batch, list_parameters_in_forward_order

NARROW_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ForwardProbe:
    """`order`: parameters as a forward meets them.

    `narrows`: the type with the fewest digits that it rounds to on its way by itself: "float32",
    "bfloat16", "float16", or "" where it computes all in the type of its parameters.

    `mixes_rows`: the loss of a batch is not the sum of the losses of its parts, as with BatchNorm;
    `mixed_by`: the part of the loss that makes it so. `dropped`: modules that drop something.
    `moved`: buffers that a forward changes.
    """

    order: tuple[str, ...]
    narrows: str
    mixes_rows: bool
    dropped: tuple[str, ...] = ()
    mixed_by: MixingPart = ""
    moved: tuple[str, ...] = ()


def probe_forward(
    build: Callable[[], nn.Module],
    loss: SplitLoss,
    batch: Batch,
    seed: int,
    *,
    is_users_own: bool = False,
) -> ForwardProbe:
    """Look at one forward of modules of their own: it may move buffers, and the reference must not
    have seen it. `is_users_own`: module or objective are not phalanx's, so that no layout makes up
    for rows that see each other, and they are looked for more closely.

    Raises LayoutError for a forward that draws random numbers, as what it computes is not a
    function of the batch, and for a loss that calls collectives.
    """
    module, sums = build(), list[tuple[torch.Tensor, torch.Tensor]]()
    narrowing, masks, before = (
        _NarrowingDetector(),
        DropoutMasks(module, seed),
        _copy_compared_buffers(module),
    )
    rows = count_batch_rows(batch)
    # Dropout takes its masks from `masks` and draws nothing: any draw that is left is refused.
    with _forbid_random_draws(module), masks.dropping_by_masks(1, 0, rows), narrowing:
        order = list_parameters_in_forward_order(module, lambda: sums.append(loss(module, batch)))
    moved = tuple(
        name
        for name, buffer in _copy_compared_buffers(module).items()
        if not _is_equal_tensor(before.get(name), buffer)
    )
    mixed_by: MixingPart = ""
    if rows > 1:
        # A module of its own: the forward above may have moved the buffers of the first.
        other, (total, targets) = build(), sums[0]
        others_masks = DropoutMasks(other, seed)
        tolerance = MIN_MIXING_DIFFERENCE
        if is_users_own and total.dtype == torch.float64 and not narrowing.dtype_name:
            tolerance = MIN_MIXING_DIFFERENCE_IN_FLOAT64
        if mixes_rows(other, loss, batch, others_masks, total.item(), int(targets), tolerance):
            mixed_by = find_part_that_mixes_rows(other, loss, batch, others_masks, tolerance)
        elif is_users_own:
            # Other rows may move outputs by percents and leave their mean loss where it was.
            change = measure_change_by_other_rows(other, loss, batch, others_masks)
            if change is not None and change > tolerance:
                mixed_by = "model"
    return ForwardProbe(
        tuple(order), narrowing.dtype_name, bool(mixed_by), tuple(masks.dropped), mixed_by, moved
    )


def _copy_compared_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """But for statistics of BatchNorm, which have no part in what it makes of a training batch."""
    buffers: dict[str, torch.Tensor] = {}
    for prefix, part in module.named_modules():
        if not isinstance(part, _BatchNorm):
            part_buffers = part.named_buffers(prefix, recurse=False)
            buffers |= {full_name(name): buffer.detach().clone() for name, buffer in part_buffers}
    return buffers


def _is_equal_tensor(before: torch.Tensor | None, after: torch.Tensor) -> bool:
    return (
        before is not None
        and before.shape == after.shape
        # As numbers: torch.equal finds NaN unlike NaN.
        and torch.equal(before.nan_to_num(), after.nan_to_num())
    )


class _NarrowingDetector(TorchDispatchMode):
    """Sees whether a tensor becomes one of fewer digits, and of which type.

    Refuses collectives: other ranks are not in them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dtype_name = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse_if_collective(func)
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype in NARROW_DTYPES:
            self._add_result(out.dtype, args)
        return out

    def _add_result(self, dtype: torch.dtype, args: Sequence[object]) -> None:
        if any(_has_more_digits(arg, dtype) for arg in args):
            names = (self.dtype_name or "float64", str(dtype).removeprefix("torch."))
            self.dtype_name = max(names, key=lambda name: EPSILON_OF_DTYPE[name])


def _has_more_digits(value: object, dtype: torch.dtype) -> bool:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    # bfloat16 and float16 lie beside each other in torch's promotion, which has no order of them.
    return torch.finfo(value.dtype).eps < torch.finfo(dtype).eps


@dataclass
class _RandomDrawDetector:
    """The generator's state where each call of a module began; the first that changed it is the
    innermost."""

    name: str = ""
    states: list[torch.Tensor] = field(default_factory=list)

    def enter(self, *_: object) -> None:
        self.states.append(torch.get_rng_state())

    def leave(self, name: str) -> None:
        if not torch.equal(self.states.pop(), torch.get_rng_state()):
            self.name = self.name or name


@contextmanager
def _forbid_random_draws(module: nn.Module) -> Iterator[None]:
    draws, hooks = _RandomDrawDetector(), []
    for path, part in module.named_modules():
        name = f"{path} ({type(part).__name__})" if path else type(part).__name__
        hooks.append(part.register_forward_pre_hook(draws.enter))
        # `name` is bound here: a closure would see the last one of the loop.
        hooks.append(part.register_forward_hook(lambda *_, name=name: draws.leave(name)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    if draws.name:
        raise LayoutError(
            f"the forward of {draws.name} draws random numbers",
            why="each rank draws its own, so no layout computes what one process computes",
            fix="switch that off with model.args to have the rest judged",
        )


def describe_reference_failure(error: Exception, dtype: str) -> str:
    """Why there is no reference: nothing that a layout could be blamed for."""
    if isinstance(error, LayoutError):
        return str(error)
    # An ArithmeticError is the reference's own (`train_in_one_process`) and says all in its words.
    kind = "" if isinstance(error, ArithmeticError) else f"{type(error).__name__}: "
    return f"the module alone, in one process in {dtype}: {kind}{_first_line_of_error(error)}"


def _first_line_of_error(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["it says nothing"])[0]
