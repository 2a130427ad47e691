"""What a step pays for the checks of invariants (observe.invariants_every): ranks of data
parallelism train a small decoder, and turn them on and off every 50 steps.

    python benchmarks/invariants.py [--ranks N] [--steps N] [--dim N] [--layers N] [--experts N]
                                    [--json]

Seconds are those of computation of rank 0, which other programs on the machine change less, and
beside them what the calls took of the wall, waiting for other ranks included.
Each block of 50 steps with checks has one of the weights, and is compared with the block before,
which has none. Prints medians over such pairs, with the bounds that hold them with 95 % (order
statistics), in per cent of a step: what the calls of the checks took, a check of the weights
counted for every 100 steps, as by default; and by how much the median step with checks was longer
than the median one without (no step of these checks the weights), which the rest of the machine
moves more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from forked_ranks import measure_in_forked_ranks
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
from random_batches import RandomBatches

BLOCK = 50
DEFAULT_EVERY = 100
VOCAB = 257
CALLS = (
    "count_batch_for_reduction",
    "remove_counts_from_flags",
    "digest_before_update",
    "finish_step",
)


class TimedCalls:
    """Seconds of computation, and of the wall, of the calls of RunInvariants."""

    def __init__(self, invariants: RunInvariants) -> None:
        self.seconds, self.wall_s = 0.0, 0.0
        for name in CALLS:
            setattr(invariants, name, self._timed(getattr(invariants, name)))

    def take(self) -> tuple[float, float]:
        """Both since the last call of it."""
        taken = self.seconds, self.wall_s
        self.seconds, self.wall_s = 0.0, 0.0
        return taken

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began, began_wall = time.process_time(), time.perf_counter()
            try:
                return call(*args)
            finally:
                self.seconds += time.process_time() - began
                self.wall_s += time.perf_counter() - began_wall

        return timed


@contextlib.contextmanager
def open_trainer(args: argparse.Namespace) -> Iterator[Trainer]:
    """A Trainer of this rank, whose mesh is open inside."""
    model: dict[str, Any] = {"dim": args.dim, "num_layers": args.layers, "num_heads": 4}
    if args.experts:
        model |= {"num_experts": args.experts, "experts_per_token": 2, "expert_ffn_dim": args.dim}
    job = Job.model_validate(
        {
            "model": model,
            "data": {"seq_len": args.seq_len},
            "train": {
                "global_batch_size": args.batch * args.ranks,
                "micro_batch_size": args.batch // args.microbatches,
                "steps": 10**6,
            },
            "observe": {"invariants_every": BLOCK},
            "parallel": {"ranks": args.ranks, "dp_replicate": args.ranks},
        }
    )
    plan = make_plan(job, cluster=Cluster("cpu", 2, 2**33), vocab_size=VOCAB)
    with open_mesh(plan.layout, device="cpu") as mesh:
        wrapped = parallelize(build_model(job, plan.model_shape), plan, mesh, seed=1)
        state = TrainState(wrapped, build_optimizer(wrapped, job.optim), seed=1)
        batches = RandomBatches(VOCAB, args.batch, args.batch // args.microbatches, args.seq_len)
        data = TrainingData(batches, build_objective(job))
        yield Trainer(job, plan, state, Bus(rank=mesh.rank), data)


@dataclass(frozen=True)
class Pair:
    """Two blocks, by one clock: the median step without checks and with them; the median of what
    the calls take in a step, and what they take for a check of the weights. Seconds."""

    step_off: float
    step_on: float
    usual_call: float
    check_call: float

    @property
    def calls_percent(self) -> float:
        """Of a step without checks, with one check of the weights in DEFAULT_EVERY steps."""
        return 100 * (self.usual_call + self.check_call / DEFAULT_EVERY) / self.step_off

    @property
    def longer_percent(self) -> float:
        return 100 * (self.step_on / self.step_off - 1)


@dataclass(frozen=True)
class MeasuredPair:
    """Two blocks by both clocks."""

    computation: Pair
    wall: Pair


def measure(trainer: Trainer, num_pairs: int) -> list[MeasuredPair]:
    off = trainer._invariants
    on = RunInvariants(trainer.job, trainer.state, trainer.bus, trainer.data.objective)
    on.start()
    calls = TimedCalls(on)
    for _ in range(2 * BLOCK):
        trainer.step()
    pairs = []
    for _ in range(num_pairs):
        trainer._invariants = off
        steps_off = [_time_step(trainer) for _ in range(BLOCK)]
        trainer._invariants = on
        steps_on, of_calls = [], []
        calls.take()
        for _ in range(BLOCK):
            steps_on.append(_time_step(trainer))
            of_calls.append(calls.take())
        by_clock = zip(
            zip(*steps_off, strict=True),
            zip(*steps_on, strict=True),
            zip(*of_calls, strict=True),
            strict=True,
        )
        # The last step of a block checks the weights, and the first of the next one reads what it
        # found.
        computation, wall = (
            Pair(
                statistics.median(off_s),
                statistics.median(on_s),
                statistics.median(calls_s),
                calls_s[-1] + calls_s[0],
            )
            for off_s, on_s, calls_s in by_clock
        )
        pairs.append(MeasuredPair(computation, wall))
    return pairs


def _time_step(trainer: Trainer) -> tuple[float, float]:
    """Seconds of computation, and of the wall."""
    began, began_wall = time.process_time(), time.perf_counter()
    trainer.step()
    return time.process_time() - began, time.perf_counter() - began_wall


def median_with_bounds(values: list[float]) -> tuple[float, float, float]:
    """(median, lower, upper): bounds that hold the median with 95 %, by order statistics."""
    ordered = sorted(values)
    margin = 0.98 * math.sqrt(len(ordered))
    low = max(int(len(ordered) / 2 - margin), 0)
    high = min(math.ceil(len(ordered) / 2 + margin), len(ordered) - 1)
    return statistics.median(ordered), ordered[low], ordered[high]


ROWS = (
    ("calls, of computation", "calls_percent"),
    ("calls, of the wall", "calls_wall_percent"),
    ("steps longer, in computation", "longer_percent"),
    ("steps longer, on the wall", "longer_wall_percent"),
)


def measure_rank(args: argparse.Namespace) -> dict[str, Any]:
    """What this rank found."""
    with open_trainer(args) as trainer:
        pairs = measure(trainer, args.steps // (2 * BLOCK))
        num_parameters = sum(p.numel() for p in trainer.state.model.parameters())
    computation, wall = [pair.computation for pair in pairs], [pair.wall for pair in pairs]
    return {
        "parameters": num_parameters,
        "steps_each": len(pairs) * BLOCK,
        "step_ms": 1e3 * statistics.median(pair.step_off for pair in computation),
        "check_ms": 1e3 * statistics.median(pair.check_call for pair in computation),
        "calls_percent": median_with_bounds([pair.calls_percent for pair in computation]),
        "calls_wall_percent": median_with_bounds([pair.calls_percent for pair in wall]),
        "longer_percent": median_with_bounds([pair.longer_percent for pair in computation]),
        "longer_wall_percent": median_with_bounds([pair.longer_percent for pair in wall]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2000, help="with and without, together")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a rank")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = measure_in_forked_ranks(args.ranks, lambda rank, folder: measure_rank(args))
    if args.json:
        print(json.dumps(result))
        return
    print(
        f"{result['parameters']:,} parameters, {result['steps_each']} steps each:"
        f" {result['step_ms']:.1f} ms a step, {result['check_ms']:.2f} ms a check of the weights"
    )
    for name, key in ROWS:
        median, low, high = result[key]
        print(f"{name:<36}{median:+.2f} % ({low:+.2f} to {high:+.2f})")


if __name__ == "__main__":
    main()
