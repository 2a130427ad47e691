"""One rank of a group that is judged: rank 0 writes the reference, then all go through the layouts one by one."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import os
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from phalanx.core.errors import ExitCode, LayoutError
from phalanx.job.schema import Job
from phalanx.mesh.mesh import Mesh, open_mesh
from phalanx.nn.build import build_objective
from phalanx.nn.objective import CausalOutput
from phalanx.optim.build import build_optimizer
from phalanx.parallel.model import READS_PARTS, Batch, ParallelModel, together
from phalanx.parallel.parallelize import parallelize, transforms
from phalanx.plan.coverage import check_rules, whole_by_default
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.verify.batches import as_dtype, global_steps, share_of, split_again
from phalanx.verify.follow import follow, follow_optimizer
from phalanx.verify.follow_lossy import digests_of, follow_lossy
from phalanx.verify.lossy import comparable, is_lossy, note_on, tolerance_of, unequal_ranks
from phalanx.verify.masks import Definition
from phalanx.verify.pipelines import num_microbatches
from phalanx.verify.reference import LossSum, evaluate_alone, plain_cross_entropy, train_alone
from phalanx.verify.row import ROWS, Row
from phalanx.verify.trace import write_trace
from phalanx.verify.trace_facts import BUFFERS, TRACE, UPDATED, Trace, read_trace
from phalanx.verify.untouched import build_untouched, described_failure, probe, taken
from phalanx.verify.verdict import TOLERANCE, Judge

transforms()  # imported in the server, once, instead of in every rank

CLIP, MOVE = 0.3, 0.01  # not one over a number of ranks or microbatches, so that its absence is told from theirs


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
            references = References(mesh, run_dir, job, first, dtype, steps)
            for case in cases:
                trace, mine = references.of(Plan.from_json(case["plan"]))
                if isinstance(trace, str):
                    row = _refused(case, payload["model"], dtype, trace)
                else:
                    row = judge(job, case, trace, mine, payload["model"])
                if mesh.rank == 0:
                    with open(run_dir / ROWS, "a") as file:
                        file.write(json.dumps(row.to_json()) + "\n")
    return ExitCode.OK


@dataclass
class References:
    """What one process computes, in as many microbatches as a layout wants where that makes a difference."""

    mesh: Mesh
    run_dir: Path
    job: Job
    plan: Plan
    dtype: str
    steps: list[list[Batch]]
    _found: dict[int, Trace | str] = field(default_factory=dict)

    def of(self, plan: Plan) -> tuple[Trace | str, list[list[Batch]]]:
        """(the trace, or why there is none; the microbatches of each step). Collective.

        Pipelines have more microbatches, of the same rows. Only a module whose rows see each other, or that counts its
        calls, knows the difference: it then has a reference of its own.
        """
        usual = self._of(len(self.steps[0]), self.steps)
        count = num_microbatches(plan)
        if isinstance(usual, str) or count in (0, len(self.steps[0])):
            return usual, self.steps
        steps = split_again(self.steps, count)
        return (self._of(count, steps) if usual.mixes_rows or BUFFERS in usual.sizes else usual), steps

    def _of(self, count: int, steps: list[list[Batch]]) -> Trace | str:
        if count not in self._found:
            directory, failure = self.run_dir / f"reference-{self.dtype}-{count}", ""
            if self.mesh.rank == 0 and not (directory / TRACE).exists():
                failure = _write_reference(directory, self.job, self.plan, self.dtype, steps)
            failure = self.mesh.gather_json(failure)[0]
            self._found[count] = failure or read_trace(directory)
        return self._found[count]


def judge(job: Job, case: Mapping[str, Any], trace: Trace, steps: list[list[Batch]], model_name: str) -> Row:
    """The row of one layout. Collective."""
    began = time.monotonic()
    plan = Plan.from_json(case["plan"])
    tolerance = tolerance_of(plan.compress, TOLERANCE["float32" if trace.narrows else trace.dtype])
    model: ParallelModel | None = None
    whole, trace = trace, (trace if plan.compress == "none" else comparable(trace, plan.compress))
    try:
        with open_mesh(plan.layout, device="cpu") as inner:
            module, notes = build_untouched(job, plan, trace.dtype, materialize=False)
            model = parallelize(module, plan, inner, seed=job.run.seed)
            objective = build_objective(job)
            mine = share_of(steps, inner.data_parallel_rank, plan.layout.data_parallel_size)
            if is_lossy(plan.compress):
                found = follow_lossy(model, objective, mine, whole)
            else:
                found = follow(model, objective, mine, trace, seed=job.run.seed)
            found.digests = digests_of(model) if plan.compress != "none" else {}
            if UPDATED in trace.sizes:
                module, _ = build_untouched(job, plan, trace.dtype, materialize=False)
                model = parallelize(module, plan, inner, seed=job.run.seed)
                optimizer = build_optimizer(model, job.optim)
                found.tensors[UPDATED] = follow_optimizer(model, optimizer, objective, mine, trace)
            seen = inner.gather_json(found.to_json())
    except LayoutError as error:  # the same on every rank: it is about the module
        if model is not None and model.is_amid_schedule:
            raise  # or about this rank alone, for which the others wait
        return _refused(case, model_name, trace.dtype, str(error))
    if plan.layout.tp > 1:
        rules = check_rules(plan.rules, plan.model_shape, plan.layout.tp)
        notes += tuple(filter(None, [whole_by_default(rules, plan.model_shape)]))
    if trace.narrows and trace.dtype == "float64":
        notes += ("the module computes in fewer digits than float64 on its way, and is judged by those",)
    verdict = Judge(
        trace,
        seen,
        tolerance=tolerance,
        data_parallel_size=plan.layout.reduced.data_parallel_size,
        tp=plan.layout.tp,
        cp=plan.layout.cp,
        pipeline=plan.pipeline,
    ).verdict()
    if plan.compress != "none":
        notes += (note_on(plan.compress, tolerance),)
        unequal = unequal_ranks(seen, trace.order, len(whole.steps) - 1)
        verdict = replace(verdict, errors={**verdict.errors, **found.apart}, first=verdict.first or unequal)
    if verdict.eased:
        notes += (f"judged by what float32 loses in one process: {', '.join(verdict.eased[:3])}",)
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
        compress=plan.compress,
        wall_s=wall_s,
    )


def _refused(case: Mapping[str, Any], model_name: str, dtype: str, why: str) -> Row:
    return Row(case["name"], case["parallel"], model_name, dtype, None, {}, 0.0, refused=why)


def _write_reference(directory: Path, job: Job, plan: Plan, dtype: str, steps: list[list[Batch]]) -> str:
    """Write it, or return why there is none: what the module does in one process is no layout's fault."""

    def build() -> nn.Module:
        return build_untouched(job, plan, dtype, materialize=True)[0]

    loss_sum = _loss_sum(job, plan)
    try:
        with _repeatable():
            seen = probe(build, loss_sum, steps[0][0], job.run.seed)
            module, updated = build(), None
            masks = Definition(module, job.run.seed)
            alone = train_alone(module, loss_sum, steps, clip=CLIP, move=MOVE, around=masks.of)
            if dtype == "float64" and not seen.narrows:  # else the root of a small second moment has few digits
                other = build()
                optimizer = build_optimizer(other, job.optim)
                masks = Definition(other, job.run.seed)
                by_optimizer = train_alone(
                    other, loss_sum, steps, clip=CLIP, move=MOVE, optimizer=optimizer, around=masks.of
                )
                updated = (other, by_optimizer)
            exact = directory.parent / directory.name.replace("float32", "float64")
            has_exact = dtype == "float32" and (exact / TRACE).exists()
            evaluate = functools.partial(evaluate_alone, loss_sum=loss_sum, microbatches=steps[-1])
            write_trace(
                directory,
                dtype,
                module,
                seen,
                alone,
                evaluate=evaluate,
                updated=updated,
                exact=exact if has_exact else None,
            )
    except Exception as error:
        traceback.print_exc()  # in the rank's log
        return described_failure(error, dtype)
    return ""


def _loss_sum(job: Job, plan: Plan) -> LossSum:
    """The textbook's loss for models of tokens, which train with a chunked one; or the user's own, or the model's."""
    is_textbook = job.model.objective is None and not plan.model_shape.reads_images
    objective = build_objective(job)

    def loss_sum(module: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        extras = taken(inspect.signature(module.forward).parameters, batch)
        args = (batch["inputs"],) if "inputs" in batch else ()
        outputs = module(*args, **extras)
        can_read = isinstance(outputs, torch.Tensor | CausalOutput)  # else the objective says what it wants
        if is_textbook and can_read:
            return plain_cross_entropy(outputs, batch)
        return objective(outputs if getattr(objective, READS_PARTS, False) else together(outputs), batch)

    return loss_sum


@contextmanager
def _repeatable() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if os.environ.get("RANK") else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
