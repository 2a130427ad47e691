"""One rank of a group that is judged: rank 0 writes the reference, then all go through the layouts one by one."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from phalanx.core.errors import ExitCode, LayoutError
from phalanx.job.schema import Job
from phalanx.mesh.compat import TORCH_VERSION
from phalanx.mesh.mesh import open_mesh
from phalanx.parallel.parallelize import transforms
from phalanx.plan.coverage import check_rules, whole_by_default
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.verify.batches import as_dtype, global_steps, share_of
from phalanx.verify.layout_run import LayoutRun, judged_part
from phalanx.verify.lossy import note_on, tolerance_of, unequal_ranks
from phalanx.verify.references import References
from phalanx.verify.rerouted import compare_routes
from phalanx.verify.row import ROWS, Row
from phalanx.verify.verdict import TOLERANCE, Judge

FLOAT64_COMPILED = (2, 13)  # the first torch known to compile attention's backward in it; 2.11 is known not to
MOST_COMPILED = 64  # times, of one block: in training and evaluation, with and without gradients, for each module
transforms()  # imported in the server, once, instead of in every rank


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
                row = judge(job, case, references, payload["model"])
                if mesh.rank == 0:
                    with open(run_dir / ROWS, "a") as file:
                        file.write(json.dumps(row.to_json()) + "\n")
    return ExitCode.OK


def judge(job: Job, case: Mapping[str, Any], references: References, model_name: str) -> Row:
    """The row of one layout. Collective."""
    began = time.monotonic()
    plan, dtype = Plan.from_json(case["plan"]), references.dtype
    whole, steps = references.of(plan)
    if isinstance(whole, str):
        return _refused(case, model_name, dtype, whole)
    if plan.compile and dtype == "float64" and TORCH_VERSION < FLOAT64_COMPILED:
        first = ".".join(map(str, FLOAT64_COMPILED))
        why = f"torch {torch.__version__} compiles a backward in float64 to float32's; {first} does not"
        return _refused(case, model_name, dtype, why)
    tolerance = tolerance_of(plan.compress, TOLERANCE["float32" if whole.narrows else dtype])
    run = LayoutRun(job, plan)
    if plan.compile:  # what dynamo has compiled often, for whichever layout, it would leave eager without a word
        torch._dynamo.reset()
        torch._dynamo.config.recompile_limit = MOST_COMPILED
        torch._dynamo.config.fail_on_recompile_limit_hit = True
    try:
        with open_mesh(plan.layout, device="cpu") as inner:
            mine = share_of(steps, inner.data_parallel_rank, plan.layout.data_parallel_size)
            ran = run.beside(whole, mine, inner)
            routed = compare_routes(ran, references, whole, steps, tolerance)
            if routed.flips:  # judged by what one process computes that routes alike
                whole = routed.trace
                ran = run.beside(whole, mine, inner)
                routed = routed.confirmed_by(ran)
    except LayoutError as error:  # the same on every rank: it is about the module
        if run.is_amid_schedule:
            raise  # or about this rank alone, for which the others wait
        return _refused(case, model_name, dtype, str(error))
    trace, seen, notes = judged_part(whole, plan.compress), ran.seen, ran.notes
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
        ep=plan.layout.ep,
        pipeline=plan.pipeline,
        misrouted=routed.misrouted,
    ).verdict()
    if plan.compress != "none":
        notes += (note_on(plan.compress, tolerance),)
        unequal = unequal_ranks(seen, trace.order, len(whole.steps) - 1)
        verdict = replace(verdict, errors={**verdict.errors, **ran.apart}, first=verdict.first or unequal)
    if verdict.eased:
        notes += (f"judged by what rounding to float32 costs in one process: {', '.join(verdict.eased[:3])}",)
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
        flips=routed.flips,
        wall_s=wall_s,
    )


def _refused(case: Mapping[str, Any], model_name: str, dtype: str, why: str) -> Row:
    return Row(case["name"], case["parallel"], model_name, dtype, None, {}, 0.0, refused=why)
