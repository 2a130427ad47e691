"""The process of a dry run: reads a request, runs the program of one rank, and says what it saw.

`python -m phalanx.verify.dry_run.worker`, with the request on standard input and messages, a line
of JSON each, on standard output.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Mapping
from typing import Any

from phalanx.core.errors import LayoutError, PhalanxError
from phalanx.job.schema import Job
from phalanx.plan.plan import Plan
from phalanx.verify.dry_run.callers import CallerFinder
from phalanx.verify.dry_run.messages import AT, REFUSAL, RESULT, decode_dry_run_request
from phalanx.verify.dry_run.program import DryStepResult, run_dry_step
from phalanx.verify.dry_run.rank_kinds import RankKind
from phalanx.verify.dry_run.report import (
    CollectiveRow,
    RankKindReport,
    TimelineRow,
    sum_planned_tensor_bytes,
)
from phalanx.verify.dry_run.stand_ins import StageBoundarySpec
from phalanx.verify.dry_run.storage_log import (
    GRADIENTS,
    HOST,
    OPTIMIZER,
    PARAMETERS,
    build_memory_timeline,
    find_highest_point,
)


def main() -> int:
    """Answer one request. Returns the exit code."""
    # What the user's module prints must not come between our messages.
    stream = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # Last, as in ranks: nothing in the user's folder stands for a library that torch imports late.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())

    def say(message: Mapping[str, Any]) -> None:
        stream.write(json.dumps(message) + "\n")
        stream.flush()

    # Of torch about fake tensors, and of the user's module, in a run that trains nothing.
    warnings.simplefilter("ignore")
    job, plan, kind, boundary = decode_dry_run_request(sys.stdin.read())
    try:
        report = run_rank_kind(job, plan, kind, StageBoundarySpec.from_json(boundary), say)
    except PhalanxError as error:
        say({REFUSAL: error.to_json()})
        return 0
    except Exception as error:
        traceback.print_exc()
        say({REFUSAL: build_error_of_fake_tensors(error).to_json()})
        return 0
    say({RESULT: report.to_json()})
    return 0


def run_rank_kind(
    job: Job, plan: Plan, kind: RankKind, boundary: StageBoundarySpec, say: Any
) -> RankKindReport:
    """Run the program of one kind of rank, and report what it did."""
    began = time.perf_counter()
    step = run_dry_step(job, plan, kind.rank, boundary, tell=lambda words: say({AT: words}))
    return build_rank_kind_report(plan, kind, step, boundary, time.perf_counter() - began)


def build_rank_kind_report(
    plan: Plan, kind: RankKind, step: DryStepResult, boundary: StageBoundarySpec, wall_s: float
) -> RankKindReport:
    """The report of a step that was run."""
    timeline = build_memory_timeline(
        step.log, step.first_moment, on_host=list_host_categories(plan)
    )
    peak = find_highest_point(timeline)
    rows = [
        CollectiveRow(**collective.to_json(), count=count)
        for collective, count in step.counts.items()
    ]
    rows.sort(key=lambda row: row.count * row.num_bytes, reverse=True)
    return RankKindReport(
        name=kind.name,
        rank=kind.rank,
        stages=kind.stages,
        peak_bytes=peak.total_bytes,
        peak_when=peak.moment.describe(),
        peak_by_category=peak.by_category,
        planned_bytes=sum_planned_tensor_bytes(plan.memory_of_rank(kind.rank)),
        collectives=tuple(rows),
        timeline=tuple(
            TimelineRow(point.moment.describe(), point.total_bytes, point.by_category)
            for point in timeline
        ),
        num_traced=step.num_traced,
        num_microbatches=plan.num_microbatches,
        num_operations=step.num_operations,
        wall_s=wall_s,
        boundary=boundary.to_json(),
    )


def list_host_categories(plan: Plan) -> tuple[str, ...]:
    """The categories of memory that wait on the host, where a plan is for GPUs."""
    if plan.device == "cpu":
        return ()
    if plan.parallel.has_parameters_on_host:
        return (PARAMETERS, GRADIENTS, OPTIMIZER)
    if plan.parallel.has_state_on_host:
        return (OPTIMIZER,)
    return (HOST,) if plan.activations.offload else ()


def build_error_of_fake_tensors(error: Exception) -> LayoutError:
    """The error for a program that fails with fake tensors, and may run with real ones."""
    finder = CallerFinder()
    line = "the program"
    for frame, number in traceback.walk_tb(error.__traceback__):
        file = finder.find_source_file(frame.f_code)
        if file:
            line = f"{file}:{number} {frame.f_code.co_name}"
    words = str(error).strip().splitlines() or [""]
    return LayoutError(
        f"the program cannot be run with fake tensors: {line} raised {type(error).__name__}",
        why=words[0][:300] or None,
        fix="if phalanx train runs it, it needs what fake tensors lack: numbers, an address of"
        " memory, or an operator of its own without a form for them (torch.library.register_fake)",
    )


if __name__ == "__main__":
    sys.exit(main())
