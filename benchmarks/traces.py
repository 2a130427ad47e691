"""What traces cost: a step while nothing is traced, and a step that is.

    python benchmarks/traces.py [--steps N] [--turn N] [--out FILE]

Two ranks train the default model over gloo in one process each. Steps with a recorder attached and
without take turns, so that both see the same machine; the mean difference of the turns' medians is
given with a 95 % interval (bootstrap). What a step pays without a trace, and a phase and a
collective with one, is timed by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import phalanx
from forked_ranks import measure_in_forked_ranks
from phalanx.core.black_box import BlackBox, RankIdentity
from phalanx.core.phases import PhaseTimer
from phalanx.core.process_memory import ResidentBytesReader
from phalanx.mesh.collective_recorder import record_collectives
from phalanx.mesh.mesh import open_mesh
from phalanx.nn.build import build_model, build_objective
from phalanx.observe.bus import Bus
from phalanx.observe.trace_recorder import TraceRecorder
from phalanx.optim.build import build_optimizer
from phalanx.parallel.parallelize import parallelize
from phalanx.train.step_tracer import StepTracer

NUM_WARM_UP = 20
NUM_RESAMPLES = 2000
NUM_RANKS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000, help="traced, and without")
    parser.add_argument("--turn", type=int, default=10)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = measure_in_forked_ranks(NUM_RANKS, lambda rank, folder: _measure(rank, args, folder))
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    for name, value in results.items():
        print(f"{name:<28}{value}")


def _measure(rank: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    job = phalanx.load_job(None, ["train.global_batch_size=2"])
    plan = phalanx.make_plan(job, num_ranks=NUM_RANKS, vocab_size=256)
    box = BlackBox(folder / f"box-{rank}", RankIdentity(rank, NUM_RANKS, 0, "cpu"))
    phases, memory = PhaseTimer(box), ResidentBytesReader()
    with open_mesh(plan.layout, device="cpu") as mesh, record_collectives(box):
        model = parallelize(build_model(job, plan.model_shape), plan, mesh, phases=phases, seed=0)
        optimizer = build_optimizer(model, job.optim)
        tokens = torch.randint(256, (1, job.data.seq_len + 1))
        batch = {"inputs": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
        objective = build_objective(job)

        def take_step() -> float:
            began = time.perf_counter()
            loss = model.forward_backward([batch], objective)
            model.reduce_and_clip(loss, max_norm=1.0)
            with phases("optimizer"):
                model.update(optimizer)
            optimizer.zero_grad(set_to_none=True)
            phases.step += 1
            phases.take()
            return time.perf_counter() - began

        turns, num_rows = _alternate(args, phases, box, memory, take_step)
        tracer = StepTracer(job, model, Bus(rank=rank), folder, lambda seconds: None)
        off_us = _time_untraced_step(tracer)
        recorder = TraceRecorder(phases, box, lambda: (memory.read_resident_bytes(), -1))
        costs = _time_single_rows(phases, recorder, dist.new_group([0]), rank)
        dist.barrier()
    off_s = statistics.median(turns["off"])
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "steps each way": len(turns["off"]) * args.turn,
        "step untraced, ms": round(off_s * 1e3, 3),
        "step traced, ms": round(statistics.median(turns["on"]) * 1e3, 3),
        "traced adds, %": _compare(turns["on"], turns["off"]),
        "rows a step": round(num_rows, 1),
        "untraced pays, us a step": off_us,
        "untraced pays, %": round(off_us / 1e4 / off_s, 5),
        **costs,
    }


def _alternate(
    args: argparse.Namespace,
    phases: PhaseTimer,
    box: BlackBox,
    memory: ResidentBytesReader,
    take_step: Any,
) -> tuple[dict[str, list[float]], float]:
    """Median seconds of a step of each turn, and the rows that a traced step leaves."""
    for _ in range(NUM_WARM_UP):
        take_step()
    medians: dict[str, list[float]] = {"on": [], "off": []}
    num_rows = num_traced = 0
    for turn in range(2 * args.steps // args.turn):
        # on, off, off, on: neither way always follows the other.
        way = "on" if turn % 4 in (0, 3) else "off"
        recorder = TraceRecorder(phases, box, lambda: (memory.read_resident_bytes(), -1))
        if way == "on":
            recorder.attach()
        medians[way].append(statistics.median(take_step() for _ in range(args.turn)))
        if way == "on":
            recorder.detach()
            num_rows += sum(map(len, recorder.take_rows(is_last=True)))
            num_traced += args.turn
    return medians, num_rows / num_traced


def _time_untraced_step(tracer: StepTracer) -> float:
    """Microseconds of what a step calls where nothing is traced: the smallest mean of ten loops."""

    def take_untraced_step() -> None:
        tracer.begin_step(1)
        tracer.accept_request(tracer.look_for_request(), 1)
        tracer.end_step(1)

    return round(_time_loop(take_untraced_step), 3)


def _time_loop(call: Callable[[], object]) -> float:
    """Microseconds of `call`: the smallest mean of ten loops, so that other load counts least."""
    means = []
    for _ in range(10):
        began = time.perf_counter()
        for _ in range(500):
            call()
        means.append((time.perf_counter() - began) / 500)
    return min(means) * 1e6


def _time_single_rows(
    phases: PhaseTimer, recorder: TraceRecorder, group: Any, rank: int
) -> dict[str, float]:
    """Microseconds that a phase, and a collective of one rank, take longer while they are
    recorded."""
    if rank:
        return {}
    x = torch.ones(1)

    def pass_phase() -> None:
        with phases("optimizer"):
            pass

    def reduce() -> None:
        dist.all_reduce(x, group=group)

    plain_us = [_time_loop(pass_phase), _time_loop(reduce)]
    recorder.attach()
    traced_us = [_time_loop(pass_phase), _time_loop(reduce)]
    recorder.detach()
    return {
        "a phase pays, us": round(traced_us[0] - plain_us[0], 2),
        "a collective pays, us": round(traced_us[1] - plain_us[1], 2),
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
        "low": means[int(0.025 * NUM_RESAMPLES)],
        "high": means[int(0.975 * NUM_RESAMPLES)],
    }
    scale = 100 / statistics.median(off)
    return {name: round(value * scale, 2) for name, value in values.items()}


if __name__ == "__main__":
    main()
