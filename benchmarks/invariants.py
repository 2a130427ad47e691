"""What a step pays for the checks of invariants (observe.invariants_every): one process trains a
small decoder, and turns them on and off every 50 steps.

    python benchmarks/invariants.py [--steps N] [--dim N] [--layers N] [--experts N] [--json]

Seconds are those of computation of this process, which other programs on the machine change less.
Each block of 50 steps with checks has one of the weights, and is compared with the block before,
which has none. Prints medians over such pairs, with the bounds that hold them with 95 % (order
statistics), in per cent of a step: what the calls of the checks took, a check of the weights
counted for every 100 steps, as by default; and by how much the median step with checks was longer
than the median one without (no step of these checks the weights), which the rest of the machine
moves more.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
DEFAULT_EVERY = 100
VOCAB = 257
CALLS = (
    "count_batch_for_reduction",
    "remove_counts_from_flags",
    "digest_before_update",
    "finish_step",
)


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
    """Seconds of computation of the calls of RunInvariants."""

    def __init__(self, invariants: RunInvariants) -> None:
        self.seconds = 0.0
        for name in CALLS:
            setattr(invariants, name, self._timed(getattr(invariants, name)))

    def take(self) -> float:
        """The seconds since the last call of it."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

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


@dataclass(frozen=True)
class Pair:
    """Two blocks, in seconds of computation: the median step without checks and with them; the
    median of what the calls take in a step, and what they take for a check of the weights."""

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


def measure(trainer: Trainer, num_pairs: int) -> list[Pair]:
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
        # The last step of a block checks the weights, and the first of the next one reads what it
        # found.
        pairs.append(
            Pair(
                statistics.median(steps_off),
                statistics.median(steps_on),
                statistics.median(of_calls),
                of_calls[-1] + of_calls[0],
            )
        )
    return pairs


def _time_step(trainer: Trainer) -> float:
    began = time.process_time()
    trainer.step()
    return time.process_time() - began


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
    pairs = measure(trainer, args.steps // (2 * BLOCK))
    result: dict[str, Any] = {
        "parameters": sum(p.numel() for p in trainer.state.model.parameters()),
        "steps_each": len(pairs) * BLOCK,
        "step_ms": 1e3 * statistics.median(pair.step_off for pair in pairs),
        "check_ms": 1e3 * statistics.median(pair.check_call for pair in pairs),
        "calls_percent": median_with_bounds([pair.calls_percent for pair in pairs]),
        "longer_percent": median_with_bounds([pair.longer_percent for pair in pairs]),
    }
    if args.json:
        print(json.dumps(result))
        return
    print(
        f"{result['parameters']:,} parameters, {result['steps_each']} steps each:"
        f" {result['step_ms']:.1f} ms a step, {result['check_ms']:.2f} ms a check of the weights"
    )
    for name, key in (("calls", "calls_percent"), ("steps, longer", "longer_percent")):
        median, low, high = result[key]
        print(f"{name:<14}{median:+.2f} % ({low:+.2f} to {high:+.2f})")


if __name__ == "__main__":
    main()
