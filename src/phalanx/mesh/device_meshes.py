"""torch's device meshes of a layout, kept as long as their process group is open."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from phalanx.mesh.compat import set_timeout_of_mesh_groups
from phalanx.plan.layout import AXES, Layout

# The meshes of the process group under "world". Where ranks go on, groups stay open, for DTensor
# keeps what it knows of a mesh for another one like it; the next mesh with the same axes gets them
# again, as each group of gloo has three threads that never rest.
_cached_device_meshes: dict[Any, Any] = {}


def open_layout_mesh(device: torch.device, layout: Layout, timeout_s: float) -> DeviceMesh:
    """The mesh of all ranks along the axes of `layout`. Collective."""
    shape = tuple(getattr(layout, axis) for axis in AXES)
    return _get_or_open_device_mesh(device.type, shape, AXES, timeout_s)


def open_expert_mesh(device: torch.device, layout: Layout, timeout_s: float) -> DeviceMesh | None:
    """The mesh of all ranks with the axes "expert_shard" and "ep"; None where there is no ep.

    Collective.
    """
    if layout.ep == 1:
        return None
    shard = layout.gradient_reduction_layout.dp_shard // layout.ep
    shape = (layout.pp, layout.dp_replicate, shard, layout.ep, layout.tp)
    names = ("pp", "dp_replicate", "expert_shard", "ep", "tp")
    return _get_or_open_device_mesh(device.type, shape, names, timeout_s)


def clear_device_mesh_cache() -> None:
    """Forget all meshes: their process group is about to close."""
    _cached_device_meshes.clear()


def _get_or_open_device_mesh(
    device_type: str, shape: tuple[int, ...], names: tuple[str, ...], timeout_s: float
) -> DeviceMesh:
    """The mesh of all ranks with these axes; of one process group there is one, however often it
    is asked for."""
    # A group that was closed behind our back took its subgroups with it.
    if _cached_device_meshes.get("world") is not dist.group.WORLD:
        _cached_device_meshes.clear()
        _cached_device_meshes["world"] = dist.group.WORLD
    key = device_type, shape, names
    if key not in _cached_device_meshes:
        _cached_device_meshes[key] = init_device_mesh(device_type, shape, mesh_dim_names=names)
    else:
        set_timeout_of_mesh_groups(
            _cached_device_meshes[key], datetime.timedelta(seconds=timeout_s)
        )
    return _cached_device_meshes[key]
