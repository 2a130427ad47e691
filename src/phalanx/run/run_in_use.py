"""A look at the lock of a run directory before anything slow is imported, so that a run in use
is refused at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from phalanx.checkpoint.ownership.run_lock import refuse_run_of_live_job
from phalanx.job.load import load_job
from phalanx.launch.external import read_external_launch


def refuse_run_in_use(job_file: str | None, overrides: Sequence[str], resume: str | None) -> None:
    """Raise RunLockedError (exit 9) if a live job holds the run directory that these arguments lead
    to.

    Raises JobError for a job that cannot be loaded. Ranks of another launcher share one lock: only
    the leader takes it.
    """
    # A copy: asking writes what it finds into the environment.
    if read_external_launch(dict(os.environ)) is not None:
        return
    run_dir = resume
    if run_dir is None:
        run_dir = load_job(job_file, overrides).run.dir
    if run_dir:
        refuse_run_of_live_job(Path(run_dir))
