"""What a step pays for the black box: the default model on two ranks, with and without recording.

    python benchmarks/black_box.py [--steps N] [--turn N] [--ranks N] [--batch N] [--out FILE.json]

One process per rank trains the default model. Recording is on and off in turns of `--turn` steps in
the same processes, so that other load falls on both alike; N steps each way. "On" writes positions
and collectives, as `phalanx train` does; "off" has neither box nor kernels at the dispatcher.
Prints the median step of each way, what recording adds (mean of the differences of neighbouring
turns' medians, with its 95 % interval by bootstrap) to the wall and to the processor time of a
step, and seconds of one position and one collective.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import phalanx
from forked_ranks import measure_in_forked_ranks
from phalanx.core.black_box import BlackBox, RankIdentity
from phalanx.core.phases import PhaseTimer
from phalanx.mesh.collective_recorder import record_collectives
from phalanx.mesh.mesh import open_mesh
from phalanx.mesh.shared_memory.opening import current_transport
from phalanx.nn.build import build_model, build_objective
from phalanx.optim.build import build_optimizer
from phalanx.parallel.parallelize import parallelize

NUM_WARM_UP = 20
NUM_RESAMPLES = 2000
PROGRESS_INTERVAL_S = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000, help="with recording, and without")
    parser.add_argument("--turn", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a step")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = measure_in_forked_ranks(args.ranks, lambda rank, folder: _measure(rank, args, folder))
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    for name, value in results.items():
        print(f"{name:<28}{value}")


def _measure(rank: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    job = phalanx.load_job(None, [f"train.global_batch_size={args.batch}"])
    plan = phalanx.make_plan(job, num_ranks=args.ranks, vocab_size=256)
    box = BlackBox(folder / f"box-{rank}", RankIdentity(rank, args.ranks, 0, "cpu"))
    phases = PhaseTimer(box)
    with open_mesh(plan.layout, device="cpu") as mesh:
        model = parallelize(build_model(job, plan.model_shape), plan, mesh, phases=phases, seed=0)
        optimizer = build_optimizer(model, job.optim)
        generator = torch.Generator().manual_seed(rank)
        shape = args.batch // args.ranks, job.data.seq_len + 1
        tokens = torch.randint(256, shape, generator=generator)
        batch = {"inputs": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
        objective = build_objective(job)

        def take_step() -> tuple[float, float]:
            began, cpu_began = time.perf_counter(), time.process_time()
            loss = model.forward_backward([batch], objective)
            model.reduce_and_clip(loss, max_norm=1.0)
            with phases("optimizer"):
                model.update(optimizer)
            optimizer.zero_grad(set_to_none=True)
            phases.step += 1
            phases.take()
            return time.perf_counter() - began, time.process_time() - cpu_began

        turns = _alternate(rank, args, phases, box, take_step)
        with record_collectives(box):
            before = _count_writes(box)
            take_step()
            num_positions, num_collectives = _subtract(_count_writes(box), before)
            dist.barrier()
        costs = _time_single_writes(box)
    return _summarise(turns, args, plan, num_positions, num_collectives, costs)


def _alternate(
    rank: int, args: argparse.Namespace, phases: PhaseTimer, box: BlackBox, take_step: Any
) -> dict[str, list[float]]:
    """Median seconds of a step of each turn, "on" and "off", by the wall and by processor time."""
    for _ in range(NUM_WARM_UP):
        take_step()
    medians: dict[str, list[float]] = {"on": [], "off": [], "cpu on": [], "cpu off": []}
    num_turns = 2 * args.steps // args.turn
    began = said_s = time.monotonic()
    for turn in range(num_turns):
        # on, off, off, on: neither way always follows the other.
        way = "on" if turn % 4 in (0, 3) else "off"
        with contextlib.ExitStack() as stack:
            phases._black_box = None
            if way == "on":
                phases._black_box = box
                stack.enter_context(record_collectives(box))
            # Of all, the first is not counted: kernels have just been registered.
            take_step()
            walls, cpus = zip(*(take_step() for _ in range(args.turn)), strict=True)
            medians[way].append(statistics.median(walls))
            medians[f"cpu {way}"].append(statistics.median(cpus))
        if rank == 0 and time.monotonic() - said_s > PROGRESS_INTERVAL_S:
            said_s = time.monotonic()
            left_s = (time.monotonic() - began) / (turn + 1) * (num_turns - turn - 1)
            print(f"turn {turn + 1} of {num_turns}, {left_s:.0f} s left", flush=True)
    return medians


def _count_writes(box: BlackBox) -> tuple[int, int]:
    return box._num_positions, box._newest_collective


def _subtract(after: tuple[int, int], before: tuple[int, int]) -> tuple[int, int]:
    return after[0] - before[0], after[1] - before[1]


def _time_single_writes(box: BlackBox) -> dict[str, float]:
    """Microseconds of a position, and of an all_reduce of all ranks through shared memory and over
    gloo beyond what it costs without: the smallest mean of 10 loops of 500, so that other load
    counts least. All ranks record, side by side, as in a step."""
    x = torch.ones(1)

    def time_loop(call: Any) -> float:
        means = []
        for _ in range(10):
            dist.barrier()
            began = time.perf_counter()
            for _ in range(500):
                call()
            means.append((time.perf_counter() - began) / 500)
        return min(means) * 1e6

    def time_recording() -> float:
        plain_us = time_loop(lambda: dist.all_reduce(x))
        with record_collectives(box):
            return time_loop(lambda: dist.all_reduce(x)) - plain_us

    shared_us = time_recording()
    transport = current_transport()
    assert transport is not None, "ranks of one machine share memory"
    with transport.paused():
        gloo_us = time_recording()
    return {
        "position_us": round(time_loop(lambda: box.write(1, "forward")), 2),
        "collective_us": round(shared_us, 2),
        "collective_gloo_us": round(gloo_us, 2),
    }


def _compare(on: list[float], off: list[float]) -> dict[str, float]:
    """Percent of the median of `off` that `on` adds in the mean, and its 95 % interval."""
    differences = [one - other for one, other in zip(on, off, strict=True)]
    draw = random.Random(0)
    means = []
    for _ in range(NUM_RESAMPLES):
        means.append(statistics.mean(draw.choices(differences, k=len(differences))))
    means.sort()
    values = {
        "mean": statistics.mean(differences),
        "median": statistics.median(differences),
        "low": means[int(0.025 * NUM_RESAMPLES)],
        "high": means[int(0.975 * NUM_RESAMPLES)],
    }
    scale = 100 / statistics.median(off)
    return {name: round(value * scale, 3) for name, value in values.items()}


def _summarise(
    turns: dict[str, list[float]],
    args: argparse.Namespace,
    plan: Any,
    num_positions: int,
    num_collectives: int,
    costs: dict[str, float],
) -> dict[str, Any]:
    off_s = statistics.median(turns["off"])
    counted_us = num_positions * costs["position_us"] + num_collectives * costs["collective_us"]
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "layout": str(plan.layout),
        "steps each way": len(turns["off"]) * args.turn,
        "step off, ms": round(off_s * 1e3, 3),
        "step on, ms": round(statistics.median(turns["on"]) * 1e3, 3),
        "wall added, %": _compare(turns["on"], turns["off"]),
        "processor time added, %": _compare(turns["cpu on"], turns["cpu off"]),
        "positions a step": num_positions,
        "collectives a step": num_collectives,
        **costs,
        "counted, µs a step": round(counted_us, 1),
        "counted, %": round(counted_us / 1e4 / off_s, 3),
    }


if __name__ == "__main__":
    main()
