"""What a step pays for resilience.check_collectives: the default model on two ranks.

    python benchmarks/collective_checks.py [--layouts ddp,zero3,tp] [--steps N] [--turn N]

One process per rank trains the default model; "off", "sampled" and "all" take turns of `--turn`
steps in the same processes, so that other load falls on all alike; N steps each way. Prints, for
each layout, the median step without checks, and what the others add to it, of the wall and of the
processor time of rank 0: the median of the differences of neighbouring turns' medians, with its
95 % interval by bootstrap.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import phalanx
from forked_ranks import measure_in_forked_ranks
from phalanx.core.black_box import BlackBox, PostedCollective, RankIdentity
from phalanx.core.call_site import CallSite
from phalanx.core.phases import PhaseTimer
from phalanx.mesh.collective_checks import SAMPLING_INTERVAL, CollectiveChecks, checking_collectives
from phalanx.mesh.collective_recorder import CollectiveRecorder, record_collectives
from phalanx.mesh.mesh import open_mesh
from phalanx.nn.build import build_model, build_objective
from phalanx.optim.build import build_optimizer
from phalanx.parallel.parallelize import parallelize

NUM_RANKS = 2
NUM_WARM_UP = 10
NUM_RESAMPLES = 2000
LAYOUTS = {
    "ddp": ["parallel.dp_replicate=2"],
    "zero3": ["parallel.zero_stage=3"],
    "tp": ["parallel.tp=2"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--steps", type=int, default=400, help="each way")
    parser.add_argument("--turn", type=int, default=10)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a step")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = []
    for layout in args.layouts.split(","):
        results.append({"layout": layout} | _measure_layout(layout, args))
        print(json.dumps(results[-1]), flush=True)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


def _measure_layout(layout: str, args: argparse.Namespace) -> dict[str, Any]:
    return measure_in_forked_ranks(
        NUM_RANKS, lambda rank, folder: _measure(rank, layout, args, folder)
    )


def _measure(rank: int, layout: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    job = phalanx.load_job(None, [f"train.global_batch_size={args.batch}", *LAYOUTS[layout]])
    plan = phalanx.make_plan(job, num_ranks=NUM_RANKS, vocab_size=256)
    box = BlackBox(folder / f"box-{rank}", RankIdentity(rank, NUM_RANKS, 0, "cpu"))
    phases = PhaseTimer(box)
    with (
        open_mesh(plan.layout, device="cpu") as mesh,
        checking_collectives(
            "all", wait_s=60.0, report_error=print, board_path=folder / f"calls-{rank}"
        ) as checks,
        record_collectives(box, checks) as recorder,
    ):
        model = parallelize(build_model(job, plan.model_shape), plan, mesh, phases=phases, seed=0)
        optimizer = build_optimizer(model, job.optim)
        generator = torch.Generator().manual_seed(0)
        shape = args.batch // plan.layout.data_parallel_size, job.data.seq_len + 1
        tokens = torch.randint(256, shape, generator=generator)
        batch = {"inputs": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
        objective = build_objective(job)

        def take_step() -> tuple[float, float]:
            began, cpu_began = time.perf_counter(), time.process_time()
            loss = model.forward_backward([batch], objective)
            model.reduce_and_clip(loss, max_norm=1.0)
            model.update(optimizer)
            optimizer.zero_grad(set_to_none=True)
            phases.step += 1
            phases.take()
            return time.perf_counter() - began, time.process_time() - cpu_began

        assert checks is not None
        before = box._newest_collective
        take_step()
        num_collectives = box._newest_collective - before
        medians = _alternate(args, recorder, checks, take_step)
        num_compared = checks.num_compared
        call_us = _time_single_calls(checks) if rank == 0 else {}
        dist.barrier()
    return {
        "date": datetime.date.today().isoformat(),
        "load": round(os.getloadavg()[0], 1),
        "cores": os.cpu_count(),
        "steps each way": args.steps,
        "collectives a step": num_collectives,
        "compared": num_compared,
        **call_us,
        "step off, ms": round(statistics.median(medians["off"]) * 1e3, 2),
        "sampled adds, % of wall": _compare(medians["sampled"], medians["off"]),
        "all adds, % of wall": _compare(medians["all"], medians["off"]),
        "sampled adds, % of processor time": _compare(medians["cpu sampled"], medians["cpu off"]),
        "all adds, % of processor time": _compare(medians["cpu all"], medians["cpu off"]),
    }


def _alternate(
    args: argparse.Namespace, recorder: CollectiveRecorder, checks: CollectiveChecks, take_step: Any
) -> dict[str, list[float]]:
    """Median seconds of a step of each turn, by way; of the processor by "cpu" and way."""
    for _ in range(NUM_WARM_UP):
        take_step()
    ways = ("off", "sampled", "all")
    medians: dict[str, list[float]] = {way: [] for way in (*ways, *(f"cpu {way}" for way in ways))}
    # Each of the orders in turn: no way always follows the same other one.
    orders = itertools.cycle(itertools.permutations(ways))
    for _ in range(args.steps // args.turn):
        for way in next(orders):
            recorder._checks = None if way == "off" else checks
            checks._every = 1 if way == "all" else SAMPLING_INTERVAL
            walls, cpus = zip(*(take_step() for _ in range(args.turn)), strict=True)
            medians[way].append(statistics.median(walls))
            medians[f"cpu {way}"].append(statistics.median(cpus))
    return medians


def _time_single_calls(checks: CollectiveChecks) -> dict[str, float]:
    """Microseconds of one call's comparison alone: the smallest mean of 40 loops of 200, so that
    other load counts least."""
    board, numbers = checks._board, itertools.count(1)

    def time_loop(key: str) -> float:
        means = []
        for _ in range(40):
            began = time.perf_counter()
            for _ in range(200):
                number = next(numbers)
                call = PostedCollective(
                    *("all_reduce", 0, number, "float32", (4, 5), 1, 80, -1, -1),
                    *(CallSite("model.py", 5), 0, True),
                )
                checks.compare(number, call, key, key, range(NUM_RANKS), "sum", 1)
            means.append((time.perf_counter() - began) / 200)
        return round(min(means) * 1e6, 2)

    checks._every = SAMPLING_INTERVAL
    sampled_us = time_loop("sampled")
    checks._every = 1
    all_us = time_loop("all")
    checks._board = None
    store_us = time_loop("by the store")
    checks._board = board
    return {"sampled, µs a call": sampled_us, "all, µs": all_us, "by the store, µs": store_us}


def _compare(on: list[float], off: list[float]) -> dict[str, float]:
    """Percent of the median of `off` that `on` adds, and its 95 % interval."""
    differences = [one - other for one, other in zip(on, off, strict=True)]
    draw = random.Random(0)
    medians = sorted(
        statistics.median(draw.choices(differences, k=len(differences)))
        for _ in range(NUM_RESAMPLES)
    )
    scale = 100 / statistics.median(off)
    return {
        "median": round(statistics.median(differences) * scale, 2),
        "low": round(medians[int(0.025 * NUM_RESAMPLES)] * scale, 2),
        "high": round(medians[int(0.975 * NUM_RESAMPLES)] * scale, 2),
    }


if __name__ == "__main__":
    main()
