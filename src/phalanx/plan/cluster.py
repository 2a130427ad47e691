"""What there is to run on: devices, their memory, and which ranks can be started here.

Torch-free.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from phalanx.core.errors import EnvironmentProblem
from phalanx.plan.nvidia import Gpu, visible_gpus


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind.

    `memory_bytes` is one device's (CPU: the whole machine's). `capability` is the compute
    capability of the least able GPU; None on CPUs, and where nobody says.
    """

    device: str  # "cpu" | "cuda"
    num_devices: int  # GPUs, or CPU cores this process may use
    memory_bytes: int
    name: str = ""
    capability: tuple[int, int] | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def memory_per_rank(self, num_ranks: int) -> int:
        """Bytes one of `num_ranks` ranks may use: a whole GPU, or its part of the machine's
        memory."""
        return (
            self.memory_bytes if self.device == "cuda" else self.memory_bytes // max(1, num_ranks)
        )


def detect_cluster(device: str = "auto") -> Cluster:
    """This machine's GPUs if it has any (and `device` is not "cpu"), else its CPU cores.

    Raises EnvironmentProblem (exit 6) if GPUs are asked for and there are none, or if there is a
    driver and it cannot be learned which GPUs it has.
    """
    if device != "cpu" and (gpus := visible_gpus()):
        # CUDA shows a process one MIG slice, however many there are.
        gpus = gpus[:1] if gpus[0].uuid.startswith("MIG-") else gpus
        memory_bytes, capability = min(gpu.memory_bytes for gpu in gpus), _least_capability(gpus)
        return Cluster("cuda", len(gpus), memory_bytes, gpus[0].name, capability)
    if device == "cuda":
        why = "CUDA_VISIBLE_DEVICES hides them all" if "CUDA_VISIBLE_DEVICES" in os.environ else ""
        why = why or "neither NVML nor nvidia-smi lists one"
        raise EnvironmentProblem("no GPU was found", why=why, fix="use cluster.device=cpu")
    return Cluster("cpu", _usable_cores(), _host_memory())


def _usable_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _host_memory() -> int:
    """Physical memory, or the control group's limit where that is lower."""
    total = int(psutil.virtual_memory().total)
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as file:
                total = min(total, int(file.read()))
        except (OSError, ValueError):
            continue
    return total


def compute_capability() -> tuple[int, int] | None:
    """Of the least able GPU here; None where nobody says."""
    return _least_capability(visible_gpus())


def _least_capability(gpus: Sequence[Gpu]) -> tuple[int, int] | None:
    found = [gpu.capability for gpu in gpus]
    return min(found) if found and (0, 0) not in found else None
