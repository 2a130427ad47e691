"""The job file's sections and keys.

Types, bounds and one-line descriptions live in this package and nowhere else, one section of the
file in one module. All names are imported from here: `from phalanx.job.schema import Job`.

Nothing derived is stored in a job: `None` means "chosen by the plan".
"""

from __future__ import annotations

from phalanx.job.schema.base import (
    AboveOne,
    Count,
    Fraction,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    Text,
)
from phalanx.job.schema.checkpoint import Checkpoint
from phalanx.job.schema.cluster import Cluster, Link
from phalanx.job.schema.data import Data, Source
from phalanx.job.schema.eval import Eval
from phalanx.job.schema.job import Job
from phalanx.job.schema.model import Model
from phalanx.job.schema.observe import Observe
from phalanx.job.schema.optim import Optim
from phalanx.job.schema.parallel import Parallel
from phalanx.job.schema.precision import Precision
from phalanx.job.schema.resilience import Resilience
from phalanx.job.schema.run import Run
from phalanx.job.schema.train import Train

__all__ = [
    "Fraction",
    "Positive",
    "Count",
    "PositiveFloat",
    "Text",
    "AboveOne",
    "NonNegativeFloat",
    "Section",
    "Run",
    "Model",
    "Source",
    "Data",
    "Train",
    "Eval",
    "Optim",
    "Parallel",
    "Precision",
    "Checkpoint",
    "Resilience",
    "Observe",
    "Link",
    "Cluster",
    "Job",
]
