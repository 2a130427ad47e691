"""Gloo groups of a process that share one device: what they cost, and that forks have their own."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from phalanx.mesh.gloo_devices import share_gloo_devices_between_groups
from ranks import run_ranks

NUM_GROUPS = 8


def count_threads_of_groups(rank: int) -> dict[str, Any]:
    share_gloo_devices_between_groups()
    groups = [dist.new_group()]  # which makes the device
    before = psutil.Process().num_threads()
    groups += [dist.new_group() for _ in range(NUM_GROUPS)]
    num_threads = psutil.Process().num_threads() - before
    # All under way at once, in reverse order on the other rank: none waits for another's message.
    tensors = [torch.full((70_000,), float(rank + number)) for number in range(len(groups))]
    numbers = range(len(groups)) if rank == 0 else reversed(range(len(groups)))
    works = [
        dist.all_reduce(tensors[number], group=groups[number], async_op=True) for number in numbers
    ]
    for work in works:
        work.wait()
    sums = [tensor.unique().tolist() for tensor in tensors]
    return {"threads": num_threads, "sums": sums}


def test_groups_share_the_thread_of_one_device_and_work_at_once() -> None:
    """A group has two threads that run its collectives; torch would give each a third, of its own
    device."""
    for found in run_ranks(2, count_threads_of_groups):
        assert found["threads"] == 2 * NUM_GROUPS
        assert found["sums"] == [[2.0 * number + 1] for number in range(NUM_GROUPS + 1)]


def reduce_in_fork(rank: int, store: Path) -> list[float]:
    """The sum over the ranks' forks, which were made while the parent had groups."""
    share_gloo_devices_between_groups()
    dist.all_reduce(torch.ones(1), group=dist.new_group())
    to_read, to_write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            group = dist.ProcessGroupGloo(
                dist.FileStore(str(store), 2), rank, 2, dist.default_pg_timeout
            )
            value = torch.tensor([rank + 1.0])
            group.allreduce(value).wait()
            os.write(to_write, pickle.dumps(value.tolist()))
        finally:
            # A fork of a process with threads ends without clean-up.
            os._exit(0)
    os.close(to_write)
    with os.fdopen(to_read, "rb") as pipe:
        found = pickle.load(pipe)
    os.waitpid(pid, 0)
    return found


def test_forks_of_ranks_have_their_own_device(tmp_path: Path) -> None:
    assert run_ranks(2, reduce_in_fork, tmp_path / "store") == [[3.0], [3.0]]
