"""Whole tensors by name as bits, one at a time, wherever they lie: what exports and imports read.

Torch-free.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from phalanx.checkpoint.reading.full_tensors import Bits, bits_type
from phalanx.checkpoint.shard_file import DTYPES, parse_header
from phalanx.core.errors import CheckpointError
from phalanx.core.files import open_regular, read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100 << 20
MAX_INDEX_BYTES = 64 << 20
_TORCH_NAMES = {theirs: ours for ours, (theirs, _) in DTYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """A tensor without its values. `dtype` is torch's name."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][1]


class TensorReader(Protocol):
    """Tensors by name. `load` gives one's bits, as unsigned integers of its element's size."""

    @property
    def where(self) -> str: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def load(self, name: str) -> Bits: ...


class StackedTensorReader(TensorReader, Protocol):
    """A bag that can read parts of its tensors.

    `load_element`: what lies at `number` of the first dimension.
    """

    def load_element(self, name: str, number: int) -> Bits: ...


class UnstackedReader:
    """A bag with some of its tensors, the `stacks`, taken apart: `up.weight[3]` is what lies at
    3 of `up.weight`."""

    def __init__(self, reader: StackedTensorReader, stacks: Iterable[str]) -> None:
        self.where, self._reader = reader.where, reader
        self.tensors: dict[str, TensorInfo] = dict(reader.tensors)
        self._places: dict[str, tuple[str, int]] = {}
        for stack in stacks:
            whole = self.tensors.pop(stack)
            places = {
                element_name(stack, number): (stack, number) for number in range(whole.shape[0])
            }
            self.tensors |= dict.fromkeys(places, TensorInfo(whole.shape[1:], whole.dtype))
            self._places |= places

    def load(self, name: str) -> Bits:
        place = self._places.get(name)
        return self._reader.load_element(*place) if place else self._reader.load(name)


def element_name(stack: str, number: int) -> str:
    """What an element of a stack of tensors is called, here and in files of names."""
    return f"{stack}[{number}]"


class SafetensorsReader:
    """Safetensors files.

    Nothing is verified (they have no checksums), everything is bounded by the files' sizes.
    """

    def __init__(self, where: str, files: Iterable[Path]) -> None:
        self.where = where
        self.tensors: dict[str, TensorInfo] = {}
        self._places: dict[str, tuple[Path, int]] = {}
        for path in files:
            self._open(path)

    def load(self, name: str) -> Bits:
        info = self.tensors[name]
        path, start = self._places[name]
        if not math.prod(info.shape):
            return np.empty(info.shape, bits_type(info.dtype))
        try:
            with open_regular(path) as file:
                return np.memmap(file, bits_type(info.dtype), "r", start, info.shape)
        except (OSError, ValueError) as error:
            raise _unreadable(path, str(error)) from None

    def load_element(self, name: str, number: int) -> Bits:
        element: Bits = self.load(name)[number]
        return element

    def _open(self, path: Path) -> None:
        try:
            with open_regular(path) as file:
                num_bytes = os.fstat(file.fileno()).st_size
                (length,) = struct.unpack("<Q", file.read(8))
                if length > min(MAX_HEADER_BYTES, num_bytes - 8):
                    raise ValueError("its header is longer than the file")
                entries = dict(parse_header(file.read(length), 8 + length, num_bytes))
        except OSError as error:
            raise _unreadable(path, error.strerror or str(error)) from None
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            RecursionError,
            struct.error,
        ) as error:
            raise CheckpointError(
                "not a safetensors file", where=str(path), why=str(error)
            ) from None
        for name, entry in entries.items():
            if name in self.tensors:
                raise CheckpointError(f"{name} is in more than one file", where=str(path))
            self.tensors[name] = TensorInfo(entry.shape, _TORCH_NAMES[entry.dtype])
            self._places[name] = (path, entry.start)


def open_safetensors(source: Path) -> SafetensorsReader:
    """A .safetensors file, or a directory of them, with an index or without.

    Raises CheckpointError.
    """
    if source.is_file():
        return SafetensorsReader(str(source), [source])
    if (source / INDEX).is_file():
        return SafetensorsReader(str(source), _indexed(source))
    files = sorted(source.glob("*.safetensors"))
    if (source / SINGLE) in files:
        files = [source / SINGLE]
    if not files:
        raise CheckpointError("no .safetensors file is in it", where=str(source))
    return SafetensorsReader(str(source), files)


def _indexed(source: Path) -> list[Path]:
    """The files that the index names. One that is missing is told with a tensor that is in it."""
    try:
        weight_map: dict[str, str] = dict(read_json(source / INDEX, MAX_INDEX_BYTES)["weight_map"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            "the index cannot be read", where=str(source / INDEX), why=str(error)
        ) from None
    holders = {file: name for name, file in weight_map.items()}
    for file, name in holders.items():
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,255}", str(file)) or str(file).startswith("."):
            raise CheckpointError(f"the index names the file {file!r}", where=str(source / INDEX))
        if not os.path.isfile(source / file):
            raise CheckpointError(f"{file} is missing", where=str(source), why=f"it holds {name}")
    return sorted(source / file for file in holders)


def _unreadable(path: Path, why: str) -> CheckpointError:
    return CheckpointError("a file of weights cannot be read", where=str(path), why=why)
