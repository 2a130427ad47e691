"""Code that casts to float32 on its way computes in float64 instead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

NARROW_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Float32AsFloat64(TorchFunctionMode):
    """Reads each float32 that a torch function is given as a type as float64.

    `is_narrowed`: a result had fewer digits all the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_narrowed = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        widened = {key: _widen_float32_dtype(value) for key, value in (kwargs or {}).items()}
        result = func(*map(_widen_float32_dtype, args), **widened)
        results = result if isinstance(result, tuple | list) else (result,)
        for value in results:
            if isinstance(value, torch.Tensor) and value.dtype in NARROW_DTYPES:
                self.is_narrowed = True
        return result


def _widen_float32_dtype(value: Any) -> Any:
    if value is torch.float32:
        return torch.float64
    return value


@contextmanager
def cast_to_float64() -> Iterator[Float32AsFloat64]:
    """Have torch's functions, in the body, make float64 of what is to be float32, also where no
    type is named."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Float32AsFloat64() as casts:
            yield casts
    finally:
        torch.set_default_dtype(default)
