"""Differences of two checkpoints, tensor by tensor, whatever layouts wrote them. Torch-free.

Every byte that is compared was verified first. One tensor of each side is in memory at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.checkpoint.folder import CheckpointFolder
from phalanx.checkpoint.manifest import Manifest, read_manifest
from phalanx.checkpoint.reading.full_tensors import FullTensorReader
from phalanx.checkpoint.reading.verify import require_valid_structure_without_data
from phalanx.core.digest import ABSENT, find_differences

# numpy's type of the same bits, for types that numpy does not have
_NUMPY_DTYPE_OF_NARROW_DTYPE: Mapping[str, str] = {
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "uint8",
}
_DESCRIPTION_OF_DIFFERENCE_KIND = {
    "only_a": "only in the first",
    "only_b": "only in the second",
    "shape": "shapes",
    "dtype": "types",
}


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that differs. `what`: "only_a" | "only_b" | "shape" | "dtype" | "values".

    `max_abs` is the largest |a - b|; `relative` is the norm of a - b over that of a. Both are of
    "values" alone, and None for types that numpy cannot read. The fields' names are those of the
    `--json` schema.
    """

    name: str
    what: str
    detail: str = ""
    num_different: int = 0
    num_elements: int = 0
    max_abs: float | None = None
    relative: float | None = None


@dataclass(frozen=True)
class CheckpointDifference:
    """Facts and tensors that are not the same.

    `facts`: by dotted key the values of the first ("a") and of the second ("b"); "only_in" names
    the one that has such a fact, where the other has none.
    """

    facts: dict[str, dict[str, Any]]
    tensors: tuple[TensorDifference, ...]
    num_equal: int

    @property
    def is_identical(self) -> bool:
        return not self.facts and not self.tensors

    def to_json(self) -> dict[str, Any]:
        return {
            "same": self.is_identical,
            "facts": self.facts,
            "tensors": [asdict(tensor) for tensor in self.tensors],
            "num_equal_tensors": self.num_equal,
        }


def diff_checkpoints(
    a: CheckpointFolder | Path, b: CheckpointFolder | Path
) -> CheckpointDifference:
    """Compare two checkpoints bit by bit. Raises CheckpointError if one is damaged."""
    first, second = read_manifest(a), read_manifest(b)
    for folder, manifest in ((a, first), (b, second)):
        require_valid_structure_without_data(folder, manifest)
    differences: list[TensorDifference] = []
    num_equal = 0
    # A dictionary: each name once, in an order that a set would lose.
    names = list(
        dict.fromkeys([*_list_tensor_and_alias_names(first), *_list_tensor_and_alias_names(second)])
    )
    with _AliasTensorReader(a, first) as reader_a, _AliasTensorReader(b, second) as reader_b:
        for name in names:
            difference = _compare_tensor_bits(name, reader_a, reader_b)
            if difference is None:
                num_equal += 1
            else:
                differences.append(difference)
    return CheckpointDifference(_find_differing_facts(first, second), tuple(differences), num_equal)


def _list_tensor_and_alias_names(manifest: Manifest) -> list[str]:
    return [*manifest.tensors, *manifest.aliases]


def _find_differing_facts(a: Manifest, b: Manifest) -> dict[str, dict[str, Any]]:
    """Differing facts of both manifests by dotted key.

    The layout is not compared: the same state may be written by other ranks.
    """
    differences = {}
    for found in find_differences(a.facts, b.facts):
        values = {"a": found.a, "b": found.b}
        if found.b is ABSENT:
            values |= {"b": None, "only_in": "a"}
        elif found.a is ABSENT:
            values |= {"a": None, "only_in": "b"}
        differences[found.key] = values
    return differences


class _AliasTensorReader(FullTensorReader):
    """Reads full tensors of one checkpoint by all of their names, also tied ones."""

    def read_shape_and_dtype(self, name: str) -> tuple[tuple[int, ...], str] | None:
        stored = self.manifest.tensors.get(self._resolve_alias(name))
        if stored is None:
            return None
        return stored.shape, stored.dtype

    def load_tensor(self, name: str) -> NDArray[Any]:
        """The tensor's bits, in the type of numpy that holds them."""
        stored_name = self._resolve_alias(name)
        dtype = self.manifest.tensors[stored_name].dtype
        return self.load(stored_name).view(_NUMPY_DTYPE_OF_NARROW_DTYPE.get(dtype, dtype))

    def _resolve_alias(self, name: str) -> str:
        return self.manifest.aliases.get(name, name)


def _compare_tensor_bits(
    name: str, reader_a: _AliasTensorReader, reader_b: _AliasTensorReader
) -> TensorDifference | None:
    a, b = reader_a.read_shape_and_dtype(name), reader_b.read_shape_and_dtype(name)
    if a is None or b is None:
        shape, dtype = a or b or ((), "")
        kind = "only_a"
        if a is None:
            kind = "only_b"
        return TensorDifference(name, kind, f"{dtype} {list(shape)}")
    if a[0] != b[0]:
        return TensorDifference(name, "shape", f"{list(a[0])} and {list(b[0])}")
    if a[1] != b[1]:
        return TensorDifference(name, "dtype", f"{a[1]} and {b[1]}")
    x, y = reader_a.load_tensor(name), reader_b.load_tensor(name)
    # Bits, and not numbers: NaN is equal to itself here, and 0 is not -0.
    count = int((_view_as_flat_bits(x) != _view_as_flat_bits(y)).sum())
    if not count:
        return None
    max_abs, relative = _compute_max_and_relative_error(
        _convert_bits_to_float64(x, a[1]), _convert_bits_to_float64(y, a[1])
    )
    return TensorDifference(name, "values", "", count, x.size, max_abs, relative)


def _view_as_flat_bits(array: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")


def _convert_bits_to_float64(bits: NDArray[Any], dtype: str) -> NDArray[np.float64] | None:
    """The numbers that the bits mean, in fp64; None for types that numpy cannot read."""
    if dtype == "bfloat16":
        # The upper half of the bits of a float32.
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype in _NUMPY_DTYPE_OF_NARROW_DTYPE or bits.dtype.kind == "c":
        return None
    return bits.astype(np.float64)


def _compute_max_and_relative_error(
    a: NDArray[np.float64] | None, b: NDArray[np.float64] | None
) -> tuple[float | None, float | None]:
    if a is None or b is None:
        return None, None
    # Weights of a run that diverged are inf or NaN.
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.abs(a - b)
        norm = float(np.sqrt(np.square(a).sum()))
        distance = float(np.sqrt(np.square(gap).sum()))
    # Zeros against something else: infinitely far, and no division by 0.
    if not norm:
        return float(gap.max()), math.inf
    return float(gap.max()), distance / norm


def describe_checkpoint_difference(
    difference: CheckpointDifference, *, limit: int = 40
) -> Iterator[str]:
    """The difference in lines for people, largest relative error first."""
    for key, facts in difference.facts.items():
        a, b = json.dumps(facts["a"]), json.dumps(facts["b"])
        if facts.get("only_in") == "a":
            b = "absent"
        elif facts.get("only_in") == "b":
            a = "absent"
        yield f"fact    {key}: {a} and {b}"
    structure, values = [], []
    for tensor in difference.tensors:
        if tensor.what == "values":
            values.append(tensor)
        else:
            structure.append(tensor)
    values.sort(key=lambda tensor: -_choose_sort_key_of_error(tensor))
    for tensor in structure[:limit]:
        description = _DESCRIPTION_OF_DIFFERENCE_KIND[tensor.what]
        yield f"tensor  {tensor.name}: {description}, {tensor.detail}"
    for tensor in values[:limit]:
        line = f"values  {tensor.name}: {tensor.num_different:,} of {tensor.num_elements:,} differ"
        if tensor.max_abs is not None:
            line += f", at most {tensor.max_abs:.3g}, relative {tensor.relative:.3g}"
        yield line
    num_hidden = max(0, len(values) - limit) + max(0, len(structure) - limit)
    if num_hidden:
        yield f"        and {num_hidden} more tensors"
    word = "equal"
    if difference.is_identical:
        word = "same"
    yield f"{word}    {difference.num_equal} tensors are equal bit by bit"


def _choose_sort_key_of_error(tensor: TensorDifference) -> float:
    """The relative error to sort by: one that cannot be told comes first."""
    if tensor.relative is None:
        return math.inf
    return tensor.relative
