"""`phalanx plan --dry-run`: the real program of the job, with fake tensors."""

from __future__ import annotations

import sys
import time

from phalanx.cli._json import print_json
from phalanx.cli._plan_search import build_unknown_gpus_error, set_num_devices_of_job
from phalanx.cli._progress import show_progress_of_module
from phalanx.core.errors import LayoutError
from phalanx.job.copies import apply_job_keys
from phalanx.job.schema import Job
from phalanx.observe.screen import QuietStream
from phalanx.run.plan_job import PlannedJob, plan_job
from phalanx.run.search_job import can_predict_step_times, search_layouts_of_job
from phalanx.verify.dry_run.describe import describe_dry_run
from phalanx.verify.dry_run.run_plan import dry_run_plan


class _ProgressLines:
    """A line on standard error for each part of each kind, with the seconds since the start."""

    def __init__(self) -> None:
        self._stream = QuietStream(sys.stderr)
        self._began = time.monotonic()

    def print_progress(self, words: str) -> None:
        if sys.stderr.isatty():
            self._stream.write(f"dry run {time.monotonic() - self._began:4.0f} s  {words}\n")
            self._stream.flush()


def print_dry_run(
    job: Job, *, all_kinds: bool, uses_cache: bool, gpus: str | None, as_json: bool
) -> None:
    """Plan `job`, run each kind of rank of the plan, and print what it holds and says to others."""
    planned = _plan_for_dry_run(job, gpus)
    tell = _ProgressLines().print_progress
    report = dry_run_plan(
        planned.job, planned.plan, all_kinds=all_kinds, uses_cache=uses_cache, tell=tell
    )
    if as_json:
        print_json("dry_run", report.to_json(), indent=1)
    else:
        print("\n".join(describe_dry_run(report)))


def _plan_for_dry_run(job: Job, gpus: str | None) -> PlannedJob:
    """The plan that is run: for a cluster of known devices the search's winner.

    Raises LayoutError where no layout fits, UsageError for `gpus` without devices that are known.
    """
    with show_progress_of_module() as tell:
        if can_predict_step_times(job):
            if gpus is not None:
                job = set_num_devices_of_job(job, gpus)
            winner = search_layouts_of_job(job, tell=tell).result.winner
            if winner is None:
                raise LayoutError(
                    "no layout fits, so there is none to run",
                    fix="see what would: the same command without --dry-run",
                )
            job = apply_job_keys(job, winner.job_keys)
        elif gpus is not None:
            raise build_unknown_gpus_error("--gpus is")
        return plan_job(job, checks_initial=False, tell=tell)
