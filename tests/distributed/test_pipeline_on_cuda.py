"""What a pipeline sets up before CUDA and NCCL are used, as far as a machine without a GPU can
see it."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from phalanx.mesh import mesh as mesh_module
from phalanx.mesh.devices import PIPELINE_CUDA_VARIABLES
from phalanx.mesh.mesh import open_mesh
from phalanx.mesh.rendezvous import open_default_group
from phalanx.plan.layout import Layout
from ranks import run_ranks


def look_at_variables(rank: int, layout: Layout, own: dict[str, str]) -> dict[str, str | None]:
    """What stands in the environment when the first thing asks for a device."""
    for name in PIPELINE_CUDA_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(own)
    seen: dict[str, str | None] = {}
    choose = mesh_module.choose_device

    def look_and_choose(*args: Any) -> torch.device:
        seen.update({name: os.environ.get(name) for name in PIPELINE_CUDA_VARIABLES})
        return choose(*args)

    mesh_module.choose_device = look_and_choose
    with open_mesh(layout):
        return seen


def test_variables_of_cuda_are_set_before_it_is_asked_for_anything() -> None:
    pipeline, other = Layout(pp=2), Layout(dp_shard=2)
    assert run_ranks(2, look_at_variables, pipeline, {}) == [PIPELINE_CUDA_VARIABLES] * 2
    own = {"CUDA_MODULE_LOADING": "LAZY"}
    assert run_ranks(2, look_at_variables, pipeline, own) == [PIPELINE_CUDA_VARIABLES | own] * 2
    assert (
        run_ranks(2, look_at_variables, other, {}) == [dict.fromkeys(PIPELINE_CUDA_VARIABLES)] * 2
    )


def look_at_groups(rank: int) -> list[Any]:
    """What groups are made with where ranks join on a GPU: gloo makes them, as there is no NCCL
    here."""
    dist.destroy_process_group()
    found: list[Any] = []
    init = dist.init_process_group

    def look_and_init(backend: str, **options: Any) -> None:
        found.append((backend, options.get("device_id")))
        init("gloo", **options)

    dist.init_process_group = look_and_init
    open_default_group(dist.HashStore(), 0, 1, torch.device("cuda", 0), timeout_s=20.0)
    return [*found, dist.group.WORLD.bound_device_id]


def test_ranks_join_without_a_device_id() -> None:
    """NCCL then opens communicators of two ranks when they first talk, each with a stream of its
    own.

    With a device_id all messages of a pipeline share one, and its ranks wait for each other for
    ever.
    """
    for (backend, device_id), bound in run_ranks(2, look_at_groups):
        assert "nccl" in backend
        assert device_id is None
        assert bound is None
