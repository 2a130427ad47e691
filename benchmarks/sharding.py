"""Each way of sharing a model between two ranks beside torch's own, step by step in the same two
processes.

    python benchmarks/sharding.py [--repeats 15] [--only zero3] [--dim 256 --layers 6]

Every contender trains the same decoder on the same batches: one step of each, in an order that
rotates, again and again, so that what else the machine does meets all alike. The slower rank
counts; printed are medians, and the ratio of phalanx to torch's own by pairs of neighbouring steps.
"alone" is two ranks that never talk: the ceiling.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch._dynamo  # FSDP2 imports it: here once, instead of in every rank
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from phalanx.job.schema import Job
from phalanx.mesh.compat import silence_torch_warnings
from phalanx.mesh.mesh import open_mesh
from phalanx.nn.build import build_model
from phalanx.nn.models.decoder import Decoder
from phalanx.nn.objective import causal_cross_entropy
from phalanx.optim.build import build_optimizer
from phalanx.parallel.parallelize import parallelize
from phalanx.plan.cluster import Cluster
from phalanx.plan.planner import make_plan

NUM_RANKS, VOCAB, SEQ_LEN, CHUNK = 2, 4096, 256, 2048
RATE, BETAS, DECAY, CLIP = 3e-3, (0.9, 0.95), 0.1, 1.0
OPEN_MESHES = ExitStack()
LAYOUTS: dict[str, dict[str, int]] = {
    "ddp": {"dp_replicate": 2},
    "zero1": {"dp_shard": 2, "zero_stage": 1},
    "zero2": {"dp_shard": 2, "zero_stage": 2},
    "zero3": {"dp_shard": 2, "zero_stage": 3},
    "tp2": {"tp": 2},
    "tp2-chunks": {"tp": 2, "tp_chunks": 2},
}
Batch = dict[str, torch.Tensor]
Step = Callable[[Batch], float]


def job_of(options: argparse.Namespace, parallel: dict[str, int]) -> Job:
    return Job.model_validate(
        {
            "model": {
                "dim": options.dim,
                "num_layers": options.layers,
                "num_heads": options.dim // 64,
                "vocab_size": VOCAB,
                "tie_embeddings": False,
            },
            "data": {"seq_len": SEQ_LEN},
            "train": {"global_batch_size": options.batch, "loss_chunk_tokens": CHUNK},
            "optim": {"lr": RATE, "betas": BETAS},
            "parallel": {"ranks": NUM_RANKS, **parallel},
        }
    )


def ours(options: argparse.Namespace, parallel: dict[str, int]) -> Step:
    """What `phalanx train` does in a step, without its events."""
    job = job_of(options, parallel)
    plan = make_plan(job, cluster=Cluster("cpu", NUM_RANKS, 64 * 2**30), vocab_size=VOCAB)
    # Open until the process ends: what closes it must not be collected before.
    mesh = OPEN_MESHES.enter_context(open_mesh(plan.layout, device="cpu"))
    model = parallelize(build_model(job, plan.model_shape), plan, mesh, seed=0)
    optimizer = build_optimizer(model, job.optim)
    objective = causal_cross_entropy(CHUNK)
    update = getattr(model, "update", lambda optimizer: optimizer.step())

    def step(batch: Batch) -> float:
        facts = model.reduce_and_clip(model.forward_backward([batch], objective), max_norm=CLIP)
        update(optimizer)
        optimizer.zero_grad(set_to_none=True)
        return facts.loss

    return step


# Torch's own


class WithLoss(nn.Module):
    """The decoder with its loss in one forward, as DDP wants it."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder, self.objective = decoder, causal_cross_entropy(CHUNK)

    def forward(self, batch: Batch) -> torch.Tensor:
        loss_sum, num_targets = self.objective(self.decoder(batch["inputs"]), batch)
        return loss_sum / num_targets


def fresh(options: argparse.Namespace) -> Decoder:
    job = job_of(options, {})
    module = build_model(
        job, make_plan(job, cluster=Cluster("cpu", 2, 2**36), vocab_size=VOCAB).model_shape
    )
    torch.manual_seed(0)
    for weight in module.to_empty(device="cpu").parameters():
        nn.init.normal_(weight, std=0.02) if weight.ndim >= 2 else nn.init.ones_(weight)
    return module


def groups(module: nn.Module) -> list[dict[str, Any]]:
    named = list(module.named_parameters())
    kept = [p for name, p in named if p.ndim < 2 or "embed" in name]
    return [
        {
            "params": [p for name, p in named if p.ndim >= 2 and "embed" not in name],
            "weight_decay": DECAY,
        },
        {"params": kept, "weight_decay": 0.0},
    ]


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(module), lr=RATE, betas=BETAS, fused=True)


def looped(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(batch: Batch) -> float:
        loss = model(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def torch_alone(options: argparse.Namespace) -> Step:
    model = WithLoss(fresh(options))
    return looped(model, adamw(model))


def torch_ddp(options: argparse.Namespace) -> Step:
    model = DistributedDataParallel(
        WithLoss(fresh(options)), gradient_as_bucket_view=True, init_sync=False
    )
    return looped(model, adamw(model))


def torch_zero1(options: argparse.Namespace) -> Step:
    model = DistributedDataParallel(
        WithLoss(fresh(options)), gradient_as_bucket_view=True, init_sync=False
    )
    decayed, kept = groups(model)
    optimizer = ZeroRedundancyOptimizer(
        decayed["params"], torch.optim.AdamW, lr=RATE, betas=BETAS, weight_decay=DECAY, fused=True
    )
    optimizer.add_param_group(kept)
    return looped(model, optimizer)


def torch_fsdp(free: bool, options: argparse.Namespace) -> Step:
    model = WithLoss(fresh(options))
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    for block in model.decoder.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=free)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return looped(model, adamw(model))


class WithLogits(nn.Module):
    """Torch's tensor parallelism cuts a head that is called, and has a loss for what comes of
    it."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, batch: Batch) -> torch.Tensor:
        hidden = self.decoder(batch["inputs"]).hidden_BTD
        logits = self.decoder.head(hidden)
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def torch_tp(options: argparse.Namespace) -> Step:
    """As torch's tutorials have it: columns, rows, sequence parallelism, and a loss over cut
    logits."""
    model, mesh = WithLogits(fresh(options)), init_device_mesh("cpu", (NUM_RANKS,))
    plan: dict[str, Any] = {
        "decoder.embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "decoder.norm": SequenceParallel(),
        "decoder.head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    entering = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    for number, _ in enumerate(model.decoder.blocks):
        block = f"decoder.blocks.{number}"
        plan |= {
            f"{block}.attention_norm": SequenceParallel(use_local_output=True),
            f"{block}.ffn_norm": SequenceParallel(use_local_output=True),
            f"{block}.attention": PrepareModuleInput(
                input_layouts=(Shard(1), None, None, None, None),
                desired_input_layouts=(Replicate(), None, None, None, None),
            ),
            f"{block}.ffn": PrepareModuleInput(**entering),
        }
        plan |= {f"{block}.attention.{name}": ColwiseParallel() for name in "qkv"}
        plan |= {f"{block}.ffn.{name}": ColwiseParallel() for name in ("gate", "up")}
        plan |= {f"{block}.attention.o": RowwiseParallel(output_layouts=Shard(1))}
        plan |= {f"{block}.ffn.down": RowwiseParallel(output_layouts=Shard(1))}
    parallelize_module(model, mesh, plan)
    optimizer = torch.optim.AdamW(groups(model), lr=RATE, betas=BETAS, fused=True)

    def step(batch: Batch) -> float:
        with loss_parallel():
            loss = model(batch)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach().full_tensor() if hasattr(loss, "full_tensor") else loss.detach())

    return step


TORCH: dict[str, Callable[[argparse.Namespace], Step]] = {
    "ddp": torch_ddp,
    "zero1": torch_zero1,
    "zero2": functools.partial(torch_fsdp, False),
    "zero3": functools.partial(torch_fsdp, True),
    "tp2": torch_tp,
}


def batch_of(options: argparse.Namespace, number: int, rank: int, whole: bool) -> Batch:
    """The global batch of a step, or this rank's half of it."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(VOCAB, (options.batch, SEQ_LEN + 1), generator=generator)
    rows = (
        slice(None) if whole else slice(rank * options.batch // 2, (rank + 1) * options.batch // 2)
    )
    return {"inputs": tokens[rows, :-1].contiguous(), "targets": tokens[rows, 1:].contiguous()}


def run_rank(rank: int, options: argparse.Namespace, out: Path) -> None:
    silence_torch_warnings()
    torch.set_num_threads(1)
    store = dist.FileStore(str(out / "store"), NUM_RANKS)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=300)
    )
    contenders: dict[str, Step] = {}
    for name, parallel in LAYOUTS.items():
        if not options.only or any(name.startswith(text) for text in options.only):
            contenders[f"phalanx {name}"] = ours(options, parallel)
            if name in TORCH:
                contenders[f"torch {name}"] = TORCH[name](options)
    contenders["torch alone"] = torch_alone(options)
    names, times, losses = list(contenders), {name: [] for name in contenders}, {}
    for repeat in range(options.warmup + options.repeats):
        turn = repeat % len(names)
        for name in names[turn:] + names[:turn]:
            batch = batch_of(options, repeat, rank, " tp" in name)
            dist.barrier()
            began = time.perf_counter()
            losses[name] = contenders[name](batch)
            times[name].append(time.perf_counter() - began)
        if rank == 0:
            print(
                f"\r{repeat + 1}/{options.warmup + options.repeats}",
                end="",
                file=sys.stderr,
                flush=True,
            )
    (out / f"rank-{rank}.json").write_text(json.dumps({"times": times, "losses": losses}))
    dist.barrier()
    os._exit(0)


def report(options: argparse.Namespace, found: Sequence[dict[str, Any]]) -> None:
    slowest = {
        name: [max(pair) for pair in zip(*(rank["times"][name] for rank in found), strict=True)][
            options.warmup :
        ]
        for name in found[0]["times"]
    }
    tokens = options.batch * SEQ_LEN
    ceiling = tokens / median(slowest["torch alone"])
    params = sum(p.numel() for p in fresh(options).parameters())
    print(
        f"\n{params / 1e6:.1f} M parameters, {options.batch} x {SEQ_LEN} tokens a step, fp32,"
        f" {NUM_RANKS} ranks, {options.repeats} repeats, torch {torch.__version__}"
    )
    print(f"two ranks that never talk: {ceiling:,.0f} tokens/s\n")
    print(
        "| layout | phalanx tokens/s | torch's own | ÷ torch's own (middle half of pairs) | ÷ never"
        " talk | loss apart |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name in LAYOUTS:
        if f"phalanx {name}" not in slowest:
            continue
        own = slowest[f"phalanx {name}"]
        rival = slowest.get(f"torch {name}") or slowest.get(f"torch {name.partition('-')[0]}", own)
        ratios = sorted(theirs / mine for mine, theirs in zip(own, rival, strict=True))
        quarter = len(ratios) // 4
        losses = found[0]["losses"]
        print(
            f"| {name} | {tokens / median(own):,.0f} | {tokens / median(rival):,.0f} |"
            f" {median(ratios):.3f} "
            f"({ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f}) |"
            f" {tokens / median(own) / ceiling:.3f} | "
            f"{abs(losses[f'phalanx {name}'] - losses['phalanx ' + next(iter(LAYOUTS))]):.0e} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step over both ranks")
    parser.add_argument("--only", action="append", default=[], help="layouts that begin so")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory(prefix="sharding-") as directory:
        pids = []
        for rank in range(NUM_RANKS):
            pid = os.fork()
            if pid == 0:
                run_rank(rank, options, Path(directory))
            pids.append(pid)
        codes = [os.waitpid(pid, 0)[1] for pid in pids]
        if any(codes):
            sys.exit("a rank failed")
        report(
            options,
            [
                json.loads((Path(directory) / f"rank-{r}.json").read_text())
                for r in range(NUM_RANKS)
            ],
        )


if __name__ == "__main__":
    main()
