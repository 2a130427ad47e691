"""The dry run of a plan: its kinds of rank, from the cache or run now, and what they say together.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from phalanx.job.schema import Job
from phalanx.plan.plan import Plan
from phalanx.verify.dry_run.processes import DryRunProcesses
from phalanx.verify.dry_run.rank_kinds import RankKind, choose_rank_kinds
from phalanx.verify.dry_run.report import DryRunReport, RankKindReport
from phalanx.verify.dry_run.result_cache import ResultCache


def dry_run_plan(
    job: Job,
    plan: Plan,
    *,
    all_kinds: bool = False,
    uses_cache: bool = True,
    tell: Callable[[str], None] = lambda words: None,
) -> DryRunReport:
    """Run one rank of each kind of `plan` with fake tensors.

    `tell` hears where each of them is. Raises LayoutError for a program that cannot be run without
    numbers, and what building the program raises.
    """
    kinds = choose_rank_kinds(plan, all_kinds=all_kinds)
    cache = ResultCache(job, plan)
    reports: dict[RankKind, RankKindReport] = {}
    if uses_cache:
        for kind in kinds:
            report = cache.find(kind)
            if report is not None:
                reports[kind] = report
    with DryRunProcesses(job, plan, tell) as processes:
        # The first stage knows the form of what stages hand on: the others wait for it.
        groups = [kinds[:1], kinds[1:]] if plan.pipeline is not None else [kinds]
        boundary: Mapping[str, Any] | None = None
        for group in groups:
            missing = [kind for kind in group if kind not in reports]
            for kind, report in processes.run(missing, boundary):
                cache.add(kind, report)
                reports[kind] = report
            boundary = reports[kinds[0]].boundary if kinds[0] in reports else None
    shape = plan.model_shape
    return DryRunReport(
        layout=str(plan.layout),
        world_size=plan.world_size,
        device=plan.device,
        capacity_bytes=plan.capacity_bytes,
        has_experts=shape.experts is not None,
        kinds=tuple(reports[kind] for kind in kinds),
    )
