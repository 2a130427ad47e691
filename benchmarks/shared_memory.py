"""Collectives through shared memory beside gloo's, and the training steps that use them.

    python benchmarks/shared_memory.py [calls|steps] [--ranks N] [--out FILE]

"calls": each primitive at several sizes, of fp32 and bf16; turns of gloo and of shared memory take
turns in the same ranks, with a copy of as many bytes by one rank's `Tensor.copy_` beside them.
"steps": two models of the table in docs/benchmarks.md under each layout: the step of ranks that
never talk, over gloo and through shared memory, in the same processes in turn. Printed are medians
and the shares of the speed without talking. Other load falls on all alike; it is printed.
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

import phalanx
from forked_ranks import measure_in_forked_ranks
from phalanx.mesh.mesh import Mesh, open_mesh
from phalanx.mesh.shared_memory.opening import current_transport
from phalanx.nn.build import build_model, build_objective
from phalanx.optim.build import build_optimizer
from phalanx.parallel.parallelize import parallelize
from phalanx.plan.layout import Layout

CALL_BYTES = (1 << 10, 64 << 10, 1 << 20, 25 << 20)
CALL_TYPES = (torch.float32, torch.bfloat16)
SECONDS_OF_TURN = 0.15
NUM_TURNS = 8

MODELS = {
    "256 x 6, vocab 4,096": (256, 6, 4, 4096, 256),
    "512 x 8, vocab 32,000": (512, 8, 8, 32_000, 256),
}
LAYOUTS = {
    "ddp": ["parallel.dp_replicate={n}"],
    "zero1": ["parallel.zero_stage=1"],
    "zero2": ["parallel.zero_stage=2"],
    "zero3": ["parallel.zero_stage=3"],
    "tp": ["parallel.tp={n}"],
    "cp": ["parallel.cp={n}"],
}
STEPS_OF_TURN = 2
NUM_STEP_TURNS = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", nargs="?", choices=("calls", "steps"), default="calls")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--models", type=int, default=len(MODELS), help="the first so many")
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
    measure = {"calls": _measure_calls, "steps": _measure_steps}[options.what]
    rows = []
    for row in measure(options):
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


def _measure_steps(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for model, layout in itertools.product(
        list(MODELS)[: options.models], options.layouts.split(",")
    ):
        overrides = [each.format(n=options.ranks) for each in LAYOUTS[layout]]
        dim, num_layers, num_heads, vocab, seq_len = MODELS[model]
        settings = [
            *(f"model.dim={dim}", f"model.num_layers={num_layers}"),
            *(f"model.num_heads={num_heads}", f"data.seq_len={seq_len}"),
            f"train.global_batch_size={2 * options.ranks}",
            *overrides,
        ]
        job = phalanx.load_job(None, settings)
        plan = phalanx.make_plan(job, num_ranks=options.ranks, vocab_size=vocab)
        with open_mesh(plan.layout, device="cpu", collectives="shared") as mesh:
            transport = current_transport()
            assert transport is not None
            steps = {"shared": _build_step(job, plan, mesh)}
            with transport.paused():
                steps["gloo"] = _build_step(job, plan, mesh)
            alone = phalanx.load_job(None, [*settings[:4], "train.global_batch_size=2"])
            single = phalanx.make_plan(alone, num_ranks=1, vocab_size=vocab)
            steps["never talk"] = _build_step(alone, single, Mesh(single.layout, 0, 0, mesh.device))
            seconds: dict[str, list[float]] = {way: [] for way in steps}
            for _ in range(NUM_STEP_TURNS):
                for way, take_step in steps.items():
                    with transport.paused() if way == "gloo" else nullcontext():
                        dist.barrier()
                        began = time.perf_counter()
                        for _ in range(STEPS_OF_TURN):
                            take_step()
                        seconds[way].append((time.perf_counter() - began) / STEPS_OF_TURN)
        # The first turn warms up.
        medians = {way: statistics.median(each[1:]) for way, each in seconds.items()}
        # Ranks that never talk do two sequences each; together the others do as many.
        yield {
            "model": model,
            "layout": layout,
            "ranks": options.ranks,
            **{f"{way}, ms": round(each * 1e3, 1) for way, each in medians.items()},
            "gloo, share": round(medians["never talk"] / medians["gloo"], 3),
            "shared, share": round(medians["never talk"] / medians["shared"], 3),
            "staged, MiB": round(transport.staged_bytes / 2**20, 1),
        }


def _build_step(job: Any, plan: Any, mesh: Mesh) -> Callable[[], None]:
    model = parallelize(build_model(job, plan.model_shape), plan, mesh, seed=0)
    optimizer = build_optimizer(model, job.optim)
    objective = build_objective(job)
    generator = torch.Generator().manual_seed(mesh.data_parallel_rank)
    rows = plan.global_batch_size // plan.layout.data_parallel_size
    tokens = torch.randint(plan.vocab_size, (rows, job.data.seq_len + 1), generator=generator)
    batch = {"inputs": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}

    def take_step() -> None:
        loss = model.forward_backward([batch], objective)
        model.reduce_and_clip(loss, max_norm=1.0)
        model.update(optimizer)
        optimizer.zero_grad(set_to_none=True)

    return take_step


if __name__ == "__main__":
    main()
