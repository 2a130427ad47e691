"""Finds the rows of a table of integers that are equal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
# Larger numbers are sorted: counting them takes memory in proportion to the largest.
MAX_COUNTED_VALUE = 1 << 22


def group_equal_rows(columns: Sequence[Integers]) -> tuple[list[tuple[int, ...]], Integers]:
    """The different rows of a table of small numbers, and the index of each row among them."""
    # Counted, not sorted, which takes ten times as long: a column has few different values.
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, index = _number_values(column)
        code = code * len(values) + index
    codes, inverse = _number_values(code)
    row_of_code = np.zeros(len(codes), dtype=np.int64)
    row_of_code[inverse] = np.arange(len(code))
    rows = zip(*(column[row_of_code].tolist() for column in columns), strict=True)
    return list(rows), inverse


def _number_values(column: Integers) -> tuple[Integers, Integers]:
    """The different numbers in `column`, in order, and the index of each row's among them."""
    if column.size and column.max() > MAX_COUNTED_VALUE:
        values, index = np.unique(column, return_inverse=True)
        return values, index
    is_there = np.bincount(column) > 0
    index_of_value = np.cumsum(is_there) - 1
    return np.flatnonzero(is_there), index_of_value[column]
