"""The bubble of each pipeline schedule on four ranks: predicted by simulation, measured from what
the ranks did.

    python benchmarks/pipeline_bubble.py [--repeats 5] [--only zb-v] [--wait-ms 10] [--quick]

What is emulated: computing. A block waits (it sleeps) for as long in its forward as for the
gradient of its input and again for that of its weights, since four ranks that really computed on
two cores would measure each other. Waits are calibrated: with all ranks sleeping, each learns by
how much a sleep lasts longer than it was asked for. Everything else is real: processes, the plan,
the runtime, its order of actions, messages over gloo, autograd, split backwards.

Predicted is the simulation of the plan's schedule with the stages' waits as costs, and nothing for
messages. Measured is what the runtime says of begin and end of its actions, on one clock; the
bubble is the part of all ranks' time, from the first begin to the last end, in which no action ran.
In flight are microbatches of one stage whose saved input is alive, from when autograd saves it
until autograd and the wait for the weights' gradient have let it go. Even stages have two blocks
each, uneven ones from one to three.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from phalanx.job.schema import Job
from phalanx.mesh.compat import silence_torch_warnings
from phalanx.mesh.mesh import open_mesh
from phalanx.parallel.parallelize import discover_transforms, parallelize
from phalanx.parallel.pipeline.weight_grads import defer_weight_gradient
from phalanx.plan.cluster import Cluster
from phalanx.plan.pipeline.generate import SCHEDULE_NAMES, get_default_stages_per_rank
from phalanx.plan.pipeline.pipeline_plan import Pipeline
from phalanx.plan.pipeline.simulate import (
    StageCosts,
    Timeline,
    count_peak_in_flight,
    simulate_timeline,
)
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan

NUM_RANKS, DIM, VOCAB, SEQ_LEN = 4, 8, 16, 4
EVEN, UNEVEN = "even", "uneven"
OPEN_MESHES = ExitStack()
BLOCKS_OF_STAGE = {EVEN: (2,), UNEVEN: (2, 3, 1, 2)}  # over and over
Batch = dict[str, torch.Tensor]


# A model whose blocks wait


@dataclass
class Clock:
    """How a rank waits, and how many saved inputs of first blocks of stages are alive."""

    oversleep_s: float = 0.0
    num_alive: int = 0
    peak: int = 0

    def wait(self, seconds: float) -> None:
        time.sleep(max(seconds - self.oversleep_s, 0.0))

    def calibrate(self, seconds: float, times: int) -> None:
        self.oversleep_s = median(self._oversleep(seconds) for _ in range(times))

    def _oversleep(self, seconds: float) -> float:
        began = time.perf_counter()
        time.sleep(seconds)
        return time.perf_counter() - began - seconds


class Saved:
    """An input that autograd keeps, counted while anyone holds this."""

    def __init__(self, tensor: torch.Tensor, clock: Clock) -> None:
        self.tensor, self._clock = tensor, clock
        clock.num_alive += 1
        clock.peak = max(clock.peak, clock.num_alive)

    def __del__(self) -> None:
        self._clock.num_alive -= 1


@dataclass
class Kept:
    """What the hooks of a stage's first block pass on from one call to its backward."""

    clock: Clock
    saved: list[Saved] = field(default_factory=list)

    def pack(self, tensor: torch.Tensor) -> Saved:
        return Saved(tensor, self.clock)

    def unpack(self, saved: Saved) -> torch.Tensor:
        self.saved.append(saved)
        return saved.tensor


class Wait(torch.autograd.Function):
    """x * scale, which takes its time.

    The gradient of a number is made at once, and the wait for it put off.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, scale: torch.Tensor, seconds: float, kept: Kept
    ) -> torch.Tensor:
        kept.clock.wait(seconds)
        ctx.save_for_backward(x)
        ctx.scale, ctx.seconds, ctx.kept = scale, seconds, kept
        return x * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        kept, seconds = ctx.kept, ctx.seconds
        (x,) = ctx.saved_tensors
        kept.clock.wait(seconds)
        held, kept.saved = kept.saved, []

        def weights() -> None:
            kept.clock.wait(seconds)
            held.clear()

        defer_weight_gradient(weights)
        return grad * ctx.scale, (grad * x).sum(), None, None


class Block(nn.Module):
    def __init__(self, seconds: float, clock: Clock) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.seconds, self.clock, self.is_first_of_stage = seconds, clock, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = Kept(self.clock)
        with (
            saved_tensors_hooks(kept.pack, kept.unpack) if self.is_first_of_stage else nullcontext()
        ):
            out: torch.Tensor = Wait.apply(x, self.scale, self.seconds, kept)
        return out


class Waiting(nn.Module):
    """An embedding and a head that cost nothing, and blocks between them."""

    def __init__(self, num_blocks: int, seconds: float = 0.0, clock: Clock | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block(seconds, clock or Clock()) for _ in range(num_blocks))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(num_blocks: int) -> Waiting:
    """For the plan, which asks another process for the names of parameters and blocks."""
    return Waiting(num_blocks)


def squares(outputs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return outputs.square().sum(), torch.tensor(batch["inputs"].numel())


# One schedule


@dataclass(frozen=True)
class Case:
    schedule: str
    stages: str

    @property
    def num_blocks(self) -> tuple[int, ...]:
        pattern = BLOCKS_OF_STAGE[self.stages]
        return tuple(
            pattern[s % len(pattern)]
            for s in range(NUM_RANKS * get_default_stages_per_rank(self.schedule))
        )

    def plan(self, num_microbatches: int) -> Plan:
        job = Job.model_validate(
            {
                "model": {
                    "kind": f"{Path(__file__).stem}:build",
                    "args": {"num_blocks": sum(self.num_blocks)},
                },
                "data": {"seq_len": SEQ_LEN},
                "train": {"global_batch_size": num_microbatches, "micro_batch_size": 1},
                "parallel": {
                    "ranks": NUM_RANKS,
                    "pp": NUM_RANKS,
                    "schedule": self.schedule,
                    "stage_blocks": self.num_blocks,
                },
            }
        )
        return make_plan(job, cluster=Cluster("cpu", NUM_RANKS, 64 * 2**30), vocab_size=VOCAB)

    def costs(self, wait_s: float) -> list[StageCosts]:
        return [StageCosts(*(count * wait_s,) * 3) for count in self.num_blocks]


def cases(options: argparse.Namespace) -> list[Case]:
    return [
        Case(name, stages) for stages in BLOCKS_OF_STAGE for name in options.only or SCHEDULE_NAMES
    ]


def pipeline_of(plan: Plan) -> Pipeline:
    assert plan.pipeline is not None
    return plan.pipeline


def measure(case: Case, plan: Plan, clock: Clock, options: argparse.Namespace) -> dict[str, Any]:
    """Spans of this rank's actions in every measured step, and the most saved inputs that were
    alive."""
    module = Waiting(sum(case.num_blocks), options.wait_ms / 1e3, clock)
    for begin, _ in pipeline_of(plan).stages.block_ranges:
        module.blocks[begin].is_first_of_stage = True
    for parameter in module.parameters():
        nn.init.constant_(parameter, 0.5)
    # Open until the process ends: what closes it must not be collected before.
    mesh = OPEN_MESHES.enter_context(open_mesh(plan.layout, device="cpu"))
    model = parallelize(module, plan, mesh, seed=0)
    inputs = torch.arange(options.microbatches * SEQ_LEN).view(-1, 1, SEQ_LEN) % VOCAB
    microbatches = [{"inputs": row} for row in inputs]
    found: dict[str, Any] = {"spans": [], "peaks": [], "left": 0}
    for repeat in range(options.warmup + options.repeats):
        dist.barrier()
        clock.peak = clock.num_alive
        sums = model.forward_backward(microbatches, squares)
        if repeat >= options.warmup:
            found["spans"].append(
                [(str(action), begin, end) for action, begin, end in model.pipeline.spans]
            )
            found["peaks"].append(clock.peak)
        assert model.reduce_and_clip(sums).grad_norm > 0
        for parameter in model.parameters():
            parameter.grad = None
        found["left"] = max(found["left"], clock.num_alive)
    return found


def run_rank(rank: int, options: argparse.Namespace, plans: Sequence[Plan], out: Path) -> None:
    silence_torch_warnings()
    torch.set_num_threads(1)
    store = dist.FileStore(str(out / "store"), NUM_RANKS)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=120)
    )
    clock, found = Clock(), []
    dist.barrier()
    clock.calibrate(options.wait_ms / 1e3, 40)
    for number, (case, plan) in enumerate(zip(cases(options), plans, strict=True)):
        found.append(measure(case, plan, clock, options))
        if rank == 0:
            print(f"\r{number + 1}/{len(plans)}", end="", file=sys.stderr, flush=True)
    (out / f"rank-{rank}.json").write_text(
        json.dumps({"found": found, "oversleep_s": clock.oversleep_s})
    )
    dist.barrier()
    os._exit(0)


# What it comes to


def measured_timelines(pipeline: Pipeline, ranks: Sequence[dict[str, Any]]) -> list[Timeline]:
    """Of each step, all ranks together.

    Every rank did what the schedule says, in its order, or this fails.
    """
    schedule, timelines = pipeline.schedule(), []
    for rows in zip(*(rank["spans"] for rank in ranks), strict=True):
        done = tuple(tuple(text for text, _, _ in row) for row in rows)
        assert done == tuple(tuple(map(str, row)) for row in schedule.actions), (
            "not the order of the schedule"
        )
        zero = min(begin for row in rows for _, begin, _ in row)
        spans = tuple(tuple((begin - zero, end - zero) for _, begin, end in row) for row in rows)
        timelines.append(Timeline(schedule, spans))
    return timelines


def row_of(
    case: Case, plan: Plan, ranks: Sequence[dict[str, Any]], options: argparse.Namespace
) -> dict[str, Any]:
    pipeline = pipeline_of(plan)
    predicted = simulate_timeline(pipeline.schedule(), case.costs(options.wait_ms / 1e3))
    measured = measured_timelines(pipeline, ranks)
    return {
        "schedule": case.schedule,
        "stages": case.stages,
        "predicted_bubble": float(predicted.bubble),
        "measured_bubbles": [float(timeline.bubble) for timeline in measured],
        "predicted_step_s": float(predicted.step_s),
        "measured_step_s": [float(timeline.step_s) for timeline in measured],
        "predicted_in_flight": list(count_peak_in_flight(pipeline.schedule()).per_rank),
        "measured_in_flight": [max(rank["peaks"]) for rank in ranks],
        "left_in_flight": [rank["left"] for rank in ranks],
    }


def report(
    options: argparse.Namespace, rows: Sequence[dict[str, Any]], oversleep_s: Sequence[float]
) -> None:
    print(
        f"\n{NUM_RANKS} ranks, {options.microbatches} microbatches, waits of {options.wait_ms:g} ms"
        f" for each block and kind (sleeps last {1e3 * max(oversleep_s):.2f} ms longer, taken off),"
        f" {options.repeats} steps, torch {torch.__version__}\n"
    )
    print("| stages | schedule | bubble predicted | measured | points apart (extremes) ", end="")
    print("| step predicted | measured | in flight by rank, predicted | measured |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | --- | --- |")
    for row in rows:
        predicted, bubbles = row["predicted_bubble"], row["measured_bubbles"]
        apart = [100 * (bubble - predicted) for bubble in bubbles]
        print(
            f"| {row['stages']} | {row['schedule']} | {predicted:.1%} | {median(bubbles):.1%} |"
            f" {median(apart):+.1f} ({min(apart):+.1f} to {max(apart):+.1f}) |"
            f" {row['predicted_step_s']:.3f} s | {median(row['measured_step_s']):.3f} s |"
            f" {'/'.join(map(str, row['predicted_in_flight']))} |"
            f" {'/'.join(map(str, row['measured_in_flight']))} |"
        )
    worst = max(
        rows, key=lambda row: abs(median(row["measured_bubbles"]) - row["predicted_bubble"])
    )
    apart = 100 * abs(median(worst["measured_bubbles"]) - worst["predicted_bubble"])
    print(f"\nfarthest apart: {apart:.1f} points, {worst['schedule']} on {worst['stages']} stages")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument(
        "--wait-ms",
        type=float,
        default=10.0,
        help="of one block: forward, and each half of backward",
    )
    parser.add_argument("--only", action="append", choices=SCHEDULE_NAMES, help="this schedule")
    parser.add_argument("--json", type=Path, help="write what was found to this file, too")
    parser.add_argument(
        "--quick", action="store_true", help="short waits, one step: to see that it runs"
    )
    options = parser.parse_args()
    if options.quick:
        options = argparse.Namespace(**vars(options) | {"repeats": 1, "warmup": 1, "wait_ms": 1.0})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    plans = [case.plan(options.microbatches) for case in cases(options)]
    discover_transforms()  # imported once, before forking
    with tempfile.TemporaryDirectory(prefix="pipeline-bubble-") as directory:
        pids = []
        for rank in range(NUM_RANKS):
            pid = os.fork()
            if pid == 0:
                run_rank(rank, options, plans, Path(directory))
            pids.append(pid)
        codes = [os.waitpid(pid, 0)[1] for pid in pids]
        if any(codes):
            sys.exit("a rank failed")
        ranks = [
            json.loads((Path(directory) / f"rank-{r}.json").read_text()) for r in range(NUM_RANKS)
        ]
    rows = [
        row_of(case, plan, [rank["found"][number] for rank in ranks], options)
        for number, (case, plan) in enumerate(zip(cases(options), plans, strict=True))
    ]
    report(options, rows, [rank["oversleep_s"] for rank in ranks])
    if options.json:
        options.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
