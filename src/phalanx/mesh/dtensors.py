"""Describes DTensors that a user's module brings, and which of them torch gathers wrongly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from torch.distributed.tensor import DTensor, Shard


def find_dtensors_by_name(module: nn.Module) -> list[tuple[str, DTensor]]:
    """The parameters and buffers of `module` that are DTensors, by name."""
    dtensors = []
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if isinstance(tensor, DTensor):
            dtensors.append((name, tensor))
    return dtensors


def describe_dtensor(tensor: DTensor) -> str:
    """The shape of the full tensor, and how each mesh dimension cuts it."""
    parts = []
    for mesh_dim, placement in enumerate(tensor.placements):
        name = _get_mesh_dim_name(tensor, mesh_dim)
        parts.append(f"{placement} over the {tensor.device_mesh.size(mesh_dim)} ranks of {name}")
    return f"{list(tensor.shape)}, {', '.join(parts)}"


def explain_rows_lost_by_gather(tensor: DTensor) -> str:
    """Explain what a gather of `tensor` loses in torch 2.13 (pull request 194457 of pytorch), and
    how to gather it; "" if nothing is lost.

    torch merges the gathers over several mesh dimensions that cut the same dimension into one as
    soon as the mesh has a flattened dimension of them, and then takes its parts for those of one
    even cut.
    """
    for dim, mesh_dims in _iterate_dims_sharded_twice(tensor):
        degrees = [tensor.device_mesh.size(mesh_dim) for mesh_dim in mesh_dims]
        num_lost = count_rows_lost_by_flat_gather(tensor.shape[dim], degrees)
        if not num_lost:
            continue
        names = ", ".join(_get_mesh_dim_name(tensor, mesh_dim) for mesh_dim in mesh_dims)
        return (
            f"where the mesh has a flattened dimension of {names}, torch 2.13 loses {num_lost} of"
            f" the {tensor.shape[dim]} rows of dimension {dim} when it gathers this one, silently"
            " (pytorch#194457): redistribute it to Replicate() over one mesh dimension at a time,"
            " the last first"
        )
    return ""


def count_rows_lost_by_flat_gather(size: int, degrees: Sequence[int]) -> int:
    """Count the rows, of `size`, that one flattened gather does not return and that were cut by
    each of `degrees` in turn: 0 where that gives the parts of a single cut."""
    nested = [size]
    for degree in degrees:
        nested = [
            part for size_so_far in nested for part in _compute_chunk_sizes(size_so_far, degree)
        ]
    flat = _compute_chunk_sizes(size, len(nested))
    return size - sum(min(pair) for pair in zip(nested, flat, strict=True))


def _compute_chunk_sizes(size: int, degree: int) -> list[int]:
    """The sizes of `degree` parts, as torch.chunk makes them."""
    largest = -(-size // degree)
    return [min(largest, max(0, size - index * largest)) for index in range(degree)]


def _iterate_dims_sharded_twice(tensor: DTensor) -> Iterator[tuple[int, list[int]]]:
    """(dimension, the mesh dimensions that cut it), of dimensions that several cut."""
    mesh_dims_of: dict[int, list[int]] = {}
    for mesh_dim, placement in enumerate(tensor.placements):
        if type(placement) is Shard:
            mesh_dims_of.setdefault(placement.dim % tensor.dim(), []).append(mesh_dim)
    for dim, mesh_dims in mesh_dims_of.items():
        if len(mesh_dims) > 1:
            yield dim, mesh_dims


def _get_mesh_dim_name(tensor: DTensor, mesh_dim: int) -> str:
    names = tensor.device_mesh.mesh_dim_names
    if names is None:
        return f"mesh dimension {mesh_dim}"
    return f"mesh dimension {names[mesh_dim]}"
