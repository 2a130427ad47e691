"""Small models and batches that several tests share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch._dynamo  # FSDP2 imports it: here once, instead of half a second in every forked rank
from torch import nn

from phalanx.job.schema import Job
from phalanx.job.shapes.decoder import DecoderShape
from phalanx.nn.models.decoder import Decoder
from phalanx.parallel.parallelize import discover_transforms
from phalanx.plan.cluster import Cluster
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan

discover_transforms()  # imported before forking, like torch._dynamo

BATCH, SEQ_LEN, VOCAB = 12, 8, 37
CPU = Cluster("cpu", 8, 64 * 2**30)


def shape(*, tied: bool = True, num_kv_heads: int = 2, num_layers: int = 2) -> DecoderShape:
    return DecoderShape(num_layers, 32, 4, num_kv_heads, 8, 40, VOCAB, tied)


def decoder(*, tied: bool, dtype: torch.dtype, num_experts: int = 0) -> Decoder:
    """Real weights, the same on every rank and in every process, large enough to bend every
    nonlinearity."""
    whole = shape(tied=tied)
    if num_experts:
        whole = replace(whole, num_experts=num_experts, experts_per_token=2, expert_ffn_dim=20)
    module = Decoder(whole)
    fill(module)
    return module.to(dtype)


def decoder_of(num_layers: int) -> Decoder:
    """Deep enough to be cut; tied, in fp64."""
    module = Decoder(shape(num_layers=num_layers))
    fill(module)
    return module.to(torch.float64)


@torch.no_grad()
def fill(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(11)
    for parameter in module.parameters():
        parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
        if parameter.ndim == 1:
            parameter.add_(1.0)


def global_batches(steps: int, *, documents: bool = False) -> list[dict[str, torch.Tensor]]:
    """Whole global batches of BATCH sequences: uneven masks, and rows 3, 4 and 5 without any
    target.

    Whatever cut into ranks and microbatches the tests make (except two ranks with one microbatch
    each), some rank has a microbatch without a target.
    """
    generator = torch.Generator().manual_seed(5)
    batches = []
    for _ in range(steps):
        tokens = torch.randint(VOCAB, (BATCH, SEQ_LEN + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        keep = torch.rand(
            BATCH, 1, generator=generator
        )  # each row has its own share of masked targets
        targets[torch.rand(targets.shape, generator=generator) > keep] = -100
        targets[3:6] = -100
        batch = {"inputs": tokens[:, :-1].clone(), "targets": targets}
        batch["positions"] = torch.arange(SEQ_LEN).repeat(BATCH, 1)
        if documents:
            batch["document_ids"] = (torch.arange(SEQ_LEN) >= SEQ_LEN // 3).long().repeat(BATCH, 1)
        batches.append(batch)
    return batches


def share(
    batch: dict[str, torch.Tensor], rank: int, num_ranks: int, num_microbatches: int
) -> list[dict[str, torch.Tensor]]:
    """The microbatches of one rank: of each run of rows that all ranks take together, rank r
    takes the r-th part."""
    rows = torch.arange(BATCH).view(num_microbatches, num_ranks, -1)[:, rank]
    return [{key: tensor[part] for key, tensor in batch.items()} for part in rows]


def plan(
    num_ranks: int,
    num_microbatches: int = 1,
    *,
    recompute: str = "none",
    precision: str = "fp32",
    num_experts: int = 0,
    experts: dict[str, int] | None = None,
    **parallel: Any,
) -> Plan:
    """The plan of a job with this layout. `experts`: more keys of [model]."""
    job = Job.model_validate(
        {
            "model": {
                "dim": 32,
                "num_layers": 2,
                "num_heads": 4,
                "num_kv_heads": 2,
                "ffn_dim": 40,
                "num_experts": num_experts,
                **(experts or {}),
            },
            "data": {"seq_len": SEQ_LEN},
            "train": {
                "global_batch_size": BATCH,
                "micro_batch_size": BATCH // (num_ranks * num_microbatches),
                "recompute": recompute,
            },
            "parallel": {"ranks": num_ranks, **parallel},
            "precision": {"compute": precision},
        }
    )
    return make_plan(job, cluster=CPU, vocab_size=VOCAB)


def replace_parallel(a_plan: Plan, **values: Any) -> Plan:
    """The plan with other values for these keys of [parallel]; its layout stays as it is."""
    return replace(a_plan, parallel=a_plan.parallel.model_copy(update=values))


def replace_activations(a_plan: Plan, **values: Any) -> Plan:
    """The plan with another policy for activations: recompute, recompute_every,
    recompute_segments, offload."""
    return replace(a_plan, activations=replace(a_plan.activations, **values))


LAYOUTS: dict[int, dict[str, dict[str, int]]] = {
    1: {"one": {}},
    2: {
        "ddp": {"dp_replicate": 2},
        "zero1": {"dp_shard": 2, "zero_stage": 1},
        "zero3": {"dp_shard": 2, "zero_stage": 3},
        "zero2": {"dp_shard": 2, "zero_stage": 2},
    },
    4: {
        "ddp": {"dp_replicate": 4},
        "hybrid zero1": {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 1},
        "zero3": {"dp_shard": 4, "zero_stage": 3},
        "zero2": {"dp_shard": 4, "zero_stage": 2},
        "hsdp": {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 3},
    },
}


EVERY_LAYOUT: dict[int, dict[str, dict[str, int]]] = {
    **LAYOUTS,
    2: {**LAYOUTS[2], "tp": {"tp": 2}},
    4: {
        **LAYOUTS[4],
        "tp": {"tp": 4},
        "ddp-tp": {"dp_replicate": 2, "tp": 2},
        "zero3-tp": {"dp_shard": 2, "tp": 2},
    },
}

ENDS_ALONE = (0, 1, 1, 0)  # blocks of four stages: the first is the embedding, the last the head
WITH_PIPELINES: dict[int, dict[str, dict[str, Any]]] = {
    1: EVERY_LAYOUT[1],
    2: {
        **EVERY_LAYOUT[2],
        "pp-interleaved": {"pp": 2, "schedule": "interleaved", "stage_blocks": ENDS_ALONE},
    },
    4: {
        **EVERY_LAYOUT[4],
        "pp-1f1b": {"pp": 4, "stage_blocks": ENDS_ALONE},
        "pp-tp": {
            "pp": 2,
            "tp": 2,
            "schedule": "interleaved-zero-bubble",
            "stage_blocks": ENDS_ALONE,
        },
        "pp-zero1": {
            "pp": 2,
            "dp_shard": 2,
            "zero_stage": 1,
            "schedule": "zb-v",
            "stage_blocks": ENDS_ALONE,
        },
        "pp-zero3": {"pp": 2, "dp_shard": 2, "zero_stage": 3},
    },
}

# What checkpoints are crossed between: ways of one layout, and combinations that others leave out,
# besides.
SAVED: dict[int, dict[str, dict[str, Any]]] = {
    1: WITH_PIPELINES[1],
    2: {
        **WITH_PIPELINES[2],
        "cp": {"cp": 2},
        "zero1-offload": {"dp_shard": 2, "zero_stage": 1, "offload": "optimizer"},
        "zero3-whole": {
            "dp_shard": 2,
            "zero_stage": 3,
            "keep_whole_below": 64,
            "blocks_per_unit": 2,
        },
    },
    4: {
        **WITH_PIPELINES[4],
        "zero1-tp": {"dp_shard": 2, "tp": 2, "zero_stage": 1},
        "zero2-tp": {"dp_shard": 2, "tp": 2, "zero_stage": 2},
        "zero3-offload": {"dp_shard": 4, "zero_stage": 3, "offload": "optimizer"},
        "zero2-whole": {
            "dp_shard": 4,
            "zero_stage": 2,
            "keep_whole_below": 500,
            "blocks_per_unit": "all",
        },
        "zero3-cp": {"dp_shard": 2, "cp": 2, "zero_stage": 3},
        "cp-tp": {"cp": 2, "tp": 2, "cp_attention": "all-gather"},
        "pp-cp": {"pp": 2, "cp": 2},
    },
    8: {
        "hsdp-tp": {"dp_replicate": 2, "dp_shard": 2, "tp": 2, "zero_stage": 3},
        "pp-zero3-tp": {"pp": 2, "dp_shard": 2, "tp": 2, "zero_stage": 3},
    },
}

EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_dim": 24, "num_shared_experts": 1}
SAVED_EXPERTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {}},
    2: {"ep": {"dp_shard": 2, "ep": 2}, "ep-cp": {"cp": 2, "ep": 2}},
    4: {
        "zero1": {"dp_shard": 4, "zero_stage": 1},
        "zero3": {"dp_shard": 4, "zero_stage": 3},
        "ep": {"dp_shard": 4, "ep": 4},
        "half-ep": {"dp_shard": 4, "ep": 2},
        "hsdp-ep": {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
        "ep-tp": {"dp_shard": 2, "tp": 2, "ep": 2},
        "ep-cp": {"dp_shard": 2, "cp": 2, "ep": 4},
        "pp-ep": {"pp": 2, "dp_shard": 2, "ep": 2},
    },
}


def expert_pairs(*, quick: bool) -> list[tuple[str, str]]:
    """As `saved_pairs`, of a model with experts: of `make test` all that up to two ranks wrote, read
    by one rank and under each other layout."""
    every = [f"{name}-{n}" for n, of in SAVED_EXPERTS.items() for name in of if n <= 2 or not quick]
    return [
        (source, target)
        for target in every
        for source in every
        if not quick or target == "one-1" or source != target
    ]


# Of `SAVED` what `make test` leaves to `make test-all`: each way to cut is also one of two ranks, or
# beside another one of these, and of two ranks copies are those of hsdp, ZeRO-2 is beside tp, and cp
# beside ZeRO-3.
IN_OTHERS = (
    *("ddp", "zero3", "zero2", "ddp-tp", "zero3-tp", "pp-1f1b", "pp-zero3", "zero1-tp"),
    *("zero3-offload", "cp-tp", "pp-cp", "hybrid zero1", "zero2-whole"),
)
IN_OTHERS_OF_TWO = ("ddp", "zero2", "cp")


def list_saved_layouts(num_ranks: int, *, quick: bool) -> dict[str, dict[str, Any]]:
    """Of `SAVED` the layouts of so many ranks: all, or those of `make test`."""
    return {
        name: layout
        for name, layout in SAVED[num_ranks].items()
        if not quick
        or (num_ranks < 4 and name not in IN_OTHERS_OF_TWO)
        or (num_ranks == 4 and name not in IN_OTHERS)
    }


def saved_pairs(*, quick: bool) -> list[tuple[str, str]]:
    """(written under, read under) of `SAVED`: all, or those of `make test`: two that read, the first
    one each of what up to four ranks wrote, and the second one half of that."""
    every = [f"{name}-{n}" for n in SAVED for name in list_saved_layouts(n, quick=quick)]
    if not quick:
        return [(source, target) for target in every for source in every]
    return [(source, "one-1") for source in every] + [
        (source, "zero3-2") for source in ("one-1", *every[2::2])
    ]


class Odd(nn.Module):
    """No list of blocks, a convolution, both kinds of buffer, and one weight in two modules;
    returns logits."""

    def __init__(self) -> None:
        super().__init__()
        self.lookup = nn.Embedding(VOCAB, 12)
        self.mix = nn.Conv1d(12, 12, 3, padding=1)
        self.squash = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12), nn.GELU())
        self.out = nn.Linear(12, VOCAB)
        self.out.weight = self.lookup.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 12))
        self.register_buffer("shift", torch.linspace(-1, 1, 12), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.lookup(tokens) * self.scale + self.shift
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        return self.out(self.squash(x))


class SharedAcrossBlocks(nn.Module):
    """Two blocks that share a matrix (as ALBERT's do), and a third that is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lookup = nn.Embedding(VOCAB, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.SiLU()) for _ in range(3))
        self.blocks[1][0].weight = self.blocks[0][0].weight
        self.out = nn.Linear(12, VOCAB)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.lookup(inputs)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


class OneBlockTwice(nn.Module):
    """The same block object stands in the list twice."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(12, 12), nn.SiLU())
        self.lookup, self.blocks, self.out = (
            nn.Embedding(VOCAB, 12),
            nn.ModuleList([block, block]),
            nn.Linear(12, VOCAB),
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.lookup(inputs)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)
