"""FakeOperationCaller: answers what a program reads of fake tensors where the answer is known, and
refuses the rest in words."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedFakeTensorException,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten

from phalanx.core.errors import LayoutError
from phalanx.parallel.pipeline.placeholder import AbsentParameterPlaceholder
from phalanx.verify.dry_run.callers import CallerFinder, OperationCaller

_aten = torch.ops.aten
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_READING = (_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default)
_UNKNOWN = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)
# What our own code reads, by file: numbers with which a step goes on as usual steps do. One target
# and a finite norm make an update; ids within the vocabulary refuse nothing.
_USUAL_NUMBERS = {
    "phalanx/parallel/step_reducer.py": 1.0,
    "phalanx/parallel/call/check_indices.py": 0,
    "phalanx/parallel/tensor/modules.py": 0,
    # A block of attention that masks may hide, and do not.
    "phalanx/parallel/context/attention.py": 1,
}
WAY_OUT = (
    "decide it by shapes or with torch.where, or read the plan's own figures: phalanx plan without"
    " --dry-run"
)


class FakeOperationCaller:
    """Calls operations on fake tensors. Real tensors (a random state) are read as they are."""

    def __init__(self, finder: CallerFinder) -> None:
        self._finder = finder

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation. Raises LayoutError for one whose result nobody knows."""
        if any(isinstance(value, AbsentParameterPlaceholder) for value in args):
            args = tuple(map(_replace_placeholder_by_fake, args))
        if func is _WAIT:
            # It gives back what it was given, which torch's form of it for fake tensors does not.
            return args[0]
        if func in _READING:
            return self._read_value_of_fake_tensor(func, args, kwargs)
        try:
            if func is _aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
                return _fake_grouped_mm_in_any_dtype(func, args, kwargs)
            return func(*args, **kwargs)
        except _UNKNOWN as error:
            raise _build_unknown_number_error(func, self._finder.find()) from error

    def _read_value_of_fake_tensor(self, func: Any, args: Any, kwargs: Any) -> Any:
        leaves, _ = tree_flatten((args, kwargs))
        if not any(isinstance(leaf, FakeTensor) for leaf in leaves):
            with _disable_current_modes():
                return func(*args, **kwargs)
        caller = self._finder.find(depth=3)
        number = _USUAL_NUMBERS.get(caller.file)
        if number is None:
            raise _build_unknown_number_error(func, caller)
        if func is not _aten._local_scalar_dense.default:
            return bool(number)
        return _convert_number_to_dtype(args[0].dtype, number)


def _replace_placeholder_by_fake(value: Any) -> Any:
    """A fake tensor in place of a placeholder, which is real: FakeTensorMode knows no class of
    ours."""
    if not isinstance(value, AbsentParameterPlaceholder):
        return value
    return torch.empty((), dtype=value.dtype, device=value.device).expand(value.shape)


def _fake_grouped_mm_in_any_dtype(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """The grouped product of another type than bf16, the only one that torch's form of it for fake
    tensors takes."""
    first, second, *rest = args
    product = func(first.to(torch.bfloat16), second.to(torch.bfloat16), *rest, **kwargs)
    return product.to(first.dtype)


def _convert_number_to_dtype(dtype: torch.dtype, number: float) -> float | int | bool:
    if dtype is torch.bool:
        return bool(number)
    return float(number) if dtype.is_floating_point else int(number)


def _build_unknown_number_error(func: Any, caller: OperationCaller) -> LayoutError:
    name = func._schema.name.removeprefix("aten::").removeprefix("_")
    if name == "local_scalar_dense":
        name = "item"
    return LayoutError(
        f"a dry run has no numbers, and {caller.line} goes on by one ({name})",
        why="what the program does then depends on the data, or on weights",
        fix=WAY_OUT,
    )
