"""What a step pays for the checks of invariants (observe.invariants_every): one process trains a
small decoder, and turns them on and off every 50 steps.

    python benchmarks/invariants.py [--steps N] [--dim N] [--layers N] [--experts N] [--json]

Each block of 50 steps with checks has one of the weights: twice as many as by default. Its seconds,
and its seconds of computation (which other programs on the machine change less), are divided by
those of the block before, which has none. Prints the median of these ratios with the bounds that
hold it with 95 % (order statistics), in per cent of a step, and what the calls themselves took.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx.job.schema import Job
from phalanx.mesh.mesh import open_mesh
from phalanx.nn.build import build_model, build_objective
from phalanx.observe.bus import Bus
from phalanx.optim.build import build_optimizer
from phalanx.parallel.parallelize import parallelize
from phalanx.plan.cluster import Cluster
from phalanx.plan.planner import make_plan
from phalanx.train.invariants import RunInvariants
from phalanx.train.state import TrainState
from phalanx.train.trainer import Trainer
from phalanx.train.training_data import TrainingData

BLOCK = 50
VOCAB = 257
CALLS = ("count", "take_counts", "begin_update", "finish_step")


class RandomBatches:
    """The same random tokens in each step: what is measured is not the data."""

    def __init__(self, sequences: int, per_microbatch: int, seq_len: int) -> None:
        tokens = torch.randint(VOCAB, (sequences, seq_len + 1))
        positions = torch.arange(seq_len).repeat(per_microbatch, 1)
        self._microbatches = [
            {
                "inputs": part[:, :-1].contiguous(),
                "targets": part[:, 1:].contiguous(),
                "positions": positions,
            }
            for part in tokens.split(per_microbatch)
        ]

    def step_microbatches(self, step: int) -> Sequence[dict[str, torch.Tensor]]:
        return self._microbatches


class TimedCalls:
    """Seconds of the calls of RunInvariants."""

    def __init__(self, invariants: RunInvariants) -> None:
        self.seconds = 0.0
        for name in CALLS:
            setattr(invariants, name, self._timed(getattr(invariants, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.process_time()
            try:
                return call(*args)
            finally:
                self.seconds += time.process_time() - began

        return timed


def build_trainer(args: argparse.Namespace) -> Trainer:
    model: dict[str, Any] = {"dim": args.dim, "num_layers": args.layers, "num_heads": 4}
    if args.experts:
        model |= {"num_experts": args.experts, "experts_per_token": 2, "expert_ffn_dim": args.dim}
    job = Job.model_validate(
        {
            "model": model,
            "data": {"seq_len": args.seq_len},
            "train": {
                "global_batch_size": args.batch,
                "micro_batch_size": args.batch // args.microbatches,
                "steps": 10**6,
            },
            "observe": {"invariants_every": BLOCK},
            "parallel": {"ranks": 1},
        }
    )
    plan = make_plan(job, cluster=Cluster("cpu", 2, 2**33), vocab_size=VOCAB)
    with open_mesh(plan.layout, device="cpu") as mesh:
        wrapped = parallelize(build_model(job, plan.model_shape), plan, mesh, seed=1)
        state = TrainState(wrapped, build_optimizer(wrapped, job.optim), seed=1)
        batches = RandomBatches(args.batch, args.batch // args.microbatches, args.seq_len)
        return Trainer(job, plan, state, Bus(rank=0), TrainingData(batches, build_objective(job)))


def measure(trainer: Trainer, num_pairs: int) -> tuple[list[float], list[float], dict[str, float]]:
    """Ratios of each block with checks to the one before: (seconds, seconds of computation, means
    of a step)."""
    off = trainer._invariants
    on = RunInvariants(trainer.job, trainer.state, trainer.bus, trainer.data.objective)
    on.start()
    calls = TimedCalls(on)
    wall_ratios, cpu_ratios, step_s, call_s = [], [], [], []
    for _ in range(2 * BLOCK):
        trainer.step()
    for _ in range(num_pairs):
        # The block that ends at a multiple of BLOCK has its check; half of the pairs would favour
        # the second block of each, if later steps became slower.
        wall_off, cpu_off = _time_block(trainer, off)
        before = calls.seconds
        wall_on, cpu_on = _time_block(trainer, on)
        call_s.append((calls.seconds - before) / BLOCK)
        step_s.append(cpu_off / BLOCK)
        wall_ratios.append(wall_on / wall_off)
        cpu_ratios.append(cpu_on / cpu_off)
    means = {"step_s": statistics.median(step_s), "calls_s": statistics.mean(call_s)}
    return wall_ratios, cpu_ratios, means


def _time_block(trainer: Trainer, invariants: RunInvariants) -> tuple[float, float]:
    trainer._invariants = invariants
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(BLOCK):
        trainer.step()
    return time.perf_counter() - wall, time.process_time() - cpu


def median_with_bounds(values: list[float]) -> tuple[float, float, float]:
    """(median, lower, upper): bounds that hold the median with 95 %, by order statistics."""
    ordered = sorted(values)
    margin = 0.98 * math.sqrt(len(ordered))
    low = max(int(len(ordered) / 2 - margin), 0)
    high = min(math.ceil(len(ordered) / 2 + margin), len(ordered) - 1)
    return statistics.median(ordered), ordered[low], ordered[high]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000, help="with and without, together")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    trainer = build_trainer(args)
    walls, cpus, means = measure(trainer, args.steps // (2 * BLOCK))
    result = {
        "machine": platform.processor() or platform.machine(),
        "parameters": sum(p.numel() for p in trainer.state.model.parameters()),
        "steps_each": len(walls) * BLOCK,
        "step_ms": 1e3 * means["step_s"],
        "wall_percent": [100 * (value - 1) for value in median_with_bounds(walls)],
        "computation_percent": [100 * (value - 1) for value in median_with_bounds(cpus)],
        "calls_percent": 100 * means["calls_s"] / means["step_s"],
    }
    if args.json:
        print(json.dumps(result))
        return
    print(
        f"{result['parameters']:,} parameters, {result['steps_each']} steps each,"
        f" {result['step_ms']:.1f} ms of computation a step"
    )
    for name, key in (("seconds", "wall_percent"), ("computation", "computation_percent")):
        median, low, high = result[key]
        print(f"{name:<14}{median:+.2f} % ({low:+.2f} to {high:+.2f})")
    print(f"{'calls alone':<14}{result['calls_percent']:+.2f} %")


if __name__ == "__main__":
    main()
