"""Two pipeline stages beside torch's own pipelining, step by step in the same two processes.

    python benchmarks/pipeline.py [--repeats 15] [--only 1f1b] [--dim 256 --layers 6] [--quick]

Each schedule is run by phalanx and by a program written by hand on torch.distributed.pipelining:
PipelineStage with fixed shapes, stages made of the same decoder's blocks, cut where phalanx cuts
it. Weights, batches, microbatches, loss, optimizer and clipping are the same; one step of each
contender, in an order that rotates, again and again, so that what else the machine does meets all
alike. The slower rank counts; printed are medians, and the ratio of phalanx to torch's own by pairs
of neighbouring steps. "one process" trains the whole model on rank 0 while rank 1 waits: every
contender's loss is held against its.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from phalanx.job.schema import Job
from phalanx.mesh.compat import silence_torch_warnings
from phalanx.mesh.mesh import open_mesh
from phalanx.nn.build import build_model
from phalanx.nn.models.decoder import Decoder
from phalanx.nn.objective import CausalOutput, causal_cross_entropy
from phalanx.nn.rotary import make_rotary_table
from phalanx.optim.build import build_optimizer
from phalanx.parallel.parallelize import discover_transforms, parallelize
from phalanx.plan.cluster import Cluster
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan

NUM_RANKS, CHUNK = 2, 2048
RATE, BETAS, DECAY, CLIP = 3e-3, (0.9, 0.95), 0.1, 1.0
OPEN_MESHES = ExitStack()
TORCH: dict[str, Any] = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved": ScheduleInterleaved1F1B,
}
ALONE = "one process"
Batch = dict[str, torch.Tensor]
Step = Callable[[Batch], float]


def job_of(options: argparse.Namespace, parallel: dict[str, Any]) -> Job:
    return Job.model_validate(
        {
            "model": {
                "dim": options.dim,
                "num_layers": options.layers,
                "num_heads": max(options.dim // 64, 1),
                "vocab_size": options.vocab,
                "tie_embeddings": False,
            },
            "data": {"seq_len": options.seq_len},
            "train": {
                "global_batch_size": options.batch,
                "micro_batch_size": options.batch // options.microbatches,
                "loss_chunk_tokens": CHUNK,
            },
            "optim": {"lr": RATE, "betas": BETAS},
            "parallel": parallel,
        }
    )


def plan_of(options: argparse.Namespace, parallel: dict[str, Any]) -> Plan:
    return make_plan(
        job_of(options, parallel),
        cluster=Cluster("cpu", NUM_RANKS, 64 * 2**30),
        vocab_size=options.vocab,
    )


def pipelined(options: argparse.Namespace, schedule: str) -> Plan:
    return plan_of(options, {"ranks": NUM_RANKS, "pp": NUM_RANKS, "schedule": schedule})


def fresh(options: argparse.Namespace) -> Decoder:
    """The whole model, the same in every process and for every contender."""
    job = job_of(options, {"ranks": 1})
    module = build_model(job, plan_of(options, {"ranks": 1}).model_shape)
    torch.manual_seed(0)
    for weight in module.to_empty(device="cpu").parameters():
        nn.init.normal_(weight, std=0.02) if weight.ndim >= 2 else nn.init.ones_(weight)
    return module


def ours(options: argparse.Namespace, schedule: str) -> Step:
    """What `phalanx train` does in a step, without its events."""
    plan = pipelined(options, schedule)
    # Open until the process ends: what closes it must not be collected before.
    mesh = OPEN_MESHES.enter_context(open_mesh(plan.layout, device="cpu"))
    model = parallelize(fresh(options), plan, mesh, seed=0)
    optimizer = build_optimizer(model, job_of(options, {"ranks": 1}).optim)
    objective = causal_cross_entropy(CHUNK)

    def step(batch: Batch) -> float:
        parts = {name: tensor.chunk(options.microbatches) for name, tensor in batch.items()}
        microbatches = [
            dict(zip(parts, of_one, strict=True)) for of_one in zip(*parts.values(), strict=True)
        ]
        facts = model.reduce_and_clip(
            model.forward_backward(microbatches, objective), max_norm=CLIP
        )
        model.update(optimizer)
        optimizer.zero_grad(set_to_none=True)
        return facts.loss

    return step


# Torch's own


class Stage(nn.Module):
    """Blocks begin to end of a decoder, with what comes before the first of all and after the
    last."""

    def __init__(
        self, decoder: Decoder, begin: int, end: int, seq_len: int, *, is_first: bool, is_last: bool
    ) -> None:
        super().__init__()
        self.embed = decoder.embed if is_first else None
        self.blocks = nn.ModuleList(list(decoder.blocks)[begin:end])
        self.norm, self.head = (decoder.norm, decoder.head) if is_last else (None, None)
        # Positions never change here, so that the table of their angles is made once.
        self.table = make_rotary_table(torch.arange(seq_len)[None], decoder.shape, torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks:
            x = block(x, self.table, None)
        return x if self.norm is None else self.norm(x)


def theirs(
    options: argparse.Namespace, schedule: str, num_blocks: Sequence[int], rank: int
) -> Step:
    """As a fair hand would write it: fixed shapes, sums as losses, no outputs kept, one
    reduction for norm and loss."""
    whole, last = fresh(options), len(num_blocks) - 1
    micro, tokens = options.batch // options.microbatches, options.batch * options.seq_len
    hidden = torch.empty(micro, options.seq_len, options.dim, requires_grad=True)
    stages = []
    for index in range(rank, len(num_blocks), NUM_RANKS):
        begin, first = sum(num_blocks[:index]), index == 0
        module = Stage(
            whole,
            begin,
            begin + num_blocks[index],
            options.seq_len,
            is_first=first,
            is_last=index == last,
        )
        entering = torch.zeros(micro, options.seq_len, dtype=torch.long) if first else hidden
        stages.append(
            PipelineStage(
                module,
                index,
                len(num_blocks),
                torch.device("cpu"),
                input_args=(entering,),
                output_args=(hidden,),
            )
        )
    objective = causal_cross_entropy(CHUNK)

    def loss_fn(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss_sum, _ = objective(CausalOutput(hidden, whole.head.weight), {"targets": targets})
        return loss_sum / tokens

    runner = TORCH[schedule](
        stages if issubclass(TORCH[schedule], ScheduleInterleaved1F1B) else stages[0],
        options.microbatches,
        loss_fn=loss_fn,
        scale_grads=False,
    )
    named = [pair for stage in stages for pair in stage.submod.named_parameters()]
    optimizer = adamw(named)
    parameters = [parameter for _, parameter in named]

    def step(batch: Batch) -> float:
        entering, losses = [batch["inputs"]] if rank == 0 else [], []
        if rank == last % NUM_RANKS:
            runner.step(*entering, target=batch["targets"], losses=losses, return_outputs=False)
        else:
            runner.step(*entering, return_outputs=False)
        gradients = [parameter.grad for parameter in parameters]
        loss = torch.stack(losses).sum().detach() if losses else torch.zeros(())
        both = torch.stack((nn.utils.get_total_norm(gradients) ** 2, loss))
        dist.all_reduce(both)
        nn.utils.clip_grads_with_norm_(parameters, CLIP, both[0].sqrt())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(both[1])

    return step


def adamw(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    decayed, kept = [], []
    for name, parameter in named:
        (kept if parameter.ndim < 2 or "embed" in name else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": kept, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=RATE, betas=BETAS, fused=True
    )


def one_process(options: argparse.Namespace) -> Step:
    """The same step on one core, nothing sent: what two ranks could at most halve."""
    model, objective = fresh(options), causal_cross_entropy(CHUNK)
    optimizer, tokens = adamw(model.named_parameters()), options.batch * options.seq_len

    def step(batch: Batch) -> float:
        loss = 0.0
        for inputs, targets in zip(
            *(batch[name].chunk(options.microbatches) for name in batch), strict=True
        ):
            loss_sum, _ = objective(model(inputs), {"targets": targets})
            (loss_sum / tokens).backward()
            loss += float(loss_sum.detach()) / tokens
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def batch_of(options: argparse.Namespace, number: int) -> Batch:
    """The global batch of a step, which every rank of a pipeline has."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(options.vocab, (options.batch, options.seq_len + 1), generator=generator)
    return {"inputs": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def run_rank(rank: int, options: argparse.Namespace, out: Path) -> None:
    silence_torch_warnings()
    torch.set_num_threads(1)
    store = dist.FileStore(str(out / "store"), NUM_RANKS)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=300)
    )
    contenders: dict[str, Step] = {}
    cuts = {}
    for schedule in options.only or TORCH:
        pipeline = pipelined(options, schedule).pipeline
        assert pipeline is not None
        cuts[schedule] = pipeline.stages.num_blocks
        contenders[f"phalanx {schedule}"] = ours(options, schedule)
        contenders[f"torch {schedule}"] = theirs(options, schedule, cuts[schedule], rank)
    # Rank 1 has no part in it but waiting at the next barrier.
    contenders[ALONE] = one_process(options) if rank == 0 else lambda batch: 0.0
    names, times = list(contenders), {name: [] for name in contenders}
    losses: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(options.warmup + options.repeats):
        turn, batch = repeat % len(names), batch_of(options, repeat)
        for name in names[turn:] + names[:turn]:
            dist.barrier()
            began = time.perf_counter()
            losses[name].append(contenders[name](batch))
            times[name].append(time.perf_counter() - began)
        if rank == 0:
            print(
                f"\r{repeat + 1}/{options.warmup + options.repeats}",
                end="",
                file=sys.stderr,
                flush=True,
            )
    (out / f"rank-{rank}.json").write_text(
        json.dumps({"times": times, "losses": losses, "cuts": cuts})
    )
    dist.barrier()
    os._exit(0)


def figures(options: argparse.Namespace, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is printed, as data: tokens/s by contender, and for each schedule ratios and distance
    of losses."""
    slower = {
        name: [max(pair) for pair in zip(*(rank["times"][name] for rank in found), strict=True)][
            options.warmup :
        ]
        for name in found[0]["times"]
    }
    tokens, losses = options.batch * options.seq_len, found[0]["losses"]
    body: dict[str, Any] = {
        "tokens_per_s": {name: tokens / median(times) for name, times in slower.items()}
    }
    for schedule in options.only or TORCH:
        pairs = zip(slower[f"phalanx {schedule}"], slower[f"torch {schedule}"], strict=True)
        body[schedule] = {
            "ratios": sorted(rival / own for own, rival in pairs),
            "cut": found[0]["cuts"][schedule],
            "loss_apart": {
                side: max(
                    abs(mine - alone)
                    for mine, alone in zip(losses[f"{side} {schedule}"], losses[ALONE], strict=True)
                )
                for side in ("phalanx", "torch")
            },
        }
    return body


def report(options: argparse.Namespace, body: dict[str, Any]) -> None:
    params = sum(p.numel() for p in fresh(options).parameters())
    speed, steps = body["tokens_per_s"], options.warmup + options.repeats
    print(
        f"\n{params / 1e6:.1f} M parameters, {options.batch} x {options.seq_len} tokens a step in "
        f"{options.microbatches} microbatches, fp32, {NUM_RANKS} ranks, {options.repeats} repeats, "
        f"torch {torch.__version__}"
    )
    print(f"one process on one core: {speed[ALONE]:,.0f} tokens/s\n")
    print(
        "| schedule | blocks per stage | phalanx tokens/s | torch's own | ÷ torch's own (middle"
        " half of pairs) ",
        end="",
    )
    print(
        f"| ÷ one process | loss apart from one process's in {steps} steps: phalanx | torch's own |"
    )
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for schedule in options.only or TORCH:
        row, own, rival = body[schedule], speed[f"phalanx {schedule}"], speed[f"torch {schedule}"]
        ratios, quarter = row["ratios"], len(row["ratios"]) // 4
        print(
            f"| {schedule} | {', '.join(map(str, row['cut']))} | {own:,.0f} | {rival:,.0f} |"
            f" {median(ratios):.3f} ({ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f}) |"
            f" {own / speed[ALONE]:.3f} | {row['loss_apart']['phalanx']:.0e} |"
            f" {row['loss_apart']['torch']:.0e} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--only", action="append", choices=tuple(TORCH), help="this schedule")
    parser.add_argument("--json", type=Path, help="write what was found to this file, too")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a model of nothing and two repeats, to see that it runs",
    )
    options = parser.parse_args()
    if options.quick:
        small = {"repeats": 2, "warmup": 1, "dim": 64, "layers": 4, "vocab": 64, "seq_len": 16}
        options = argparse.Namespace(**vars(options) | small)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    discover_transforms()  # imported once, before forking
    with tempfile.TemporaryDirectory(prefix="pipeline-") as directory:
        pids = []
        for rank in range(NUM_RANKS):
            pid = os.fork()
            if pid == 0:
                run_rank(rank, options, Path(directory))
            pids.append(pid)
        codes = [os.waitpid(pid, 0)[1] for pid in pids]
        if any(codes):
            sys.exit("a rank failed")
        found = [
            json.loads((Path(directory) / f"rank-{r}.json").read_text()) for r in range(NUM_RANKS)
        ]
    body = figures(options, found)
    report(options, body)
    if options.json:
        options.json.write_text(json.dumps(body))


if __name__ == "__main__":
    main()
