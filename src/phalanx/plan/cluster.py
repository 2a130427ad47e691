"""What there is to run on: devices, their memory, and which ranks can be started here. Torch-free."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from phalanx.core.errors import EnvironmentProblem


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind. `memory_bytes` is one device's (CPU: the whole machine's)."""

    device: str  # "cpu" | "cuda"
    num_devices: int  # GPUs, or CPU cores this process may use
    memory_bytes: int
    name: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def memory_per_rank(self, num_ranks: int) -> int:
        """Bytes one of `num_ranks` ranks may use: a whole GPU, or its part of the machine's memory."""
        return self.memory_bytes if self.device == "cuda" else self.memory_bytes // max(1, num_ranks)


def detect_cluster(device: str = "auto") -> Cluster:
    """This machine's GPUs if it has any (and `device` is not "cpu"), else its CPU cores.

    Raises EnvironmentProblem (exit 6) if GPUs are asked for and there are none.
    """
    if device != "cpu" and (gpus := _query_gpus()):
        return Cluster("cuda", len(gpus), min(memory for _, memory in gpus), gpus[0][0])
    if device == "cuda":
        raise EnvironmentProblem("no GPU was found", why="nvidia-smi lists none", fix="use cluster.device=cpu")
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
    """Of the least able GPU here; None where nvidia-smi does not say."""
    found = [line.strip().split(".") for line in _nvidia_smi("compute_cap")]
    return min(((int(major), int(minor)) for major, minor in found), default=None) if _are_numbers(found) else None


def _are_numbers(found: list[list[str]]) -> bool:
    return all(len(parts) == 2 and all(part.isdigit() for part in parts) for parts in found)


def _nvidia_smi(what: str) -> list[str]:
    """A line for each GPU; none where it cannot be asked."""
    query = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


def _query_gpus() -> list[tuple[str, int]]:
    """(name, bytes) of each visible NVIDIA GPU, through nvidia-smi; empty where there is none."""
    if shutil.which("nvidia-smi") is None:
        return []
    gpus = []
    for line in _nvidia_smi("name,memory.total"):
        name, _, mebibytes = line.rpartition(",")
        if mebibytes.strip().isdigit():
            gpus.append((name.strip(), int(mebibytes) * 2**20))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = gpus[: len([part for part in visible.split(",") if part.strip() not in ("", "-1")])]
    return gpus
