"""phalanx plans, proves, runs and protects distributed PyTorch training.

The names below are the library; everything else may move. Nothing is imported before it is used, so
that `phalanx --help` and planning stay free of torch.
"""

import os
import sys


def _leave_folder_behind() -> None:
    """`python -m phalanx` puts the folder you stand in before the libraries; the `phalanx` command
    does not.

    That entry goes before anything else is imported (__future__ and typing are files, too): nothing
    in a stranger's folder stands in for a library. `cli._app` puts the folder behind them, where
    your own modules are found.
    """
    if (
        sys.argv[:1] != ["-m"] or sys.flags.safe_path
    ):  # "-m" while the module that is to run is being looked for
        return
    if sys.orig_argv[-len(sys.argv)].removeprefix("-m").partition(".")[0] != "phalanx":
        return  # another package that imports us
    try:
        if sys.path[:1] == [os.getcwd()]:
            del sys.path[0]
    except FileNotFoundError:  # nobody can import from it
        pass


_leave_folder_behind()

from typing import TYPE_CHECKING, Any  # noqa: E402

__version__ = "0.1.0"

_MODULE_OF_PUBLIC_NAME = {
    "Job": "phalanx.job.schema",
    "load_job": "phalanx.job.load",
    "Layout": "phalanx.plan.layout",
    "Plan": "phalanx.plan.plan",
    "make_plan": "phalanx.plan.planner",
    "PhalanxError": "phalanx.core.errors",
    "Mesh": "phalanx.mesh.mesh",
    "open_mesh": "phalanx.mesh.mesh",
    "running_ranks": "phalanx.mesh.mesh",
    "LogicalShard": "phalanx.mesh.logical",
    "ParallelModel": "phalanx.parallel.model",
    "parallelize": "phalanx.parallel.parallelize",
    "shard_rules": "phalanx.core.shard_rules",
    "Trainer": "phalanx.train.trainer",
    "TrainState": "phalanx.train.state",
    "TrainingData": "phalanx.train.training_data",
    "RunStorage": "phalanx.checkpoint.run_storage",
    "load_weights": "phalanx.checkpoint.reading.weights",
    "verify_job": "phalanx.verify.drive",
    "VerifyResult": "phalanx.verify.result",
    "build_model": "phalanx.nn.build",
    "build_objective": "phalanx.nn.build",
    "build_optimizer": "phalanx.optim.build",
    "Bus": "phalanx.observe.bus",
    "SkippedStepsGuard": "phalanx.resilience.guards",
    "train_job": "phalanx.run.train_job",
    "resume_job": "phalanx.run.train_job",
    "RunResult": "phalanx.run.train_job",
}

__all__ = ["__version__", *_MODULE_OF_PUBLIC_NAME]

if TYPE_CHECKING:
    from phalanx.checkpoint.reading.weights import load_weights
    from phalanx.checkpoint.run_storage import RunStorage
    from phalanx.core.errors import PhalanxError
    from phalanx.core.shard_rules import shard_rules
    from phalanx.job.load import load_job
    from phalanx.job.schema import Job
    from phalanx.mesh.logical import LogicalShard
    from phalanx.mesh.mesh import Mesh, open_mesh, running_ranks
    from phalanx.nn.build import build_model, build_objective
    from phalanx.observe.bus import Bus
    from phalanx.optim.build import build_optimizer
    from phalanx.parallel.model import ParallelModel
    from phalanx.parallel.parallelize import parallelize
    from phalanx.plan.layout import Layout
    from phalanx.plan.plan import Plan
    from phalanx.plan.planner import make_plan
    from phalanx.resilience.guards import SkippedStepsGuard
    from phalanx.run.train_job import RunResult, resume_job, train_job
    from phalanx.train.state import TrainState
    from phalanx.train.trainer import Trainer
    from phalanx.train.training_data import TrainingData
    from phalanx.verify.drive import verify_job
    from phalanx.verify.result import VerifyResult


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF_PUBLIC_NAME:
        raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
    import importlib

    from phalanx.core.uncaught import install_one_line_refusal_hook

    install_one_line_refusal_hook()
    return getattr(importlib.import_module(_MODULE_OF_PUBLIC_NAME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
