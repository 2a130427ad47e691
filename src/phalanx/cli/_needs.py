"""What a job needs of this machine besides memory: checked at the door, before a rank starts."""

from __future__ import annotations

import importlib.util
import os
import shutil

from phalanx.core.errors import EnvironmentProblem
from phalanx.core.registry import is_foreign, resolve
from phalanx.job.schema import Job

SINKS = "phalanx.observe.sinks"


def wanted_sinks(job: Job) -> tuple[str, ...]:
    """The job's sinks; where it names none, TensorBoard if it is installed."""
    if job.observe.sinks is not None:
        return job.observe.sinks
    return ("tensorboard",) if importlib.util.find_spec("tensorboard") else ()


def preload(job: Job) -> tuple[str, ...]:
    """Modules that the ranks' server imports once, so that no rank spends a second on them."""
    # torch._dynamo: building on the meta device and DDP both import it.
    modules = ["torch", "torch._dynamo", "phalanx.cli._rank"]
    for kind in wanted_sinks(job):
        if not is_foreign(kind):
            modules += resolve(kind, SINKS, "PRELOAD")
    return tuple(modules)


def check_needs(job: Job, device: str) -> None:
    """Raise EnvironmentProblem (exit 6) for a package or a compiler that the job needs and this machine lacks."""
    for kind in wanted_sinks(job):
        if not is_foreign(kind):
            needed = resolve(kind, SINKS, "REQUIRES")
            if importlib.util.find_spec(needed) is None:
                raise EnvironmentProblem(f"the sink {kind} needs {needed}", fix=f"pip install 'phalanx[{kind}]'")
    compiler = os.environ.get("CXX") or "g++"
    if job.train.compile and device == "cpu" and not shutil.which(compiler):
        raise EnvironmentProblem(
            f"train.compile needs a C++ compiler and there is no {compiler}",
            fix="install g++ or set train.compile=false",
        )
