"""One rank of a group that is judged: rank 0 writes the reference, then all go through the layouts one by one."""

from __future__ import annotations

import inspect
import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from phalanx.core.errors import ExitCode, LayoutError
from phalanx.job.schema import Job
from phalanx.mesh.logical import module_shards
from phalanx.mesh.mesh import open_mesh
from phalanx.nn.build import build_model, build_objective
from phalanx.optim.build import build_optimizer
from phalanx.parallel.model import Batch
from phalanx.parallel.parallelize import parallelize, transforms
from phalanx.plan.layout import Layout
from phalanx.plan.planner import Plan
from phalanx.verify.batches import as_dtype, global_steps, share_of
from phalanx.verify.follow import follow, follow_optimizer
from phalanx.verify.reference import LossSum, forward_order, plain_cross_entropy, train_alone
from phalanx.verify.row import ROWS, Row
from phalanx.verify.trace import write_trace
from phalanx.verify.trace_facts import TRACE, UPDATED, Trace, read_trace
from phalanx.verify.verdict import TOLERANCE, Judge

transforms()  # imported in the server, once, instead of in every rank

CLIP, MOVE = 0.5, 0.01
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def main(payload: dict[str, Any]) -> int:
    """`payload`: job, run_dir, data_dir, num_steps, num_ranks, model (its name), work (dtype, name, parallel, plan).
    Appends a row for each piece of work to run_dir/rows.jsonl, and returns 0 whatever they say.
    """
    job = Job.model_validate_json(json.dumps(payload["job"]))
    num_ranks, run_dir = int(payload["num_ranks"]), Path(payload["run_dir"])
    with open_mesh(Layout(dp_replicate=num_ranks), device="cpu") as mesh:
        first = Plan.from_json(payload["work"][0]["plan"])
        data_dir = Path(payload["data_dir"]) if payload["data_dir"] else None
        made = global_steps(job, first, data_dir, num_steps=payload["num_steps"])
        for dtype, cases in itertools.groupby(payload["work"], key=lambda item: item["dtype"]):
            steps = as_dtype(made, getattr(torch, dtype))
            directory = run_dir / f"reference-{dtype}"
            if mesh.rank == 0 and not (directory / TRACE).exists():
                _write_reference(directory, job, first, dtype, steps)
            mesh.barrier()
            trace = read_trace(directory)
            for case in cases:
                row = judge(job, case, trace, steps, payload["model"])
                if mesh.rank == 0:
                    with open(run_dir / ROWS, "a") as file:
                        file.write(json.dumps(row.to_json()) + "\n")
    return ExitCode.OK


def judge(job: Job, case: Mapping[str, Any], trace: Trace, steps: list[list[Batch]], model_name: str) -> Row:
    """The row of one layout. Collective."""
    began = time.monotonic()
    plan = Plan.from_json(case["plan"])
    tolerance = TOLERANCE[trace.dtype]
    try:
        with open_mesh(plan.layout, device="cpu") as inner:
            module, notes = _module(job, plan, trace.dtype, materialize=False)
            model = parallelize(module, plan, inner, seed=job.run.seed)
            objective = build_objective(job)
            mine = share_of(steps, inner.data_parallel_rank, plan.layout.data_parallel_size)
            found = follow(model, objective, mine, trace)
            if UPDATED in trace.sizes:
                module, _ = _module(job, plan, trace.dtype, materialize=False)
                model = parallelize(module, plan, inner, seed=job.run.seed)
                optimizer = build_optimizer(model, job.optim)
                found.tensors[UPDATED] = follow_optimizer(model, optimizer, objective, mine, trace)
            seen = inner.gather_json(found.to_json())
    except LayoutError as error:  # the same on every rank: it is about the module
        return Row(case["name"], case["parallel"], model_name, trace.dtype, None, {}, tolerance, refused=str(error))
    dp = plan.layout.data_parallel_size
    verdict = Judge(trace, seen, tolerance=tolerance, data_parallel_size=dp).verdict()
    wall_s = round(time.monotonic() - began, 3)
    return Row(
        layout=case["name"],
        parallel=case["parallel"],
        model=model_name,
        dtype=trace.dtype,
        ok=verdict.first is None,
        errors=verdict.errors,
        tolerance=tolerance,
        first=verdict.first,
        notes=notes,
        wall_s=wall_s,
    )


def _module(job: Job, plan: Plan, dtype: str, *, materialize: bool) -> tuple[nn.Module, tuple[str, ...]]:
    """The job's module in `dtype`, in training mode, without dropout; and what was done to it."""
    module = build_model(job, plan.model_shape).to(getattr(torch, dtype))
    notes = []
    dropped = [name for name, part in module.named_modules() if isinstance(part, DROPOUTS) and part.p > 0]
    for name in dropped:
        module.get_submodule(name).p = 0.0
    if dropped:
        notes.append(f"{len(dropped)} dropout layers are switched off: what they draw depends on the layout")
    if materialize and any(p.is_meta for p in module.parameters()):
        module.to_empty(device="cpu")
        shards, _ = module_shards(module, replica=0, num_replicas=1)
        with torch.no_grad():
            module.initialize(shards, job.run.seed)
    return module, tuple(notes)


def _write_reference(directory: Path, job: Job, plan: Plan, dtype: str, steps: list[list[Batch]]) -> None:
    module, _ = _module(job, plan, dtype, materialize=True)
    loss_sum = _loss_sum(job, plan)
    order = forward_order(module, lambda: loss_sum(module, steps[0][0]))
    alone = train_alone(module, loss_sum, steps, clip=CLIP, move=MOVE)
    updated = None
    if dtype == "float64":  # in float32 the root of a small second moment has few digits that agree
        other, _ = _module(job, plan, dtype, materialize=True)
        optimizer = build_optimizer(other, job.optim)
        updated = (other, train_alone(other, loss_sum, steps, clip=CLIP, move=MOVE, optimizer=optimizer))
    with _repeatable():
        write_trace(directory, dtype, module, order, alone, updated=updated)


def _loss_sum(job: Job, plan: Plan) -> LossSum:
    """The textbook's loss for models of tokens, which train with a chunked one; or the user's own, or the model's."""
    is_textbook = job.model.objective is None and not plan.model_shape.reads_images
    chosen = plain_cross_entropy if is_textbook else build_objective(job)

    def loss_sum(module: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        taken = inspect.signature(module.forward).parameters
        extras = {key: t for key, t in batch.items() if key not in ("inputs", "targets") and key in taken}
        args = (batch["inputs"],) if "inputs" in batch else ()
        return chosen(module(*args, **extras), batch)

    return loss_sum


@contextmanager
def _repeatable() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if os.environ.get("RANK") else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
