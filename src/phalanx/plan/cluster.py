"""Devices to run on, their memory, and how much of it a plan may fill.

Torch-free.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.core.cgroups import read_memory_limit
from phalanx.core.cores import count_allowed_cores
from phalanx.core.errors import EnvironmentProblem
from phalanx.job.schema import Job, Parallel
from phalanx.plan.accelerators import Accelerator, find_accelerator_by_driver_name
from phalanx.plan.nvidia import Gpu, list_visible_gpus

MIB = 2**20


@dataclass(frozen=True)
class LinkLevel:
    """Links that join `num_devices` devices: `gb_s` (1e9 bytes a second) of one device, in one
    direction."""

    name: str
    num_devices: int
    gb_s: float
    latency_us: float | None = None
    oversubscription: float = 1.0
    topology: str = "switch"


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind, found on this machine or described.

    `memory_bytes` is one device's (CPU: the whole machine's). `capability` is the compute
    capability of the least able GPU; None on CPUs, and where nobody says. `accelerator` and `links`
    (from the innermost outwards) are what step times are predicted with: None and empty where they
    are not known. Prices are US dollars for one node and hour.
    """

    device: str  # "cpu" | "cuda"
    num_devices: int  # GPUs, or CPU cores this process may use
    memory_bytes: int
    name: str = ""
    capability: tuple[int, int] | None = None
    accelerator: Accelerator | None = None
    devices_per_node: int = 0  # 0: all are in one
    links: tuple[LinkLevel, ...] = ()
    host_memory_bytes: int | None = None
    price_per_hour: float | None = None
    spot_price_per_hour: float | None = None
    watts: float | None = None  # of one device at work
    price_note: str = ""  # where the prices are from, and whether somebody compared them
    is_described: bool = False  # by the job, rather than found here
    network_note: str = ""  # where nobody says how fast the network is, and a speed is assumed
    nic_gb_s: float | None = None  # of one device between nodes, where its node's is known

    @property
    def num_nodes(self) -> int:
        # Rounded up: a node that is partly used is paid for.
        return -(-self.num_devices // (self.devices_per_node or self.num_devices))

    @property
    def link_domain(self) -> int:
        """Devices that the innermost links join; all of them where nothing is known of links."""
        if not self.links:
            return self.devices_per_node or self.num_devices
        return min(self.links[0].num_devices, self.num_devices)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def memory_per_rank(self, num_ranks: int) -> int:
        """Bytes one of `num_ranks` ranks may use: a whole GPU, or its part of the machine's
        memory."""
        if self.device == "cuda":
            return self.memory_bytes
        return self.memory_bytes // max(1, num_ranks)


def detect_cluster(device: str = "auto") -> Cluster:
    """This machine's GPUs if it has any (and `device` is not "cpu"), else its CPU cores.

    Raises EnvironmentProblem (exit 6) if GPUs are asked for and there are none, or if there is a
    driver and it cannot be learned which GPUs it has.
    """
    if device != "cpu" and (gpus := list_visible_gpus()):
        # CUDA shows a process one MIG slice, however many there are.
        if gpus[0].uuid.startswith("MIG-"):
            gpus = gpus[:1]
        # All ranks have one plan: the GPU with least memory, and the least able one, decide.
        memory_bytes, capability = (
            min(gpu.memory_bytes for gpu in gpus),
            _find_least_capability(gpus),
        )
        accelerator = find_accelerator_by_driver_name(gpus[0].name, memory_bytes)
        links: tuple[LinkLevel, ...] = ()
        if accelerator is not None:
            links = (LinkLevel("node", len(gpus), accelerator.link_gb_s),)
        return Cluster(
            "cuda",
            len(gpus),
            memory_bytes,
            gpus[0].name,
            capability,
            accelerator,
            len(gpus),
            links,
            _detect_host_memory_bytes(),
            watts=None if accelerator is None else accelerator.watts,
        )
    if device == "cuda":
        why = "neither NVML nor nvidia-smi lists one"
        if "CUDA_VISIBLE_DEVICES" in os.environ:
            why = "CUDA_VISIBLE_DEVICES hides them all"
        raise EnvironmentProblem("no GPU was found", why=why, fix="use cluster.device=cpu")
    return Cluster("cpu", count_allowed_cores(), _detect_host_memory_bytes())


def _detect_host_memory_bytes() -> int:
    """Physical memory, or the least limit of the control groups around us where that is lower."""
    import psutil  # here: a described cluster does without it

    # psutil reads the machine's memory: only control groups know of a limit.
    return int(min(psutil.virtual_memory().total, read_memory_limit()))


def detect_least_compute_capability() -> tuple[int, int] | None:
    """The compute capability of the least able GPU here; None if it is unknown."""
    return _find_least_capability(list_visible_gpus())


def _find_least_capability(gpus: Sequence[Gpu]) -> tuple[int, int] | None:
    capabilities = [gpu.capability for gpu in gpus]
    # (0, 0) is what a driver says that does not know: then nothing may be built on the others'.
    if not capabilities or (0, 0) in capabilities:
        return None
    return min(capabilities)


@dataclass(frozen=True)
class Headroom:
    """The memory of a rank that a plan does not fill: all but `share`, `runtime_bytes`, and
    `communicator_bytes` for each communicator.

    On a CPU this is for the interpreter and torch. On a GPU, where nothing was measured yet, the
    share is for fragments and libraries' workspaces, the runtime for the context and its kernels,
    and NCCL's buffers count per communicator.
    """

    share: float
    runtime_bytes: int
    communicator_bytes: int = 0

    def compute_capacity_bytes(self, memory_bytes: int, communicators: int) -> int:
        usable = (
            round(memory_bytes * self.share)
            - self.runtime_bytes
            - self.communicator_bytes * communicators
        )
        return max(0, usable)


# The numbers for GPUs are estimates, see docs/memory.md; `list_headroom_notes` says so to the user.
CPU_HEADROOM = Headroom(0.94, 450 * MIB)
GPU_HEADROOM = Headroom(0.90, 614 * MIB, 200 * MIB)


def choose_headroom(device: str) -> Headroom:
    if device == "cpu":
        return CPU_HEADROOM
    return GPU_HEADROOM


def rank_memory_bytes(job: Job, cluster: Cluster, num_ranks: int) -> int:
    """Bytes of all of a rank's memory, whatever it is filled with."""
    requested_gib = job.cluster.memory_gib
    if requested_gib is None:
        return cluster.memory_per_rank(num_ranks)
    return round(requested_gib * 2**30)


def rank_capacity_bytes(job: Job, cluster: Cluster, num_ranks: int) -> int:
    """Bytes that a rank may fill beyond its runtime."""
    memory_bytes = rank_memory_bytes(job, cluster, num_ranks)
    return choose_headroom(cluster.device).compute_capacity_bytes(
        memory_bytes, count_communicators(job.parallel, num_ranks)
    )


def count_communicators(parallel: Parallel, num_ranks: int) -> int:
    """The number of process groups that a rank sends through: all ranks, and those of each axis.

    A pipeline has one for each pair of neighbours and each direction.
    """
    if num_ranks == 1:
        return 0
    degrees = parallel.degrees
    pp, tp, cp, ep = degrees.pp, degrees.tp, degrees.cp, degrees.ep
    shares = num_ranks // (pp * tp)  # cp reduces gradients, too
    # Shards that are replicated: gradients travel over the shards, then over the replicas.
    is_hybrid = degrees.dp_replicate > 1 and degrees.dp_shard * cp > 1
    if num_ranks in (tp, cp, shares // cp) and ep == 1 and not is_hybrid:
        return 1  # one axis, and it is all ranks
    count = 1 + (tp > 1) + (cp > 1) + (shares > 1) + is_hybrid
    if ep > 1:
        count += 2  # those with other experts, and those with the same ones
    if pp > 1:
        # A rank in the middle has two neighbours and each direction to each; of two ranks each
        # has one neighbour.
        count += 4 if pp > 2 else 2
    return count
