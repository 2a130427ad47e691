"""Check what a job needs of this machine besides memory, before a rank starts."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import cast

from phalanx.core.cpp_compiler import find_why_compiler_fails
from phalanx.core.errors import EnvironmentProblem
from phalanx.core.registry import import_object_of_kind, is_foreign
from phalanx.job.hugging_face import list_transformers_modules
from phalanx.job.schema import Job
from phalanx.observe.outlet import OpenSink, Sink
from phalanx.observe.sink_process import SINKS_PACKAGE, ProcessSink
from phalanx.plan.cluster import detect_least_compute_capability
from phalanx.plan.precision import FP8_FIX, MIN_FP8_CAPABILITY


def list_sinks_of_job(job: Job) -> tuple[str, ...]:
    """The job's sinks; where it names none, TensorBoard if it is installed."""
    if job.observe.sinks is not None:
        return job.observe.sinks
    if _is_package_installed("tensorboard"):
        return ("tensorboard",)
    return ()


def _is_package_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        # ImportError for a parent that is not there, ValueError for a module without a spec.
        return False


def list_sink_openers(job: Job, run_dir: Path) -> list[tuple[str, OpenSink]]:
    """Functions that open the job's sinks: here, or in a process of its own where the sink asks
    for one."""
    return [(kind, _build_sink_opener(kind, run_dir)) for kind in list_sinks_of_job(job)]


def _build_sink_opener(kind: str, run_dir: Path) -> OpenSink:
    if not is_foreign(kind) and import_object_of_kind(kind, SINKS_PACKAGE, "IS_APART"):
        return partial(ProcessSink, kind, run_dir)
    return lambda: cast(Sink, import_object_of_kind(kind, SINKS_PACKAGE, "open_sink")(run_dir))


def list_modules_to_preload(job: Job) -> tuple[str, ...]:
    """Modules that the ranks' server imports once, so that no rank spends a second on them."""
    # torch._dynamo: building on the meta device and DDP both import it.
    modules = [
        "torch",
        "torch._dynamo",
        "phalanx.run.rank",
        *list_transformers_modules(job.model.kind),
    ]
    if job.train.compile:
        # With torch's compiler, which is a second of a processor.
        modules.append("phalanx.run.compiling")
    for kind in list_sinks_of_job(job):
        if not is_foreign(kind):
            modules += import_object_of_kind(kind, SINKS_PACKAGE, "PRELOAD")
    return tuple(modules)


def require_packages(job: Job, device: str) -> None:
    """Raise EnvironmentProblem (exit 6) for a package or a compiler that the job needs and this
    machine lacks."""
    for kind in list_sinks_of_job(job):
        if not is_foreign(kind):
            missing = [
                name
                for name in import_object_of_kind(kind, SINKS_PACKAGE, "REQUIRES")
                if not _is_package_installed(name)
            ]
            if missing:
                fix = f"pip install 'phalanx[{kind}]'"
                raise EnvironmentProblem(f"the sink {kind} needs {' and '.join(missing)}", fix=fix)
    if job.observe.has_observer:
        # Here: a job without one does not pay for its imports.
        from phalanx.run.observer.requirements import require_observer_can_start

        require_observer_can_start(job)
    if job.precision.compute == "fp8":
        _refuse_fp8_where_unsupported(device)
    if job.train.compile and device == "cpu" and (why := find_why_compiler_fails()):
        raise EnvironmentProblem(
            f"train.compile needs a C++ compiler, and {why}",
            fix="install g++, let CXX name a compiler that works, or set train.compile=false",
        )


def _refuse_fp8_where_unsupported(device: str) -> None:
    if not _is_package_installed("torchao"):
        raise EnvironmentProblem(
            "precision.compute=fp8 needs torchao", fix=f"pip install 'phalanx[gpu]', or {FP8_FIX}"
        )
    if device != "cuda":
        return
    capability = detect_least_compute_capability()
    if capability is not None and capability < MIN_FP8_CAPABILITY:
        raise EnvironmentProblem(
            "precision.compute=fp8 needs GPUs of compute capability"
            f" {_format_version(MIN_FP8_CAPABILITY)}, and one here has"
            f" {_format_version(capability)}",
            fix=FP8_FIX,
        )


def _format_version(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
