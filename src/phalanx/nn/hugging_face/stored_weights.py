"""Fills shards of a Hugging Face module from the slices of its safetensors files that they need."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from phalanx.core.files import read_json
from phalanx.mesh.logical import LogicalShard, full_name
from phalanx.nn.hugging_face.refusals import build_separate_weights_error

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
# Of each tensor, at its begin and at its end: enough to tell other weights apart.
_NUM_COMPARED_ELEMENTS = 1024
# Of two tensors that must be equal, at a time.
_NUM_ELEMENTS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class StoredWeights:
    """The tensors of a directory, by the name of the parameter that each is. `digest`: of names,
    types, shapes, and of the first and the last elements of each."""

    file_of: Mapping[str, Path]
    digest: str

    def fill_parameter_shards(self, shards: Mapping[str, LogicalShard]) -> None:
        """Fill those of `shards` that are parameters; reads no more than their blocks."""
        with ExitStack() as stack, torch.no_grad():
            opened: dict[Path, Any] = {}
            for name, shard in shards.items():
                path = self.file_of.get(name)
                if path is None:
                    continue
                if path not in opened:
                    opened[path] = stack.enter_context(safe_open(str(path), framework="pt"))
                stored = opened[path].get_slice(name)
                for box in shard.boxes:
                    # A tensor of no dimensions has no slices.
                    block = (
                        stored[box.slices_in_full_tensor]
                        if box.size
                        else opened[path].get_tensor(name)
                    )
                    shard.tensor[box.slices_in_local_tensor].copy_(block)


def find_stored_weights(module: nn.Module, directory: Path) -> StoredWeights | None:
    """The weights in `directory` if each parameter of `module` is there, under its name and in its
    shape, and nothing else is; None where transformers must translate them.

    Raises LayoutError for one that is there twice, as tied parameters may be, and differs.
    """
    shapes: dict[str, list[int]] = {}
    kept_name_of: dict[str, str] = {}
    name_of_id: dict[int, str] = {}
    for raw_name, parameter in module.named_parameters(remove_duplicate=False):
        name = full_name(raw_name)
        kept_name = name_of_id.setdefault(id(parameter), name)
        if kept_name != name:
            kept_name_of[name] = kept_name
        else:
            shapes[name] = list(parameter.shape)
    hasher, file_of, file_of_copy = hashlib.sha256(), dict[str, Path](), dict[str, Path]()
    for path in _list_weight_files(directory):
        with safe_open(str(path), framework="pt") as file:
            names: list[str] = file.keys()
            for name in names:
                stored = file.get_slice(name)
                if shapes.get(kept_name_of.get(name, name)) != stored.get_shape():
                    return None
                if name in kept_name_of:
                    file_of_copy[name] = path
                    continue
                file_of[name] = path
                hasher.update(f"{name} {stored.get_dtype()} {stored.get_shape()}".encode())
                for values in _read_sample_rows(stored):
                    hasher.update(values.contiguous().view(torch.uint8).numpy().tobytes())
    if file_of.keys() != shapes.keys():
        return None
    for name, path in file_of_copy.items():
        kept_name = kept_name_of[name]
        if not _are_stored_tensors_equal(path, name, file_of[kept_name], kept_name):
            raise build_separate_weights_error(directory, name, kept_name)
    return StoredWeights(file_of, hasher.hexdigest())


def _are_stored_tensors_equal(path: Path, name: str, other_path: Path, other_name: str) -> bool:
    """True if two tensors of one shape have the same values; reads a few rows at
    a time."""
    with (
        safe_open(str(path), framework="pt") as file,
        safe_open(str(other_path), framework="pt") as other_file,
    ):
        stored, other = file.get_slice(name), other_file.get_slice(other_name)
        shape: list[int] = stored.get_shape()
        if not shape:
            return torch.equal(file.get_tensor(name), other_file.get_tensor(other_name))
        num_rows = max(1, _NUM_ELEMENTS_AT_ONCE // max(1, math.prod(shape[1:])))
        for start in range(0, shape[0], num_rows):
            rows = slice(start, min(start + num_rows, shape[0]))
            # The module's type, in which transformers compares them, too.
            if not torch.equal(stored[rows].float(), other[rows].float()):
                return False
    return True


def _list_weight_files(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if not index.is_file():
        return [directory / _SINGLE]
    weight_map = read_json(index)["weight_map"]
    return [directory / name for name in sorted(set(weight_map.values()))]


def _read_sample_rows(stored: Any) -> Iterator[torch.Tensor]:
    """The first and the last rows of a tensor of one dimension or more, as far as
    _NUM_COMPARED_ELEMENTS."""
    shape = stored.get_shape()
    if not shape or 0 in shape:
        return
    row: int = 1
    for length in shape[1:]:
        row *= length
    count = max(1, min(shape[0], _NUM_COMPARED_ELEMENTS // row))
    for rows in (stored[:count], stored[shape[0] - count :]):
        yield rows.flatten()[:_NUM_COMPARED_ELEMENTS]
