"""What gloo holds beside the tensors of a collective: `python benchmarks/gloo_memory.py`.

Two ranks on this machine reduce, gather and scatter `--mib` MiB of fp32. Printed is the most memory
of rank 0 during a collective (the kernel's VmHWM, set back before it) above what it had with the
collective's own tensors, in multiples of the whole tensor: of what is gathered, or of what is
reduced. FSDP gathers and scatters units this way, and no tracker of tensors sees it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

MIB = 2**20
NUM_RANKS = 2


def read_status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def measure_extra_bytes(call: Callable[[], object]) -> int:
    """Bytes that the process has at most during `call` above what it has before."""
    call()  # connections and libraries are there after the first
    dist.barrier()
    before = read_status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    call()
    return read_status_bytes("VmHWM") - before


def run_rank(rank: int, store: str, mib: int) -> None:
    torch.set_num_threads(1)
    # torch 2.13 has other names for these, which 2.11 has not.
    warnings.simplefilter("ignore", FutureWarning)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    whole = torch.ones(mib * MIB // 4)
    part = torch.ones(whole.numel() // NUM_RANKS)
    calls = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(part, whole),
    }
    for name, call in calls.items():
        extra = measure_extra_bytes(call)
        if rank == 0:
            print(f"{name:<24}{extra / MIB:8.1f} MiB  {extra / (mib * MIB):.2f} of the whole")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64)
    arguments = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    print(f"torch {torch.__version__}, {NUM_RANKS} ranks, {arguments.mib} MiB")
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        multiprocessing.spawn(run_rank, (store, arguments.mib), nprocs=NUM_RANKS)


if __name__ == "__main__":
    main()
