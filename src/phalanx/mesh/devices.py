"""This rank's device and threads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from phalanx.core.cores import count_allowed_cores
from phalanx.core.errors import EnvironmentProblem
from phalanx.core.launchers import SUPERVISED_VARIABLE
from phalanx.mesh.malloc import make_malloc_return_freed_memory
from phalanx.plan.host_allocator import MAX_HEAP_BLOCK_BYTES

PIPELINE_CUDA_VARIABLES = {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""Of CUDA, for pipelines, unless the user has set them.

A kernel that is loaded at its first use can wait for the whole device, also for a receive that
waits for its sender; and of more streams than there are connections some share one, where a receive
keeps back the other stream's kernels. The order of messages (`plan.pipeline.messages`) is safe with
either; these keep it from being slow.
"""


# True in a dry run of a plan for GPUs, whose fake tensors say that they are on the CPU: torch
# without CUDA cannot compute gradients of tensors that say otherwise.
_cpu_stands_for_gpu = False


def is_on_cpu(tensor: torch.Tensor) -> bool:
    """True for a tensor that a CPU computes with and that gloo sends."""
    return tensor.device.type == "cpu" and not _cpu_stands_for_gpu


def is_cpu(device: torch.device) -> bool:
    """The same of a device."""
    return device.type == "cpu" and not _cpu_stands_for_gpu


@contextlib.contextmanager
def treating_cpu_as_gpu(is_wanted: bool) -> Iterator[None]:
    """Inside, with `is_wanted`, code that treats CPUs apart takes the way of GPUs."""
    global _cpu_stands_for_gpu
    before, _cpu_stands_for_gpu = _cpu_stands_for_gpu, is_wanted
    try:
        yield
    finally:
        _cpu_stands_for_gpu = before


def set_cuda_variables_for_pipeline() -> None:
    """Set PIPELINE_CUDA_VARIABLES, but for those that the user has set."""
    for name, value in PIPELINE_CUDA_VARIABLES.items():
        os.environ.setdefault(name, value)


def choose_device(kind: str, local_rank: int) -> torch.device:
    """ "auto" is CUDA where there is any.

    Raises EnvironmentProblem if CUDA is asked for and absent.
    """
    if kind == "auto" and torch.cuda.is_available():
        kind = "cuda"
    if kind != "cuda":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise EnvironmentProblem("no CUDA device is available", fix="use cluster.device=cpu")
    count = torch.cuda.device_count()
    if count == 1 and SUPERVISED_VARIABLE not in os.environ:
        # A launcher that shows each of its ranks the one GPU it may use.
        return torch.device("cuda", 0)
    if local_rank >= count:
        raise EnvironmentProblem(
            f"local rank {local_rank} has no GPU", why=f"this machine has {count}"
        )
    return torch.device("cuda", local_rank)


def read_gpu_uuid(device: torch.device) -> str:
    """The UUID of a GPU: what its number stands for, which each rank may count from another
    list."""
    return str(torch.cuda.get_device_properties(device).uuid)


def set_threads_and_device(device: torch.device, world_size: int, *, heap_bytes: int) -> None:
    """Set this process's threads, and make `device` current or, on the CPU, malloc return freed
    blocks larger than `heap_bytes`."""
    # Ranks with a GPU compute on the CPU, too: an offloaded optimizer, initial weights, norms. The
    # server that forks them has one thread, and what OMP_NUM_THREADS says afterwards torch no
    # longer reads by itself.
    torch.set_num_threads(
        choose_threads_per_rank(int(os.environ.get("LOCAL_WORLD_SIZE") or world_size))
    )
    if device.type != "cpu":
        torch.cuda.set_device(device)
    # Larger ones go back anyway.
    elif heap_bytes < MAX_HEAP_BLOCK_BYTES:
        make_malloc_return_freed_memory(heap_bytes)


def choose_threads_per_rank(local_world_size: int) -> int:
    """OMP_NUM_THREADS, or this rank's part of the cores."""
    # OpenMP takes a list, a number for each level of nested parallel regions: the first is torch's.
    requested = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if requested.isdigit() and int(requested) > 0:
        return int(requested)
    return max(1, count_allowed_cores() // max(1, local_world_size))
