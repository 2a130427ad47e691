"""A data-parallel training loop written by hand, in one file: what `python benchmarks/throughput`
measures phalanx against.

Under torchrun, each rank writes OUT/rank-R.json: unix time at the end of every step, and its
losses.
"""

import argparse
import contextlib
import json
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from phalanx.job.shapes.decoder import DecoderShape, default_ffn_dim
from phalanx.nn.models.decoder import Decoder
from phalanx.nn.objective import causal_cross_entropy

parser = argparse.ArgumentParser()
for option in (
    "dim",
    "layers",
    "heads",
    "vocab",
    "seq-len",
    "micro-batch",
    "microbatches",
    "steps",
    "bucket-mb",
):
    parser.add_argument(f"--{option}", type=int, required=True)
for option in ("data", "out", "precision"):
    parser.add_argument(f"--{option}", required=True)
parser.add_argument("--alone", action="store_true", help="ranks that never talk")
parser.add_argument(
    "--whole-logits", action="store_true", help="F.cross_entropy of all logits at once"
)
args = parser.parse_args()


class ModelWithLoss(nn.Module):
    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder, self.objective = decoder, causal_cross_entropy(2048)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        output = self.decoder(inputs)
        if args.whole_logits:
            return F.cross_entropy(F.linear(*output[:2]).flatten(0, 1).float(), targets.flatten())
        loss_sum, num_targets = self.objective(output, {"targets": targets})
        return loss_sum / num_targets


rank, head_dim, ffn_dim = int(os.environ["RANK"]), args.dim // args.heads, default_ffn_dim(args.dim)
torch.set_num_threads(1)
torch.manual_seed(0)  # the same weights on every rank
shape = DecoderShape(
    args.layers, args.dim, args.heads, args.heads, head_dim, ffn_dim, args.vocab, True
)
with torch.device("meta"):
    model = ModelWithLoss(Decoder(shape))
for weight in model.to_empty(device="cpu").parameters():
    nn.init.normal_(weight, std=0.02) if weight.ndim >= 2 else nn.init.ones_(weight)
decay = [
    weight for name, weight in model.named_parameters() if weight.ndim >= 2 and "embed" not in name
]
keep = [weight for name, weight in model.named_parameters() if weight.ndim < 2 or "embed" in name]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": keep, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), fused=True)
if not args.alone:
    dist.init_process_group("gloo")
    model = DDP(model, bucket_cap_mb=args.bucket_mb, gradient_as_bucket_view=True, init_sync=False)
tokens, rng, ended_unix_s, losses = (
    np.load(args.data, mmap_mode="r"),
    np.random.default_rng(rank),
    [],
    [],
)
for _ in range(args.steps):
    starts = rng.integers(
        0, len(tokens) - args.seq_len, size=(args.microbatches, args.micro_batch, 1)
    )
    window = torch.from_numpy(tokens[starts + np.arange(args.seq_len + 1)].astype(np.int64))
    losses.append(0.0)
    for index, batch in enumerate(window, 1):
        with (
            contextlib.nullcontext()
            if args.alone or index == args.microbatches
            else model.no_sync()
        ):
            with torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bf16"):
                loss = model(batch[:, :-1], batch[:, 1:].contiguous()) / args.microbatches
            loss.backward()
        losses[-1] += loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    ended_unix_s.append(time.time())
Path(args.out, f"rank-{rank}.json").write_text(
    json.dumps({"ended_unix_s": ended_unix_s, "losses": losses})
)
if not args.alone:
    dist.destroy_process_group()
os._exit(0)  # gloo's threads now and then abort a finished rank in the interpreter's teardown
