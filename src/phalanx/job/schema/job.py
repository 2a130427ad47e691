"""The job: all sections of the file."""

from __future__ import annotations

import json
from typing import Any

from phalanx.job.schema.base import Section
from phalanx.job.schema.checkpoint import Checkpoint
from phalanx.job.schema.cluster import Cluster
from phalanx.job.schema.data import Data
from phalanx.job.schema.eval import Eval
from phalanx.job.schema.model import Model
from phalanx.job.schema.observe import Observe
from phalanx.job.schema.optim import Optim
from phalanx.job.schema.parallel import Parallel
from phalanx.job.schema.precision import Precision
from phalanx.job.schema.resilience import Resilience
from phalanx.job.schema.run import Run
from phalanx.job.schema.train import Train


class Job(Section):
    """All that the user said, with defaults filled in.

    Frozen; serialises to JSON and back unchanged.
    """

    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    train: Train = Train()
    eval: Eval = Eval()
    optim: Optim = Optim()
    parallel: Parallel = Parallel()
    precision: Precision = Precision()
    checkpoint: Checkpoint = Checkpoint()
    resilience: Resilience = Resilience()
    observe: Observe = Observe()
    cluster: Cluster = Cluster()

    @classmethod
    def from_json(cls, document: object) -> Job:
        """The job that `to_json` wrote."""
        # As JSON: strict models take a list for a tuple in JSON alone.
        return cls.model_validate_json(json.dumps(document))

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json")
