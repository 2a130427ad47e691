"""`phalanx plan --from RUN`: time and memory of a job, from a run of one like it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from phalanx.cli._arguments import split_job_file_and_overrides
from phalanx.cli._json import print_json
from phalanx.cli._progress import show_progress_of_module


def print_plan_from(run_dir: Path, arguments: Sequence[str], *, as_json: bool) -> int:
    """Plan the job of the run with the overrides in `arguments` (or the job file there), and print
    what the run says of it. Returns the exit code."""
    from phalanx.plan.described_cluster import require_cluster_keys_have_effect
    from phalanx.plan.explain import describe_plan
    from phalanx.run.plan_from import extrapolate_plan_from_run, load_job_file_or_job_of_run
    from phalanx.run.plan_job import plan_job

    job_file, overrides = split_job_file_and_overrides(arguments)
    job = load_job_file_or_job_of_run(run_dir, job_file, overrides)
    require_cluster_keys_have_effect(job)
    with show_progress_of_module() as tell:
        planned = plan_job(job, checks_initial=False, tell=tell)
    result = extrapolate_plan_from_run(run_dir, planned.plan)
    if as_json:
        print_json("plan-from", result.to_json(), indent=1)
        return 0
    for line in (*describe_plan(planned.plan)[:2], *result.lines()):
        print(line)
    return 0
