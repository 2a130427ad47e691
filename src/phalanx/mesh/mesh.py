"""Open the process groups of a layout.

The only room besides `launch` that reads the environment.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from phalanx.core.deprecated import warn_renamed
from phalanx.core.digest import digest
from phalanx.core.errors import EnvironmentProblem, RanksDifferError
from phalanx.core.launchers import write_torch_variables_of_launcher
from phalanx.mesh.agreement import describe_ranks_that_differ_from_majority
from phalanx.mesh.compat import (
    clear_dtensor_caches,
    silence_torch_warnings,
    using_default_group_timeout,
)
from phalanx.mesh.device_meshes import clear_device_mesh_cache, open_expert_mesh, open_layout_mesh
from phalanx.mesh.devices import (
    choose_device,
    read_gpu_uuid,
    set_cuda_variables_for_pipeline,
    set_threads_and_device,
)
from phalanx.mesh.gloo_devices import share_gloo_devices_between_groups
from phalanx.mesh.rendezvous import (
    RENDEZVOUS_TIMEOUT_S,
    open_default_group,
    open_rendezvous_store,
    require_own_gpu_per_rank,
    wait_for_all_ranks,
)
from phalanx.mesh.shared_memory.opening import (
    CollectivesChoice,
    current_transport,
    sharing_memory_between_ranks,
)
from phalanx.plan.host_allocator import choose_max_heap_block_bytes
from phalanx.plan.layout import Layout


def running_ranks() -> int:
    """The number of ranks: of the open process group, or WORLD_SIZE (or what Slurm or MPI call it),
    or 1."""
    if dist.is_initialized():
        return dist.get_world_size()
    write_torch_variables_of_launcher(os.environ)
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
    """The same ranks along the axes of `layout.gradient_reduction_layout`; None where that is the
    layout."""
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
        key: Any = axes
        if len(axes) == 1:
            key = axes[0]
        if {"ep", "expert_shard"} & set(axes):
            assert self.expert_mesh is not None, "the layout has no ep"
            return self.expert_mesh[key]
        if self.reducing_mesh is not None and any(axis.startswith("dp_") for axis in axes):
            return self.reducing_mesh[key]
        return self.device_mesh[key]

    def data_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that hold the same part of the model and see different tokens.

        Only for more than one rank.
        """
        if self.layout.gradient_reduction_layout.dp_shard == 1:
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
        # `new_group` is collective over all ranks: each opens every group, in the same order.
        for ranks in self._list_ranks_along_axis(axis):
            group = dist.new_group(list(ranks))
            if self.rank in ranks:
                own_group = group
        assert own_group is not None
        return own_group

    def _list_ranks_along_axis(self, axis: str) -> list[tuple[int, ...]]:
        """All ranks, by the others of `axis` through them; in the same order on every rank."""
        rows: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            coordinates = self.layout.coordinates(rank)
            key = tuple(degree for name, degree in coordinates.items() if name != axis)
            rows.setdefault(key, []).append(rank)
        return [tuple(row) for row in rows.values()]

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over all ranks, in launched."""
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
        # A bytearray, for `frombuffer` warns of memory that cannot be written to.
        encoded = bytearray(json.dumps(value).encode())
        data = torch.frombuffer(encoded, dtype=torch.uint8).to(self.device)
        sizes = self.all_gather(torch.tensor([data.numel()], device=self.device))
        lengths = [int(size) for size in sizes]
        # all_gather takes tensors of one length: the longest text's.
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device=self.device)
        padded[: data.numel()] = data
        values = []
        for text, length in zip(self.all_gather(padded), lengths, strict=True):
            values.append(json.loads(text[:length].cpu().numpy().tobytes()))
        return values

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's `tensor`, which is of one shape on all ranks, in rank order."""
        if self.device_mesh is None:
            return [tensor]
        gathered = [torch.zeros_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(gathered, tensor, group=self.group)
        return gathered

    def describe_collectives(self) -> str:
        """What the ranks exchange tensors through, in words; empty of one rank."""
        if self.device_mesh is None:
            return ""
        transport = current_transport()
        if self.device.type != "cpu" or transport is None or transport.is_paused:
            return str(dist.get_backend())
        if transport.shares_memory(dist.group.WORLD):
            return "shared memory"
        return "shared memory on each host and gloo between hosts"

    def open_cpu_mesh(self, *, timeout_s: float, name: str = "beside training") -> Mesh:
        """The same ranks on the CPU, with a process group of their own: for one other thread of
        each rank, whose collectives then never meet those of training. `name`: what positions and
        stalls call the group.

        Collective.
        """
        if self.device_mesh is None:
            return replace(self, device=torch.device("cpu"))
        timeout = datetime.timedelta(seconds=timeout_s)
        group = dist.new_group(backend="gloo", timeout=timeout, group_desc=name)
        return replace(self, device=torch.device("cpu"), group=group)

    def require_agreement(self, facts: Mapping[str, Any]) -> None:
        """Compare `facts` (nested JSON) over all ranks; raise RanksDifferError on all of them if
        any differs."""
        digests = self.gather_json(digest(facts))
        if len(set(digests)) == 1:
            return
        # Facts are long, and gathered only where they differ. All ranks come here, or none: they
        # have the same digests.
        differences = describe_ranks_that_differ_from_majority(
            digests, self.gather_json(dict(facts))
        )
        raise RanksDifferError(
            f"the ranks differ: {differences}", fix="give every rank the same job, code and data"
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


@contextlib.contextmanager
def open_mesh(
    layout: Layout,
    *,
    device: str = "auto",
    timeout_s: float = 600.0,
    rendezvous_s: float = RENDEZVOUS_TIMEOUT_S,
    store: dist.Store | None = None,
    collectives: CollectivesChoice = "auto",
) -> Iterator[Mesh]:
    """Join the ranks of `layout` and yield this rank's Mesh; leave them at the end.

    One rank needs nothing. More are found through RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
    (`store` is one from `open_rendezvous_store`, if it is open already), or through a process group
    that is open already: it is used, and left open. Raises EnvironmentProblem (exit 6) if the ranks
    are not those of the layout, if the port is taken, or if a rank does not arrive within
    `rendezvous_s`.

    Every group that is opened meanwhile, also by user code, has `timeout_s` for a collective unless
    it is given another.

    `collectives`: "auto" lets ranks of one host that compute on the CPU exchange tensors through
    shared memory, and others through gloo; "shared" raises EnvironmentProblem where they cannot.
    """
    silence_torch_warnings()
    share_gloo_devices_between_groups()
    launched = _find_rank_of_this_process(layout)
    if layout.pp > 1 and device != "cpu":
        # Before anything asks the driver, which reads them once.
        set_cuda_variables_for_pipeline()
    torch_device = choose_device(device, launched.local_rank)
    threads_before = torch.get_num_threads()
    if launched.opens_groups:
        store = store or open_rendezvous_store(rendezvous_s=rendezvous_s)
        # Before the device: making its context takes seconds, one after another on a machine with
        # several GPUs.
        _rendezvous_with_ranks(
            store, launched, torch_device, rendezvous_s=rendezvous_s, timeout_s=timeout_s
        )
    set_threads_and_device(
        torch_device, launched.world_size, heap_bytes=choose_max_heap_block_bytes(layout)
    )
    if launched.world_size == 1 and not dist.is_initialized():
        yield Mesh(layout, 0, launched.local_rank, torch_device)
        torch.set_num_threads(threads_before)
        return
    try:
        with using_default_group_timeout(datetime.timedelta(seconds=timeout_s)):
            if launched.opens_groups:
                assert store is not None
                open_default_group(
                    store, launched.rank, launched.world_size, torch_device, timeout_s=timeout_s
                )
            mesh = _open_device_meshes(layout, launched, torch_device, timeout_s)
            with _sharing_memory(mesh, collectives):
                yield mesh
            # Without groups they were abandoned: what is queued may wait for ranks that are gone.
            if launched.opens_groups and torch_device.type == "cuda" and dist.is_initialized():
                torch.cuda.synchronize()
    except BaseException:
        if launched.opens_groups and dist.is_initialized():
            _abandon_process_groups(torch_device)
        raise
    finally:
        torch.set_num_threads(threads_before)
    if launched.opens_groups and dist.is_initialized():
        clear_device_mesh_cache()
        dist.destroy_process_group()


@dataclass(frozen=True)
class _RankOfThisProcess:
    """This process among the ranks.

    `opens_groups`: there is no process group yet, and more than one rank.
    """

    rank: int
    local_rank: int
    world_size: int
    opens_groups: bool


def _find_rank_of_this_process(layout: Layout) -> _RankOfThisProcess:
    """This process among the ranks, from the open process group or the environment.

    Raises EnvironmentProblem if there are not as many as `layout` needs.
    """
    write_torch_variables_of_launcher(os.environ)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", str(rank)))
    has_group = dist.is_initialized()
    if has_group:
        rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size != layout.world_size:
        raise EnvironmentProblem(
            f"the layout ({layout}) needs {layout.world_size} ranks and {world_size} are running",
            fix="start as many ranks as the plan says, or change parallel.*",
        )
    return _RankOfThisProcess(rank, local_rank, world_size, world_size > 1 and not has_group)


def _rendezvous_with_ranks(
    store: dist.Store,
    launched: _RankOfThisProcess,
    device: torch.device,
    *,
    rendezvous_s: float,
    timeout_s: float,
) -> None:
    """Return when all ranks are here, each with a GPU of its own if `device` is one.

    Raises EnvironmentProblem.
    """
    rank, world_size = launched.rank, launched.world_size
    wait_for_all_ranks(store, rank, world_size, rendezvous_s=rendezvous_s, timeout_s=timeout_s)
    if device.type == "cuda":
        require_own_gpu_per_rank(store, rank, world_size, read_gpu_uuid(device))


def _open_device_meshes(
    layout: Layout, launched: _RankOfThisProcess, device: torch.device, timeout_s: float
) -> Mesh:
    """This rank's Mesh, with device meshes for every axis of `layout`. Collective."""
    device_mesh = open_layout_mesh(device, layout, timeout_s)
    reducing_mesh = None
    if layout.cp > 1:
        reducing_mesh = open_layout_mesh(device, layout.gradient_reduction_layout, timeout_s)
    return Mesh(
        layout,
        launched.rank,
        launched.local_rank,
        device,
        device_mesh,
        reducing_mesh,
        open_expert_mesh(device, layout, timeout_s),
        is_ours=launched.opens_groups,
    )


@contextlib.contextmanager
def _sharing_memory(mesh: Mesh, collectives: CollectivesChoice) -> Iterator[None]:
    """Collectives on the CPU go through shared memory, where ranks can see each other's."""
    if mesh.device.type != "cpu" or dist.get_backend() != "gloo":
        yield
        return
    with sharing_memory_between_ranks(mesh.rank, mesh.gather_json, collectives):
        yield


def abandon_mesh(mesh: Mesh) -> None:
    """Leave the groups of an open mesh, while the other ranks may be in a collective that this one
    will never join.

    The mesh is of no use from then on. Groups that were open before stay open, as
    `open_mesh` leaves them.
    """
    if mesh.is_ours and dist.is_initialized():
        _abandon_process_groups(mesh.device)


def release_abandoned_groups() -> None:
    """Have the connections of abandoned groups closed, so that ranks that wait in them notice.

    For a process that goes on and holds no model of them any more. Gloo closes them with the last
    reference to a group, and DTensor keeps meshes with what it knows of their operators.
    """
    clear_dtensor_caches()
    gc.collect()


def _abandon_process_groups(device: torch.device) -> None:
    """Leave all groups without waiting for other ranks.

    Destroying a group of NCCL waits for its kernels, and so for the others; aborting does not. Gloo
    only closes its sockets.
    """
    transport = current_transport()
    if transport is not None:
        transport.close()
    clear_device_mesh_cache()
    # The error that brought us here is the one to be seen.
    with contextlib.suppress(Exception):
        if device.type == "cuda":
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()
