"""Open the process groups of a layout.

The only room besides `launch` that reads the environment.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from phalanx.core.deprecated import warn_renamed
from phalanx.core.digest import differing_keys, digest
from phalanx.core.errors import EnvironmentProblem, RanksDifferError
from phalanx.core.launchers import SUPERVISED, adopt_launched_rank
from phalanx.mesh.compat import default_group_timeout, quiet_torch, set_timeouts
from phalanx.mesh.malloc import return_large_blocks
from phalanx.mesh.rendezvous import (
    RENDEZVOUS_S,
    open_default_group,
    open_rendezvous_store,
    refuse_shared_gpus,
    wait_for_all,
)
from phalanx.plan.layout import AXES, Layout

PIPELINE_VARIABLES = {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""Of CUDA, for pipelines, unless the user has set them.

A kernel that is loaded at its first use can wait for the whole device, also for a receive that
waits for its sender; and of more streams than there are connections some share one, where a receive
keeps back the other stream's kernels. The order of messages (`plan.pipeline.messages`) is safe with
either; these keep it from being slow.
"""


def running_ranks() -> int:
    """The number of ranks: of the open process group, or WORLD_SIZE (or what Slurm or MPI call it),
    or 1."""
    if dist.is_initialized():
        return dist.get_world_size()
    adopt_launched_rank(os.environ)
    return int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True)
class Mesh:
    """The ranks of a layout as seen from one of them.

    `device_mesh` is None when there is only one rank.

    `group`: what its collectives go through; None is the group of training.
    """

    layout: Layout
    rank: int
    local_rank: int
    device: torch.device
    device_mesh: DeviceMesh | None = field(default=None, repr=False)
    reducing_mesh: DeviceMesh | None = field(default=None, repr=False)
    """The same ranks along the axes of `layout.reduced`; None where that is the layout."""
    expert_mesh: DeviceMesh | None = field(default=None, repr=False)
    """The same ranks along pp, dp_replicate, expert_shard, ep and tp; None where there is no ep."""
    group: dist.ProcessGroup | None = field(default=None, repr=False)
    is_ours: bool = field(default=False, repr=False)
    """True where `open_mesh` has opened the groups, and closes them."""

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def coordinates(self) -> dict[str, int]:
        return self.layout.coordinates(self.rank)

    @property
    def data_parallel_rank(self) -> int:
        return self.layout.data_parallel_rank(self.rank)

    @property
    def is_tp_leader(self) -> bool:
        """False for a rank that has the same sums as another one, whose are the ones that count:
        those of tp see the same tokens, those of cp others of the same samples.

        Of a pipeline only the ranks with the last stage have any.
        """
        return self.coordinates["tp"] == 0

    @property
    def stage_rank_and_size(self) -> tuple[int, int]:
        """This rank's number among those that hold the same stages of a pipeline, and how many
        these are."""
        count = self.layout.world_size // self.layout.pp
        return self.rank % count, count

    def submesh(self, *axes: str) -> DeviceMesh:
        """The DeviceMesh of `axes` through this rank; dp_shard has the ranks of cp in it.

        For more than one rank.

        "ep" are ranks with different experts, "expert_shard" those of dp_shard that have the same
        ones.
        """
        assert self.device_mesh is not None, "one rank has no mesh"
        if {"ep", "expert_shard"} & set(axes):
            assert self.expert_mesh is not None, "the layout has no ep"
            return self.expert_mesh[axes if len(axes) > 1 else axes[0]]
        reduces = self.reducing_mesh is not None and any(axis.startswith("dp_") for axis in axes)
        of_all = (
            self.reducing_mesh if self.reducing_mesh is not None and reduces else self.device_mesh
        )
        return of_all[axes if len(axes) > 1 else axes[0]]

    def data_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that hold the same part of the model and see different tokens.

        Only for more than one rank.
        """
        if self.layout.reduced.dp_shard == 1:
            return self.submesh("dp_replicate").get_group()
        if self.layout.dp_replicate == 1:
            return self.submesh("dp_shard").get_group()
        return self.submesh("dp_replicate", "dp_shard")._flatten("dp").get_group()

    def stage_group(self) -> dist.ProcessGroup | None:
        """All ranks that hold the same stages of a pipeline; None where that is one rank alone."""
        if self.device_mesh is None or self.layout.world_size == self.layout.pp:
            return None
        if self.layout.pp == 1:
            return dist.group.WORLD
        return (
            self.device_mesh["dp_replicate", "dp_shard", "cp", "tp"]._flatten("stage").get_group()
        )

    def open_second_group(self, axis: str) -> dist.ProcessGroup:
        """Another process group of the same ranks as that of `axis` through this rank.

        Collective over all ranks.
        """
        own_group = None
        for ranks in self._rows(axis):
            group = dist.new_group(list(ranks))
            if self.rank in ranks:
                own_group = group
        assert own_group is not None
        return own_group

    def _rows(self, axis: str) -> list[tuple[int, ...]]:
        """All ranks, by the others of `axis` through them; in the same order on every rank."""
        rows: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            coordinates = self.layout.coordinates(rank)
            rows.setdefault(
                tuple(degree for name, degree in coordinates.items() if name != axis), []
            ).append(rank)
        return [tuple(row) for row in rows.values()]

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over all ranks, in place."""
        if self.device_mesh is not None:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def barrier(self) -> None:
        """Return when all ranks are here.

        Reading the sum holds back the host, too, where a device only queues it.
        """
        self.all_reduce_sum(torch.zeros(1, device=self.device)).item()

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order, on every rank. Nothing is pickled."""
        if self.device_mesh is None:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(
            self.device
        )
        size = torch.tensor([data.numel()], device=self.device)
        sizes = [torch.zeros_like(size) for _ in range(self.world_size)]
        dist.all_gather(sizes, size, group=self.group)
        longest = max(int(s) for s in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8, device=self.device)
        padded[: data.numel()] = data
        gathered = [torch.zeros_like(padded) for _ in range(self.world_size)]
        dist.all_gather(gathered, padded, group=self.group)
        return [
            json.loads(g[: int(s)].cpu().numpy().tobytes())
            for g, s in zip(gathered, sizes, strict=True)
        ]

    def open_cpu_mesh(self, *, timeout_s: float) -> Mesh:
        """The same ranks on the CPU, with a process group of their own: for one other thread of
        each rank, whose collectives then never meet those of training.

        Collective.
        """
        if self.device_mesh is None:
            return replace(self, device=torch.device("cpu"))
        group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
        return replace(self, device=torch.device("cpu"), group=group)

    def require_agreement(self, facts: Mapping[str, Any]) -> None:
        """Compare `facts` (nested JSON) over all ranks; raise RanksDifferError on all of them if
        any differs."""
        digests = self.gather_json(digest(facts))
        if len(set(digests)) == 1:
            return
        all_facts = self.gather_json(dict(facts))
        majority = max(set(digests), key=lambda d: (digests.count(d), d == digests[0]))
        reference = all_facts[digests.index(majority)]
        differences = []
        for rank, (rank_digest, value) in enumerate(zip(digests, all_facts, strict=True)):
            if rank_digest != majority:
                keys = differing_keys(reference, value)
                shown = ", ".join(
                    f"{k} = {_pick(value, k)!r}, not {_pick(reference, k)!r}" for k in keys[:4]
                )
                more = f" and {len(keys) - 4} more" if len(keys) > 4 else ""
                differences.append(f"rank {rank}: {shown}{more}")
        raise RanksDifferError(
            "the ranks differ: " + "; ".join(differences),
            fix="give every rank the same job, code and data",
        )

    # Names of 0.1.0, until 0.2

    @property
    def counts_samples(self) -> bool:
        warn_renamed("Mesh.counts_samples", "Mesh.is_tp_leader")
        return self.is_tp_leader

    @property
    def place_in_stage(self) -> tuple[int, int]:
        warn_renamed("Mesh.place_in_stage", "Mesh.stage_rank_and_size")
        return self.stage_rank_and_size

    def second_group(self, axis: str) -> dist.ProcessGroup:
        warn_renamed("Mesh.second_group", "Mesh.open_second_group")
        return self.open_second_group(axis)

    def open_beside(self, *, timeout_s: float) -> Mesh:
        warn_renamed("Mesh.open_beside", "Mesh.open_cpu_mesh")
        return self.open_cpu_mesh(timeout_s=timeout_s)


def _pick(value: Any, path: str) -> Any:
    for part in path.split("."):
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return value


def threads_per_rank(local_world_size: int) -> int:
    """OMP_NUM_THREADS, or this rank's part of the cores."""
    requested = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if requested.isdigit() and int(requested) > 0:
        return int(requested)
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, cores // max(1, local_world_size))


def choose_device(kind: str, local_rank: int) -> torch.device:
    """ "auto" is CUDA where there is any.

    Raises EnvironmentProblem if CUDA is asked for and absent.
    """
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise EnvironmentProblem("no CUDA device is available", fix="use cluster.device=cpu")
        count = torch.cuda.device_count()
        if count == 1 and SUPERVISED not in os.environ:
            return torch.device(
                "cuda", 0
            )  # a launcher that shows each of its ranks the one GPU it may use
        if local_rank >= count:
            raise EnvironmentProblem(
                f"local rank {local_rank} has no GPU", why=f"this machine has {count}"
            )
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def name_gpu(device: torch.device) -> str:
    """The UUID of a GPU: what its number stands for, which each rank may count from another
    list."""
    return str(torch.cuda.get_device_properties(device).uuid)


@contextlib.contextmanager
def open_mesh(
    layout: Layout,
    *,
    device: str = "auto",
    timeout_s: float = 600.0,
    rendezvous_s: float = RENDEZVOUS_S,
    store: dist.Store | None = None,
) -> Iterator[Mesh]:
    """Join the ranks of `layout` and yield this rank's Mesh; leave them at the end.

    One rank needs nothing. More are found through RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
    (`store` is one from `open_rendezvous_store`, if it is open already), or through a process group
    that is open already: it is used, and left open. Raises EnvironmentProblem (exit 6) if the ranks
    are not those of the layout, if the port is taken, or if a rank does not arrive within
    `rendezvous_s`.

    Every group that is opened meanwhile, by whomever, has `timeout_s` for a collective unless it is
    given another.
    """
    quiet_torch()
    adopt_launched_rank(os.environ)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", str(rank)))
    opens_groups = False
    if dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size != layout.world_size:
        raise EnvironmentProblem(
            f"the layout ({layout}) needs {layout.world_size} ranks and {world_size} are running",
            fix="start as many ranks as the plan says, or change parallel.*",
        )
    if layout.pp > 1 and device != "cpu":  # before anything asks the driver, which reads them once
        for name, value in PIPELINE_VARIABLES.items():
            os.environ.setdefault(name, value)
    torch_device = choose_device(device, local_rank)
    threads_before = torch.get_num_threads()
    if not dist.is_initialized() and world_size > 1:
        opens_groups = True
        store = store or open_rendezvous_store(rendezvous_s=rendezvous_s)
        # Before the device: making its context takes seconds, one after another on a machine with
        # several GPUs.
        wait_for_all(store, rank, world_size, rendezvous_s=rendezvous_s, timeout_s=timeout_s)
        if torch_device.type == "cuda":
            refuse_shared_gpus(store, rank, world_size, name_gpu(torch_device))
    # Ranks with a GPU compute on the CPU, too: an offloaded optimizer, initial weights, norms. The
    # server that forks them has one thread, and what OMP_NUM_THREADS says afterwards torch no
    # longer reads by itself.
    torch.set_num_threads(threads_per_rank(int(os.environ.get("LOCAL_WORLD_SIZE") or world_size)))
    if torch_device.type == "cpu":
        if layout.reduced.dp_shard > 1:
            return_large_blocks()
    else:
        torch.cuda.set_device(torch_device)
    if world_size == 1 and not dist.is_initialized():
        yield Mesh(layout, 0, local_rank, torch_device)
        torch.set_num_threads(threads_before)
        return
    try:
        with default_group_timeout(datetime.timedelta(seconds=timeout_s)):
            if opens_groups:
                assert store is not None
                open_default_group(store, rank, world_size, torch_device, timeout_s=timeout_s)
            device_mesh = _device_mesh(torch_device, layout, timeout_s)
            reducing = (
                _device_mesh(torch_device, layout.reduced, timeout_s) if layout.cp > 1 else None
            )
            # Where ranks go on, groups stay open, for DTensor keeps what it knows of a mesh for
            # another one like it; the next mesh with the same axes gets them again, as each group
            # of gloo has three threads that never rest.
            experts = _expert_mesh(torch_device, layout, timeout_s)
            yield Mesh(
                layout,
                rank,
                local_rank,
                torch_device,
                device_mesh,
                reducing,
                experts,
                is_ours=opens_groups,
            )
            if (
                opens_groups and torch_device.type == "cuda" and dist.is_initialized()
            ):  # or they were abandoned
                torch.cuda.synchronize()
    except BaseException:
        if opens_groups and dist.is_initialized():
            _abandon_groups(torch_device)
        raise
    finally:
        torch.set_num_threads(threads_before)
    if opens_groups and dist.is_initialized():
        _meshes.clear()
        dist.destroy_process_group()


def leave_at_once(mesh: Mesh) -> None:
    """Leave the groups of an open mesh, while the other ranks may be in a collective that this one
    will never join.

    The mesh is of no use from then on. Groups that somebody else has opened stay open, as
    `open_mesh` leaves them.
    """
    if mesh.is_ours and dist.is_initialized():
        _abandon_groups(mesh.device)


def _abandon_groups(device: torch.device) -> None:
    """Leave all groups without waiting for other ranks.

    Destroying a group of NCCL waits for its kernels, and so for the others; aborting does not. Gloo
    only closes its sockets.
    """
    _meshes.clear()
    with contextlib.suppress(Exception):  # the error that brought us here is the one to be seen
        if device.type == "cuda":
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()


def _device_mesh(device: torch.device, layout: Layout, timeout_s: float) -> DeviceMesh:
    return _open_device_mesh(
        device.type, tuple(getattr(layout, axis) for axis in AXES), AXES, timeout_s
    )


def _expert_mesh(device: torch.device, layout: Layout, timeout_s: float) -> DeviceMesh | None:
    if layout.ep == 1:
        return None
    shard = layout.reduced.dp_shard // layout.ep
    shape = (layout.pp, layout.dp_replicate, shard, layout.ep, layout.tp)
    return _open_device_mesh(
        device.type, shape, ("pp", "dp_replicate", "expert_shard", "ep", "tp"), timeout_s
    )


def _open_device_mesh(
    device_type: str, shape: tuple[int, ...], names: tuple[str, ...], timeout_s: float
) -> DeviceMesh:
    """The mesh of all ranks with these axes; of one process group there is one, however often it
    is asked for."""
    if _meshes.get("world") is not dist.group.WORLD:
        _meshes.clear()
        _meshes["world"] = dist.group.WORLD
    key = device_type, shape, names
    if key not in _meshes:
        _meshes[key] = init_device_mesh(device_type, shape, mesh_dim_names=names)
    else:
        set_timeouts(_meshes[key], datetime.timedelta(seconds=timeout_s))
    return _meshes[key]


_meshes: dict[Any, Any] = {}  # of the process group "world"
