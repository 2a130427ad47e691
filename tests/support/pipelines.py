"""Trains a module as a pipeline and says how far it is from one process, for the tests of
pipelines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from bare_loop import Tensors, Trace
from models import CPU, SEQ_LEN, VOCAB
from phalanx.core.errors import PhalanxError
from phalanx.job.schema import Job
from phalanx.mesh.logical import full_name
from phalanx.mesh.mesh import open_mesh
from phalanx.nn.objective import causal_cross_entropy
from phalanx.parallel.model import ParallelModel
from phalanx.parallel.parallelize import parallelize
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan

LAYERS, BATCH, MICRO, STEPS, LR, SEED = 8, 16, 2, 2, 0.3, 7
SCHEDULES = ("gpipe", "1f1b", "interleaved", "interleaved-zero-bubble", "zb-v", "dualpipe-v")
SPLIT_BACKWARDS = ("interleaved-zero-bubble", "zb-v", "dualpipe-v")
OBJECTIVE = causal_cross_entropy(5)


@dataclass(frozen=True)
class Case:
    """A module under a layout.

    `parallel` is what a job says there, `how` the rest of what makes the plan.
    """

    name: str
    module: Callable[[], nn.Module]
    parallel: dict[str, Any]
    how: dict[str, Any] = field(default_factory=dict)
    objective: Any = OBJECTIVE
    max_norm: float | None = 0.5
    weight_decay: float = 0.0
    batches: Callable[[], list[Tensors]] | None = None
    reference: str = ""
    """The name of the trace that it is compared with."""
    holds: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """What the first and the last stage hold besides: plans here know another model's names."""


def pipeline_plan(
    num_ranks: int,
    *,
    micro: int = MICRO,
    layers: int = LAYERS,
    precision: Any = "fp32",
    train: dict[str, Any] | None = None,
    **parallel: Any,
) -> Plan:
    body = {
        "model": {
            "dim": 32,
            "num_layers": layers,
            "num_heads": 4,
            "num_kv_heads": 2,
            "ffn_dim": 40,
        },
        "data": {"seq_len": SEQ_LEN},
        "train": {
            "global_batch_size": BATCH,
            "micro_batch_size": micro,
            "recompute": "none",
            **(train or {}),
        },
        "parallel": {"ranks": num_ranks, **parallel},
        "precision": precision if isinstance(precision, dict) else {"compute": precision},
    }
    return make_plan(Job.model_validate(body), cluster=CPU, vocab_size=VOCAB)


def token_batches(
    *, steps: int = STEPS, documents: bool = False, positions: bool = True, seq_len: int = SEQ_LEN
) -> list[Tensors]:
    """Global batches; each row has its own share of masked targets, and rows 3, 4 and 5 have
    none: one microbatch."""
    generator, found = torch.Generator().manual_seed(5), []
    for _ in range(steps):
        tokens = torch.randint(VOCAB, (BATCH, seq_len + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        targets[
            torch.rand(targets.shape, generator=generator)
            > torch.rand(BATCH, 1, generator=generator)
        ] = -100
        targets[3:6] = -100
        batch = {"inputs": tokens[:, :-1].clone(), "targets": targets}
        if positions:
            batch["positions"] = torch.arange(seq_len).repeat(BATCH, 1)
        if documents:
            batch["document_ids"] = (torch.arange(seq_len) >= seq_len // 3).long().repeat(BATCH, 1)
        found.append(batch)
    return found


def own_microbatches(
    batch: Tensors, a_plan: Plan, data_parallel_rank: int, micro: int = MICRO
) -> list[Tensors]:
    """Of each run of rows that all pipelines take together, the r-th part is that of the r-th."""
    shares = a_plan.layout.data_parallel_size
    rows = torch.arange(BATCH).view(-1, shares, micro)[:, data_parallel_rank]
    return [{key: tensor[part] for key, tensor in batch.items()} for part in rows]


def follow(
    model: ParallelModel,
    batches: Sequence[Tensors],
    reference: Trace,
    objective: Any = OBJECTIVE,
    *,
    max_norm: float | None = 0.5,
    micro: int = MICRO,
    weight_decay: float = 0.0,
) -> dict[str, float]:
    """The reference's steps.

    This rank's part of the error of each tensor: of its update in fp64, else of itself.
    """
    errors: dict[str, float] = {}
    optimizer = torch.optim.SGD(list(model.parameters()), lr=LR, weight_decay=weight_decay)
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        mine = own_microbatches(batch, model.plan, model.mesh.data_parallel_rank, micro)
        facts = model.reduce_and_clip(model.forward_backward(mine, objective), max_norm=max_norm)
        assert facts.should_apply
        assert facts.num_targets == int((batch["targets"] != -100).sum())
        errors[f"loss {step}"] = abs(facts.loss / reference.losses[step] - 1)
        errors[f"norm {step}"] = abs(facts.grad_norm / reference.norms[step] - 1)
        model.update(optimizer)
    is_wide = next(iter(reference.after.values())).dtype is torch.float64
    for name, shard in model.shards().items():
        if name not in reference.after:
            continue
        whole, before = reference.after[name], reference.before[name]
        moved = whole - before if is_wide else whole
        off = 0.0
        for box in shard.boxes:
            here, there = (
                tuple(slice(o, o + n) for o, n in zip(at, box.size, strict=True))
                for at in (box.local_offset, box.global_offset)
            )
            off += (shard.tensor[here] - whole[there]).double().square().sum().item()
        scale = moved.double().norm().item()
        errors[name] = off**0.5 / scale if scale else float(off > 0)
    return errors


def plan_of(case: Case, num_ranks: int) -> Plan:
    a_plan = pipeline_plan(num_ranks, **case.parallel, **case.how)
    if a_plan.pipeline is None:
        return a_plan
    return replace(a_plan, pipeline=replace(a_plan.pipeline, **case.holds))


def in_pipelines(
    rank: int, num_ranks: int, cases: Sequence[Case], references: dict[str, Trace]
) -> list[dict[str, float] | PhalanxError]:
    """Errors of each case on this rank, or why it was refused."""
    found: list[dict[str, float] | PhalanxError] = []
    for case in cases:
        try:
            a_plan = plan_of(case, num_ranks)
            with open_mesh(a_plan.layout, device="cpu") as mesh:
                model = parallelize(case.module(), a_plan, mesh, seed=SEED)
                batches = case.batches() if case.batches is not None else token_batches()
                trace = references[case.reference]
                micro = case.how.get("micro", MICRO)
                errors = follow(
                    model,
                    batches,
                    trace,
                    case.objective,
                    max_norm=case.max_norm,
                    micro=micro,
                    weight_decay=case.weight_decay,
                )
                found.append(
                    errors | {f"held {name}": 0.0 for name in dict(model.named_parameters())}
                )
        except PhalanxError as error:
            found.append(error)
    return found


def worst(mine: Sequence[Any], reference: Trace, tolerance: float) -> dict[str, float]:
    """What is further off than `tolerance` on any rank; NaN for what no rank has at all."""
    off: dict[str, float] = {}
    for errors in mine:
        assert isinstance(errors, dict), errors
        off |= {what: size for what, size in errors.items() if not size <= tolerance}
    held = {full_name(what) for errors in mine for what in errors}
    return off | {name: float("nan") for name in reference.after if name not in held}
