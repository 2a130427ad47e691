"""Readers of full tensors by name as bits, one at a time: the sources of exports and imports.

Torch-free.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from phalanx.checkpoint.reading.full_tensors import Bits, choose_unsigned_bits_dtype
from phalanx.checkpoint.shard_file import (
    SAFETENSORS_DTYPE_OF_TORCH_DTYPE,
    SafetensorsHeaderEntry,
    parse_safetensors_header,
)
from phalanx.core.errors import CheckpointError
from phalanx.core.files import open_regular_file, read_json

SAFETENSORS_INDEX_FILE_NAME = "model.safetensors.index.json"
SAFETENSORS_FILE_NAME = "model.safetensors"
# safetensors' own limit.
MAX_HEADER_BYTES = 100 << 20
MAX_INDEX_BYTES = 64 << 20
# numpy's limits: 63 bits of bytes, of which an element has at most 8, and 32 dimensions (its 1.x).
_MAX_ELEMENTS = 1 << 59
_MAX_DIMENSIONS = 32
_PLAIN_FILE_NAME_PATTERN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")
_TORCH_DTYPE_OF_SAFETENSORS_DTYPE = {
    safetensors_name: torch_name
    for torch_name, (safetensors_name, _) in SAFETENSORS_DTYPE_OF_TORCH_DTYPE.items()
}


@dataclass(frozen=True)
class TensorShapeAndDtype:
    """A tensor without its values. `dtype` is torch's name."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * SAFETENSORS_DTYPE_OF_TORCH_DTYPE[self.dtype][1]


class TensorReader(Protocol):
    """Reads tensors by name. `load` returns the bits of one, as unsigned integers of its element's
    size."""

    @property
    def where(self) -> str: ...

    @property
    def tensors(self) -> Mapping[str, TensorShapeAndDtype]: ...

    def load(self, name: str) -> Bits: ...


class StackElementReader(TensorReader, Protocol):
    """Reads also parts of tensors: `load_element` the bits at index `number` of the first
    dimension."""

    def load_element(self, name: str, number: int) -> Bits: ...


class ReaderOfUnstackedElements:
    """Reads the elements of some tensors, the `stacks`, as tensors of their own: `up.weight[3]` is
    the element at index 3 of `up.weight`."""

    def __init__(self, reader: StackElementReader, stacks: Iterable[str]) -> None:
        self.where, self._reader = reader.where, reader
        self.tensors: dict[str, TensorShapeAndDtype] = dict(reader.tensors)
        self._elements: dict[str, tuple[str, int]] = {}
        for stack in stacks:
            info = self.tensors.pop(stack)
            for number in range(info.shape[0]):
                name = name_stack_element(stack, number)
                self.tensors[name] = TensorShapeAndDtype(info.shape[1:], info.dtype)
                self._elements[name] = (stack, number)

    def load(self, name: str) -> Bits:
        if name in self._elements:
            return self._reader.load_element(*self._elements[name])
        return self._reader.load(name)


def name_stack_element(stack: str, number: int) -> str:
    """The name of an element of a stack of tensors, here and in the TOML files of names."""
    return f"{stack}[{number}]"


class SafetensorsReader:
    """Reads safetensors files.

    Nothing is verified (they have no checksums), everything is bounded by the files' sizes.
    """

    def __init__(self, where: str, files: Iterable[Path]) -> None:
        self.where = where
        self.tensors: dict[str, TensorShapeAndDtype] = {}
        self._locations: dict[str, tuple[Path, int]] = {}
        for path in files:
            self._open_safetensors_file(path)

    def load(self, name: str) -> Bits:
        info = self.tensors[name]
        path, start = self._locations[name]
        # No memory can be mapped for no bytes.
        if not math.prod(info.shape):
            return np.empty(info.shape, choose_unsigned_bits_dtype(info.dtype))
        try:
            with open_regular_file(path) as file:
                # Mapped, and not read: an element of a stack costs its own bytes alone.
                return np.memmap(
                    file, choose_unsigned_bits_dtype(info.dtype), "r", start, info.shape
                )
        except (OSError, ValueError) as error:
            raise _unreadable_weights_error(path, str(error)) from None

    def load_element(self, name: str, number: int) -> Bits:
        element: Bits = self.load(name)[number]
        return element

    def _open_safetensors_file(self, path: Path) -> None:
        try:
            with open_regular_file(path) as file:
                num_bytes = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                if num_bytes < 8:
                    raise ValueError(f"it has {num_bytes} bytes")
                if length > min(MAX_HEADER_BYTES, num_bytes - 8):
                    raise ValueError("its header is longer than the file")
                entries = dict(parse_safetensors_header(file.read(length), 8 + length, num_bytes))
                for entry in entries.values():
                    _require_possible_entry(entry)
        except OSError as error:
            raise _unreadable_weights_error(path, error.strerror or str(error)) from None
        except ValueError as error:
            raise CheckpointError(
                "not a safetensors file", where=str(path), why=str(error)
            ) from None
        for name, entry in entries.items():
            if name in self.tensors:
                raise CheckpointError(f"{name} is in more than one file", where=str(path))
            self.tensors[name] = TensorShapeAndDtype(
                entry.shape, _TORCH_DTYPE_OF_SAFETENSORS_DTYPE[entry.dtype]
            )
            self._locations[name] = (path, entry.start)


def _require_possible_entry(entry: SafetensorsHeaderEntry) -> None:
    """Raise ValueError for a name that no manifest can hold, and for a shape that no array has: of
    a tensor without elements the other lengths may be anything, and fit the file."""
    try:
        entry.key.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the name {entry.key!a:.80} is no text") from None
    if math.prod(length for length in entry.shape if length) > _MAX_ELEMENTS:
        raise ValueError(f"no array has the shape {list(entry.shape)} of {entry.key}")
    if len(entry.shape) > _MAX_DIMENSIONS:
        raise ValueError(f"{entry.key} has {len(entry.shape)} dimensions")


def open_safetensors_reader(source: Path) -> SafetensorsReader:
    """Open a .safetensors file, or a directory of them, with an index or without.

    Raises CheckpointError.
    """
    if source.is_file():
        return SafetensorsReader(str(source), [source])
    if (source / SAFETENSORS_INDEX_FILE_NAME).is_file():
        return SafetensorsReader(str(source), _list_files_of_index(source))
    files = sorted(source.glob("*.safetensors"))
    # Other files beside it are other forms of the same weights (consolidated.safetensors).
    if (source / SAFETENSORS_FILE_NAME) in files:
        files = [source / SAFETENSORS_FILE_NAME]
    if not files:
        raise CheckpointError("no .safetensors file is in it", where=str(source))
    return SafetensorsReader(str(source), files)


def _list_files_of_index(source: Path) -> list[Path]:
    """The files that the index names.

    The CheckpointError for a missing file names a tensor in it.
    """
    path = source / SAFETENSORS_INDEX_FILE_NAME
    holders: dict[str, str] = {}
    for name, file in _read_weight_map(path).items():
        # A plain name: an index cannot point outside its directory.
        if not isinstance(file, str) or not _PLAIN_FILE_NAME_PATTERN.fullmatch(file):
            text = f"{json.dumps(file):.80}"
            raise CheckpointError(
                f"the index names the file {text} for {name}",
                where=str(path),
                why="it must be the name of a file beside it",
            )
        holders[file] = name
    for file, name in holders.items():
        if not os.path.isfile(source / file):
            raise CheckpointError(f"{file} is missing", where=str(source), why=f"it holds {name}")
    return sorted(source / file for file in holders)


def _read_weight_map(path: Path) -> dict[str, Any]:
    why = "it has no weight_map, an object of tensors and their files"
    try:
        index = read_json(path, MAX_INDEX_BYTES, unique_keys=True)
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if isinstance(weight_map, dict):
            return weight_map
    except OSError as error:
        why = error.strerror or str(error)
    except ValueError as error:
        why = str(error)
    raise CheckpointError("the index cannot be read", where=str(path), why=why)


def _unreadable_weights_error(path: Path, why: str) -> CheckpointError:
    return CheckpointError("a file of weights cannot be read", where=str(path), why=why)
