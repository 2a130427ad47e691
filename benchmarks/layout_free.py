"""What a step pays for train.deterministic = "layout-free": the default model on two ranks.

    python benchmarks/layout_free.py [--micro 2,8] [--steps N] [--turn N] [--out FILE.json]

One process per rank holds the model twice, with DDP and with the tree, which take turns of `--turn`
steps, so that other load falls on both alike; N steps each way, of one thread. Prints the median
step of each, and the median of the ratios of neighbouring turns with its 95 % interval by
bootstrap.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import phalanx
from forked_ranks import measure_in_forked_ranks
from phalanx.mesh.mesh import open_mesh
from phalanx.nn.build import build_model, build_objective
from phalanx.optim.build import build_optimizer
from phalanx.parallel.parallelize import parallelize

OPEN_MESHES = ExitStack()
NUM_RANKS = 2
BATCH = 16
NUM_WARM_UP = 4
NUM_RESAMPLES = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--micro", default="2,8", help="sequences of a microbatch")
    parser.add_argument("--steps", type=int, default=100, help="each way")
    parser.add_argument("--turn", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = []
    for micro in map(int, args.micro.split(",")):
        results.append(_measure_microbatch(micro, args))
        print(json.dumps(results[-1]), flush=True)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


def _measure_microbatch(micro: int, args: argparse.Namespace) -> dict[str, Any]:
    return measure_in_forked_ranks(NUM_RANKS, lambda rank, folder: _measure(rank, micro, args))


def _measure(rank: int, micro: int, args: argparse.Namespace) -> dict[str, Any]:
    take_step = {way: _build_step(rank, micro, way) for way in ("true", "layout-free")}
    medians: dict[str, list[float]] = {way: [] for way in take_step}
    for turn in range(args.steps // args.turn + 1):
        # Neither way always follows the other.
        for way in sorted(take_step, reverse=turn % 2 == 0):
            for _ in range(NUM_WARM_UP if turn == 0 else 1):
                take_step[way]()
            seconds = [take_step[way]() for _ in range(args.turn)]
            if turn:
                medians[way].append(statistics.median(seconds))
    ratios = [
        tree / usual for tree, usual in zip(medians["layout-free"], medians["true"], strict=True)
    ]
    draw = random.Random(0)
    resampled = sorted(
        statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(NUM_RESAMPLES)
    )
    return {
        "date": datetime.date.today().isoformat(),
        "load": round(os.getloadavg()[0], 1),
        "cores": os.cpu_count(),
        "microbatches of a rank": BATCH // NUM_RANKS // micro,
        "steps each way": len(ratios) * args.turn,
        "step with DDP, ms": round(statistics.median(medians["true"]) * 1e3, 1),
        "step layout-free, ms": round(statistics.median(medians["layout-free"]) * 1e3, 1),
        "ratio": round(statistics.median(ratios), 3),
        "low": round(resampled[int(0.025 * NUM_RESAMPLES)], 3),
        "high": round(resampled[int(0.975 * NUM_RESAMPLES)], 3),
    }


def _build_step(rank: int, micro: int, way: str) -> Callable[[], float]:
    """A function that takes one step and returns its seconds."""
    job = phalanx.load_job(
        None,
        [
            f"train.deterministic={way}",
            f"train.global_batch_size={BATCH}",
            f"train.micro_batch_size={micro}",
            f"parallel.dp_replicate={NUM_RANKS}",
        ],
    )
    plan = phalanx.make_plan(job, num_ranks=NUM_RANKS, vocab_size=256)
    # The group stays open: it was before.
    # Open until the process ends: what closes it must not be collected before.
    mesh = OPEN_MESHES.enter_context(open_mesh(plan.layout, device="cpu"))
    torch.set_num_threads(1)
    model = parallelize(build_model(job, plan.model_shape), plan, mesh, seed=0)
    optimizer = build_optimizer(model, job.optim)
    objective = build_objective(job)
    generator = torch.Generator().manual_seed(rank)
    batches = []
    for _ in range(plan.num_microbatches):
        tokens = torch.randint(256, (micro, job.data.seq_len + 1), generator=generator)
        batches.append(
            {"inputs": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
        )

    def take_step() -> float:
        began = time.perf_counter()
        model.reduce_and_clip(model.forward_backward(batches, objective), max_norm=1.0)
        model.update(optimizer)
        optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - began

    return take_step


if __name__ == "__main__":
    main()
