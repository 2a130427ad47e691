"""What the process that verifies sends its ranks. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from phalanx.core.typed_json import JsonObject, JsonRecord
from phalanx.job.schema import Job
from phalanx.plan.plan import Plan


@dataclass(frozen=True)
class VerifyCase:
    """One layout in one floating-point type. `parallel`: its keys in the job, for the row.

    `other_name` and `other_plan`: of a run through the trainer, where it is resumed, too."""

    dtype: str
    name: str
    parallel: JsonObject
    plan: Plan
    other_name: str = ""
    other_plan: Plan | None = None


@dataclass(frozen=True)
class VerifyPayload(JsonRecord):
    """Layouts that a group of `num_ranks` ranks compares with one process, for `num_steps` steps
    each.

    `data_dir`: the job's own dataset, None for made-up tokens. `model_name` is for the rows, which
    rank 0 writes into `run_dir`. `device`: where layouts compute, "cpu" or "cuda". `asked_job`: the
    job before it was changed to be judged; None: `job`.
    """

    job: Job
    run_dir: Path
    data_dir: Path | None
    num_steps: int
    num_ranks: int
    model_name: str
    cases: tuple[VerifyCase, ...]
    device: str = "cpu"
    asked_job: Job | None = None
