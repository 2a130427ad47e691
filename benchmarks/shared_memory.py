"""Collectives through shared memory beside gloo's.

    python benchmarks/shared_memory.py [--ranks N] [--out FILE]

Each primitive at several sizes, of fp32 and bf16; turns of gloo and of shared memory take turns in
the same ranks, with a copy of as many bytes by one rank's `Tensor.copy_` beside them. Printed are
medians. Other load falls on all alike; it is printed. Whole steps: `phalanx bench train --layouts
ddp,ddp/gloo`.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from forked_ranks import measure_in_forked_ranks
from phalanx.mesh.mesh import open_mesh
from phalanx.mesh.shared_memory.opening import current_transport
from phalanx.parallel.data_parallel.own_rows import OwnRowsReduction
from phalanx.parallel.traffic import GradientTraffic
from phalanx.plan.layout import Layout

CALL_BYTES = (1 << 10, 64 << 10, 1 << 20, 25 << 20)
CALL_TYPES = (torch.float32, torch.bfloat16)
SECONDS_OF_TURN = 0.15
NUM_TURNS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    measured = measure_in_forked_ranks(
        options.ranks, lambda rank, folder: {"rows": _measure(rank, options)}
    )
    if options.out:
        lines = [json.dumps(row) for row in measured["rows"]]
        options.out.write_text("\n".join(lines) + "\n")


def _measure(rank: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    rows = []
    for row in _measure_calls(options):
        row |= {"date": datetime.date.today().isoformat(), "load": round(os.getloadavg()[0], 1)}
        rows.append(row)
        if rank == 0:
            print(json.dumps(row), flush=True)
    return rows


def _measure_calls(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with open_mesh(Layout(dp_replicate=options.ranks), device="cpu", collectives="shared"):
        transport = current_transport()
        assert transport is not None
        for dtype, num_bytes in itertools.product(CALL_TYPES, CALL_BYTES):
            for name, call in _list_calls(num_bytes, dtype, options.ranks).items():
                seconds: dict[str, list[float]] = {"gloo": [], "shared": []}
                for _ in range(NUM_TURNS):
                    for way, using in (("gloo", transport.paused), ("shared", nullcontext)):
                        with using():
                            seconds[way].append(_time_turn(call))
                medians = {way: statistics.median(each) for way, each in seconds.items()}
                yield {
                    "call": name,
                    "type": str(dtype).removeprefix("torch."),
                    "bytes": num_bytes,
                    "ranks": options.ranks,
                    "gloo, us": round(medians["gloo"] * 1e6, 1),
                    "shared, us": round(medians["shared"] * 1e6, 1),
                    "times as fast": round(medians["gloo"] / medians["shared"], 2),
                    "copy, us": round(_time_copy(num_bytes) * 1e6, 1),
                }


def _list_calls(
    num_bytes: int, dtype: torch.dtype, num_ranks: int
) -> dict[str, Callable[[], object]]:
    """Calls of `num_bytes`: of the whole message, as the result of a gather, the input of a
    scatter."""
    size = num_bytes // dtype.itemsize // num_ranks * num_ranks
    whole, part = torch.zeros(size, dtype=dtype), torch.zeros(size // num_ranks, dtype=dtype)
    other = torch.zeros_like(whole)
    lying_there = torch.zeros_like(whole)
    transport = current_transport()
    assert transport is not None
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }
    if num_bytes >= 64 << 10 and transport.publish(lying_there):
        calls["all_reduce in place"] = lambda: dist.all_reduce(lying_there)
        # What ZeRO-1 makes of a bucket of 16 matrices.
        matrices = [nn.Parameter(part) for part in lying_there.view(16, num_ranks, -1)]
        gradients, group = [matrix.data for matrix in matrices], dist.group.WORLD
        assert group is not None
        own_rows = OwnRowsReduction(group, GradientTraffic())
        calls["own rows in place"] = lambda: own_rows.post(matrices, gradients, lying_there)()
    return calls


def _time_turn(call: Callable[[], object]) -> float:
    """Seconds of a call, as a mean over a turn that is equally long on all ranks."""
    call()
    began = time.perf_counter()
    call()
    repeats = torch.tensor([SECONDS_OF_TURN / max(1e-6, time.perf_counter() - began)])
    dist.all_reduce(repeats, op=dist.ReduceOp.MIN)
    count = max(3, min(500, int(repeats.item())))
    dist.barrier()
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count


def _time_copy(num_bytes: int) -> float:
    source, target = (
        torch.zeros(num_bytes, dtype=torch.uint8),
        torch.empty(num_bytes, dtype=torch.uint8),
    )
    seconds = []
    for _ in range(20):
        began = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
