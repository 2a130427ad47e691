"""Sums (and other reductions) of what several ranks have in shared memory.

The operands are taken in the order of the ranks, always, and those of 16 bits are added up in
float32: the result does not depend on who is early, and is the same bits on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from phalanx.core.block_sizes import get_block_sizes
from phalanx.mesh.shared_memory.arena import Bytes

# No element of any type lies in two pieces.
_PIECE_ALIGNMENT = 64

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
)
REDUCE_OPS = ("sum", "avg", "max", "min", "product")

# bfloat16 is not a type of NumPy's, and its float16 is slow.
_NUMPY_DTYPES: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.int16: np.int16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
}
_NUMPY_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sum": np.add,
    "avg": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "product": np.multiply,
}
_TORCH_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


def can_reduce(dtype: torch.dtype, reduce_op: str) -> bool:
    """True for a type and operation that `reduce_into` knows: no mean of integers."""
    return (
        dtype in DTYPES
        and reduce_op in REDUCE_OPS
        and (reduce_op != "avg" or dtype.is_floating_point)
    )


def reduce_into(
    targets: Sequence[Bytes], operands: Sequence[Bytes], dtype: torch.dtype, reduce_op: str
) -> None:
    """Reduce `operands`, one of each rank in their order, and write the result to all `targets`.

    All are equally long; a target may be the memory of an operand.
    """
    # Numbers that overflow are the caller's to find: on every other path they do so in silence.
    with np.errstate(all="ignore"):
        _reduce_by_pieces(targets, operands, dtype, reduce_op)


def _reduce_by_pieces(
    targets: Sequence[Bytes], operands: Sequence[Bytes], dtype: torch.dtype, reduce_op: str
) -> None:
    num_bytes, size = len(operands[0]), get_block_sizes().shared_piece_bytes
    size = max(1, size // _PIECE_ALIGNMENT) * _PIECE_ALIGNMENT
    for start in range(0, num_bytes, size):
        stop = min(num_bytes, start + size)
        pieces = [operand[start:stop] for operand in operands]
        places = [target[start:stop] for target in targets]
        if dtype in _NUMPY_DTYPES:
            result = _reduce_piece_by_numpy(places[0], pieces, dtype, reduce_op)
        else:
            result = _reduce_piece_by_torch(places[0], pieces, dtype, reduce_op)
        for place in places:
            if place is not result:
                np.copyto(place, result)


def _reduce_piece_by_numpy(
    place: Bytes, pieces: Sequence[Bytes], dtype: torch.dtype, reduce_op: str
) -> Bytes:
    """The reduced piece: in `place` where that overwrites no operand that is still needed."""
    numpy_dtype, function = _NUMPY_DTYPES[dtype], _NUMPY_FUNCTIONS[reduce_op]
    values = [piece.view(numpy_dtype) for piece in pieces]
    if len(values) == 1:
        return pieces[0]
    result = place
    if len(values) > 2:
        result = np.empty_like(place)
    total = result.view(numpy_dtype)
    function(values[0], values[1], out=total)
    for value in values[2:]:
        function(total, value, out=total)
    if reduce_op == "avg":
        np.multiply(total, total.dtype.type(1 / len(values)), out=total)
    return result


def _reduce_piece_by_torch(
    place: Bytes, pieces: Sequence[Bytes], dtype: torch.dtype, reduce_op: str
) -> Bytes:
    """The reduced piece, in `place`."""
    function = _TORCH_FUNCTIONS[reduce_op]
    values, result = (
        [_view_as_tensor(piece, dtype) for piece in pieces],
        _view_as_tensor(place, dtype),
    )
    if len(values) == 2 and reduce_op != "avg":
        # torch computes in float32 and rounds once.
        function(values[0], values[1], out=result)
        return place
    total = values[0].float()
    for value in values[1:]:
        # Converted alone: an operation of two types takes twice as long.
        function(total, value.float(), out=total)
    if reduce_op == "avg":
        total.mul_(1 / len(values))
    result.copy_(total)
    return place


def _view_as_tensor(piece: Bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(piece).view(dtype)
