"""The form of a sample of a job's own dataset, read in another process: what a module of the
user's own is traced with.

Torch-free.
"""

from __future__ import annotations

import json

from phalanx.core.errors import DataError
from phalanx.job.module_probe import SampleForm, find_last_line, run_request_process
from phalanx.job.schema import Job

SAMPLE_PROBE_MODULE = "phalanx.data.sample_probe"
SAMPLE_PROBE_TIMEOUT_S = 120.0


def read_sample_form(job: Job) -> SampleForm:
    """The form of the first training sample. Raises DataError if it cannot be read."""
    request = {"source": job.data.source, "args": job.data.args, "seed": job.run.seed}
    try:
        printed = run_request_process(SAMPLE_PROBE_MODULE, request, SAMPLE_PROBE_TIMEOUT_S)
        form = json.loads(find_last_line(printed))["sample_form"]
        return {key: (tuple(shape), dtype) for key, (shape, dtype) in form.items()}
    except ChildProcessError as error:
        why = str(error)
    except (ValueError, TypeError, KeyError, AttributeError):
        why = "the process ended before it was read"
    raise DataError(
        f"the first sample of {job.data.source} cannot be read",
        why=why,
        fix=(
            "a plan for described GPUs traces the module with it; without data.source, with a"
            " sequence of tokens"
        ),
    )
