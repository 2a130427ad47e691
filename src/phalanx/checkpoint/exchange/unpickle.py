"""`python -m phalanx.checkpoint.exchange.unpickle SOURCE FOLDER`: the one process of phalanx that
unpickles.

Writes the tensors of SOURCE as safetensors into FOLDER and prints one line of JSON. Started by
`pickled` alone.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from phalanx.checkpoint.shard_file import (
    SAFETENSORS_DTYPE_OF_TORCH_DTYPE,
    Bytes,
    TensorToWrite,
    write_safetensors,
)
from phalanx.core.disk_errors import build_path_resource_error
from phalanx.core.errors import CheckpointError, ResourceError
from phalanx.core.files import open_regular_file
from phalanx.mesh.logical import full_name, get_dtype_name

T = TypeVar("T")
# At most so much of a DCP directory is in memory at a time.
MAX_BYTES_OF_TENSOR_GROUP = 2 << 30
PICKLED_WEIGHTS_GLOB = "pytorch_model*.bin"


def main(source: Path, folder: Path) -> dict[str, Any]:
    """Write the tensors of `source` to `folder`; returns the JSON answer: how many values were no
    tensors, which tensors no file can hold, which names are second names of a tensor, and whether
    more than weights had to be unpickled.

    Raises CheckpointError, and ResourceError where the disk of `folder` does not take them.
    """
    if source.is_dir() and (source / ".metadata").is_file():
        # torch opens these by their names: a pipe among them would be waited for.
        for path in sorted(source.iterdir()):
            if path.exists() and not path.is_file() and not path.is_dir():
                raise CheckpointError(f"{path.name} is not a regular file")
        return _read_dcp_directory(source, folder)
    files = [source]
    if source.is_dir():
        files = sorted(source.glob(PICKLED_WEIGHTS_GLOB))
    num_skipped, num_tensors, ran_code = 0, 0, False
    aliases: dict[str, str] = {}
    left_out: list[str] = []
    raw_names: dict[str, str] = {}
    for number, path in enumerate(files):
        content, is_more = _unpickle_file(path)
        ran_code |= is_more
        values = list(_iterate_nested_values(content, ""))
        by_name = dict(_strip_wrapper_names(_select_tensors_by_name(values), raw_names))
        tensors = {}
        for name, value in by_name.items():
            kind = _find_unsupported_tensor_kind(value)
            if kind:
                left_out.append(f"{name} ({kind})")
            else:
                tensors[name] = value
        num_tensors += len(tensors)
        num_skipped += len(values) - len(by_name)
        # For a directory its configuration says what is tied.
        if source.is_file():
            aliases = _keep_first_name_of_tied_tensors(tensors)
        if tensors:
            _write_tensors_as_safetensors(folder / f"part-{number:05d}.safetensors", tensors)
    return _build_unpickling_report(num_tensors, num_skipped, left_out, aliases, ran_code=ran_code)


def _build_unpickling_report(
    num_tensors: int,
    num_skipped: int,
    left_out: list[str],
    aliases: Mapping[str, str],
    *,
    ran_code: bool,
) -> dict[str, Any]:
    if not num_tensors:
        why = None
        if left_out:
            why = f"{', '.join(left_out[:3])} cannot be taken"
        raise CheckpointError("there is no tensor in it", why=why)
    return {
        "num_skipped": num_skipped,
        "left_out": left_out,
        "aliases": dict(aliases),
        "ran_code": ran_code,
    }


def _select_tensors_by_name(
    values: Iterable[tuple[str, Any]],
) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, value) for name, value in values if isinstance(value, torch.Tensor))


def _strip_wrapper_names(
    named: Iterable[tuple[str, T]], raw_names: dict[str, str]
) -> Iterator[tuple[str, T]]:
    """Yield values under names without those of wrappers; `raw_names` collects the names they had.

    Raises CheckpointError if two values get one name.
    """
    for raw_name, value in named:
        name = full_name(raw_name)
        if name in raw_names:
            both = f"{raw_names[name]!r} and {raw_name!r} are"
            if raw_names[name] == raw_name:
                both = f"{raw_name!r} is"
            raise CheckpointError(f"{both} in it, and only one can be {name!r}")
        raw_names[name] = raw_name
        yield name, value


def _keep_first_name_of_tied_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Leave each tensor under the first of its names; the other names, with the first one."""
    first_names: dict[Any, str] = {}
    aliases = {}
    for name, tensor in tensors.items():
        first = first_names.setdefault(_compute_tied_tensor_key(tensor), name)
        if first != name:
            aliases[name] = first
    for name in aliases:
        del tensors[name]
    return aliases


def _compute_tied_tensor_key(tensor: torch.Tensor) -> Any:
    """A key that is equal for tied tensors, which share their memory, and for no others."""
    if not tensor.numel():
        # Tensors without elements have no memory of their own to compare: none are tied.
        return object()
    # Views of one storage with other shapes or strides are not tied.
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _unpickle_file(path: Path) -> tuple[Any, bool]:
    """(content, True if reading it took more than torch's weights_only)."""
    # First without running code, which is enough for most files.
    try:
        with open_regular_file(path) as file:
            # On the CPU: the tensors may come from a GPU that is not here.
            return torch.load(file, map_location="cpu", weights_only=True), False
    except pickle.UnpicklingError:
        pass
    except Exception as error:
        raise _unreadable_pickle_error(path, error) from None
    try:
        with open_regular_file(path) as file:
            return torch.load(file, map_location="cpu", weights_only=False), True
    except Exception as error:
        raise _unreadable_pickle_error(path, error) from None


def _unreadable_pickle_error(path: Path, error: Exception) -> CheckpointError:
    """The error for a file that torch cannot read: pickle's own words about garbage
    (`KeyError: 101`) do not help."""
    try:
        with open_regular_file(path) as file:
            head = file.read(2)
    except OSError as refusal:
        return CheckpointError(f"{path.name} cannot be read", why=refusal.strerror)
    if not head:
        return CheckpointError(f"{path.name} is empty")
    # A pickle (of protocol 2 or later), or a zip archive with one.
    if not head.startswith((b"\x80", b"PK")):
        return CheckpointError(f"{path.name} is not a file of torch.save")
    why = f"{type(error).__name__}: {error}".splitlines()[0]
    return CheckpointError(f"{path.name} cannot be unpickled", why=why[:300])


def _iterate_nested_values(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield all values in nested dictionaries and lists, and the weights of whole modules, by
    dotted name."""
    if isinstance(value, nn.Module):
        # Parameters and buffers by name; attributes of a module are no weights.
        value = value.state_dict()
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes | torch.Size):
        items = list(enumerate(value))
    else:
        yield name, value
        return
    prefix = ""
    if name:
        prefix = f"{name}."
    for key, item in items:
        yield from _iterate_nested_values(item, f"{prefix}{key}")


def _find_unsupported_tensor_kind(value: torch.Tensor) -> str:
    """The kind of a tensor that no file of safetensors can hold; empty for any other."""
    if isinstance(value, DTensor):
        return "a DTensor"
    if value.is_quantized:
        return "quantized"
    if value.layout is not torch.strided:
        return str(value.layout).removeprefix("torch.")
    if value.is_meta:
        return "without values"
    if get_dtype_name(value.dtype) in SAFETENSORS_DTYPE_OF_TORCH_DTYPE:
        return ""
    return get_dtype_name(value.dtype)


def _read_dcp_directory(source: Path, folder: Path) -> dict[str, Any]:
    """Read a DCP directory group by group, so that no more than a few GiB are in memory."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = _read_dcp_metadata(source)
    raw_names = []
    for raw_name, facts in metadata.items():
        if isinstance(facts, TensorStorageMetadata):
            raw_names.append(raw_name)
    our_names = {}
    for name, raw_name in _strip_wrapper_names(zip(raw_names, raw_names, strict=True), {}):
        our_names[raw_name] = name
    tensors, left_out = {}, []
    for raw_name in raw_names:
        dtype = get_dtype_name(metadata[raw_name].properties.dtype)
        if dtype in SAFETENSORS_DTYPE_OF_TORCH_DTYPE:
            tensors[raw_name] = metadata[raw_name]
        else:
            left_out.append(f"{our_names[raw_name]} ({dtype})")
    for number, group_names in enumerate(_group_tensors_by_bytes(tensors)):
        group: dict[str, Any] = {}
        for raw_name in group_names:
            facts = tensors[raw_name]
            group[raw_name] = torch.empty(facts.size, dtype=facts.properties.dtype)
        # This process reads alone: there is no process group.
        dcp.load(group, checkpoint_id=source, no_dist=True)
        renamed = {our_names[raw_name]: tensor for raw_name, tensor in group.items()}
        _write_tensors_as_safetensors(folder / f"part-{number:05d}.safetensors", renamed)
    num_skipped = len(metadata) - len(raw_names)
    return _build_unpickling_report(len(tensors), num_skipped, left_out, {}, ran_code=False)


def _read_dcp_metadata(source: Path) -> Mapping[str, Any]:
    from torch.distributed import checkpoint as dcp

    try:
        metadata: Mapping[str, Any] = (
            dcp.FileSystemReader(source).read_metadata().state_dict_metadata
        )
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        raise CheckpointError(
            ".metadata is not that of torch.distributed.checkpoint", why=why
        ) from None
    return metadata


def _group_tensors_by_bytes(tensors: Mapping[str, Any]) -> Iterator[list[str]]:
    group: list[str] = []
    group_bytes = 0
    for name, facts in tensors.items():
        num_bytes = facts.size.numel() * facts.properties.dtype.itemsize
        if group and group_bytes + num_bytes > MAX_BYTES_OF_TENSOR_GROUP:
            yield group
            group, group_bytes = [], 0
        group.append(name)
        group_bytes += num_bytes
    if group:
        yield group


def _write_tensors_as_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    sources = []
    for name, tensor in tensors.items():
        dtype, shape = get_dtype_name(tensor.dtype), tuple(tensor.shape)
        sources.append(TensorToWrite(name, dtype, shape, partial(_count_tensor_bytes, tensor)))
    try:
        write_safetensors(path, sources)
    except OSError as error:
        raise build_path_resource_error(
            error, "writing the unpickled weights", path.parent, place="--out"
        ) from None


def _count_tensor_bytes(tensor: torch.Tensor) -> Bytes:
    # A copy in C order, whatever the tensor's strides and conjugation.
    contiguous = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    as_bytes: Bytes = contiguous.reshape(-1).view(torch.uint8).numpy()
    return as_bytes


if __name__ == "__main__":
    try:
        answer = main(Path(sys.argv[1]), Path(sys.argv[2]))
    except CheckpointError as refusal:
        answer = {"refused": refusal.what, "why": refusal.why}
    except ResourceError as refusal:
        answer = {"disk": {"what": refusal.what, "why": refusal.why, "fix": refusal.fix}}
    # On a line of its own: what was unpickled may have printed a line without an end.
    print(f"\n{json.dumps(answer)}")
