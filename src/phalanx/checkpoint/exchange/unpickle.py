"""`python -m phalanx.checkpoint.exchange.unpickle SOURCE FOLDER`: the one process of phalanx that unpickles.

Writes the tensors of SOURCE as safetensors into FOLDER and prints one line of JSON. Started by `pickled` alone.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from phalanx.checkpoint.shard_file import DTYPES, Bytes, Source, write_file
from phalanx.mesh.logical import dtype_name, full_name

GROUP_BYTES = 2 << 30  # of a DCP directory, so much is in memory at a time
BINARIES = "pytorch_model*.bin"


def main(source: Path, folder: Path) -> dict[str, Any]:
    """What is told of it: how many things were no tensors, which names mean a tensor that has another one already, and
    whether more than weights had to be unpickled.
    """
    if source.is_dir() and (source / ".metadata").is_file():
        return _read_dcp(source, folder)
    files = sorted(source.glob(BINARIES)) if source.is_dir() else [source]
    num_skipped, ran_code = 0, False
    aliases: dict[str, str] = {}
    for number, path in enumerate(files):
        content, is_more = _unpickle(path)
        ran_code |= is_more
        tensors = {full_name(name): value for name, value in _flat(content, "") if _is_plain(value)}
        num_skipped += sum(not _is_plain(value) for _, value in _flat(content, ""))
        if source.is_file():  # a directory's configuration says what is tied
            aliases = _take_tied(tensors)
        if tensors:
            _write(folder / f"part-{number:05d}.safetensors", tensors)
    return {"num_skipped": num_skipped, "aliases": aliases, "ran_code": ran_code}


def _take_tied(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Leave each tensor under the first of its names; the other names, with the first one."""
    first_names: dict[Any, str] = {}
    aliases = {}
    for name, tensor in tensors.items():
        first = first_names.setdefault(_identity(tensor), name)
        if first != name:
            aliases[name] = first
    for name in aliases:
        del tensors[name]
    return aliases


def _identity(tensor: torch.Tensor) -> Any:
    """The same for tied tensors, which share their memory, and for no others."""
    if not tensor.numel():
        return object()
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _unpickle(path: Path) -> tuple[Any, bool]:
    """(what is in it, True if that took more than torch's weights_only)."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True), False
    except pickle.UnpicklingError:
        return torch.load(path, map_location="cpu", weights_only=False), True


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Everything in nested dictionaries and lists, and the weights of whole modules, by dotted name."""
    if isinstance(value, nn.Module):
        value = value.state_dict()
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes | torch.Size):
        for number, item in enumerate(value):
            yield from _flat(item, f"{name}.{number}" if name else str(number))
    else:
        yield name, value


def _is_plain(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and not isinstance(value, DTensor)
        and value.layout is torch.strided
        and not value.is_quantized
        and not value.is_meta
        and dtype_name(value.dtype) in DTYPES
    )


def _read_dcp(source: Path, folder: Path) -> dict[str, Any]:
    """Group by group, so that no more than a few GiB are in memory."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    found = dcp.FileSystemReader(source).read_metadata().state_dict_metadata
    tensors = {name: facts for name, facts in found.items() if isinstance(facts, TensorStorageMetadata)}
    for number, names in enumerate(_groups(tensors)):
        group: dict[str, Any] = {
            name: torch.empty(tensors[name].size, dtype=tensors[name].properties.dtype) for name in names
        }
        dcp.load(group, checkpoint_id=source, no_dist=True)
        _write(folder / f"part-{number:05d}.safetensors", {full_name(name): group[name] for name in names})
    return {"num_skipped": len(found) - len(tensors), "aliases": {}, "ran_code": False}


def _groups(tensors: Mapping[str, Any]) -> Iterator[list[str]]:
    group: list[str] = []
    held = 0
    for name, facts in tensors.items():
        num_bytes = facts.size.numel() * facts.properties.dtype.itemsize
        if group and held + num_bytes > GROUP_BYTES:
            yield group
            group, held = [], 0
        group.append(name)
        held += num_bytes
    if group:
        yield group


def _write(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    write_file(
        path,
        [
            Source(name, dtype_name(tensor.dtype), tuple(tensor.shape), partial(_bytes, tensor))
            for name, tensor in tensors.items()
        ],
    )


def _bytes(tensor: torch.Tensor) -> Bytes:
    whole = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())  # whatever its strides and conjugation
    found: Bytes = whole.reshape(-1).view(torch.uint8).numpy()
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]))))
