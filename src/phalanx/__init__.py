"""phalanx plans, proves, runs and protects distributed PyTorch training.

The names below are the library; everything else may move. Nothing is imported before it is used, so that
`phalanx --help` and planning stay free of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Job": "phalanx.job.schema",
    "load_job": "phalanx.job.load",
    "Layout": "phalanx.plan.layout",
    "Plan": "phalanx.plan.planner",
    "make_plan": "phalanx.plan.planner",
    "PhalanxError": "phalanx.core.errors",
    "Mesh": "phalanx.mesh.mesh",
    "open_mesh": "phalanx.mesh.mesh",
    "running_ranks": "phalanx.mesh.mesh",
    "LogicalShard": "phalanx.mesh.logical",
    "ParallelModel": "phalanx.parallel.model",
    "parallelize": "phalanx.parallel.parallelize",
    "Trainer": "phalanx.train.trainer",
    "TrainState": "phalanx.train.state",
    "load_weights": "phalanx.checkpoint.weights",
}

__all__ = ["__version__", *_HOME]

if TYPE_CHECKING:
    from phalanx.checkpoint.weights import load_weights
    from phalanx.core.errors import PhalanxError
    from phalanx.job.load import load_job
    from phalanx.job.schema import Job
    from phalanx.mesh.logical import LogicalShard
    from phalanx.mesh.mesh import Mesh, open_mesh, running_ranks
    from phalanx.parallel.model import ParallelModel
    from phalanx.parallel.parallelize import parallelize
    from phalanx.plan.layout import Layout
    from phalanx.plan.planner import Plan, make_plan
    from phalanx.train.state import TrainState
    from phalanx.train.trainer import Trainer


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
