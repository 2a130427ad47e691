"""The names of the library, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import phalanx

NAMES = [
    "Bus",
    "Job",
    "Layout",
    "LogicalShard",
    "Mesh",
    "ParallelModel",
    "PhalanxError",
    "Plan",
    "RunResult",
    "RunStorage",
    "SkippedStepsGuard",
    "TrainState",
    "Trainer",
    "TrainingData",
    "VerifyResult",
    "__version__",
    "build_model",
    "build_objective",
    "build_optimizer",
    "load_job",
    "load_weights",
    "make_plan",
    "open_mesh",
    "parallelize",
    "resume_job",
    "running_ranks",
    "shard_rules",
    "train_job",
    "verify_job",
]


def imported_by(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after `statement`."""
    code = f"{statement}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    return set(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
    )


def test_the_names_are_exactly_these() -> None:
    assert sorted(phalanx.__all__) == NAMES
    assert dir(phalanx) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_there_and_says_what_it_is(name: str) -> None:
    found = getattr(phalanx, name)
    assert name == "__version__" or (found.__name__ == name and found.__doc__)


def test_a_name_does_not_depend_on_what_was_imported_before() -> None:
    """A submodule becomes an attribute of its package: one with the name of a function would
    hide it."""
    code = """
import importlib, pkgutil
import phalanx
before = {name: getattr(phalanx, name) for name in phalanx.__all__}
# Those of packages below become attributes of these.
for module in pkgutil.iter_modules(phalanx.__path__, "phalanx."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
changed = [name for name, value in before.items() if getattr(phalanx, name) is not value]
assert not changed, changed
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'phalanx' has no attribute 'trainer'"):
        _ = phalanx.trainer


def test_importing_the_package_imports_nothing_heavy() -> None:
    found = imported_by("import phalanx")
    assert "phalanx" in found
    assert found & {"torch", "numpy", "pydantic", "typer", "rich", "xxhash", "psutil"} == set()


WITHOUT_TORCH = (
    "plan.planner",
    "job.load",
    "job.module_probe",
    "launch.supervisor",
    "report.page",
    "observe.console",
    "checkpoint.manifest",
    "checkpoint.ownership.run_lock",
    "data.corpus",
    "verify.drive",
)


def test_rooms_without_torch() -> None:
    """In one interpreter: each room alone imports no more than all of them."""
    code = f"""
import importlib, sys
for room in {WITHOUT_TORCH}:
    importlib.import_module("phalanx." + room)
    if "torch" in sys.modules:
        sys.exit(f"{{room}} imports torch")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_a_room_imports_is_seen() -> None:
    """Else the test of the package alone would say nothing."""
    assert "pydantic" in imported_by("import phalanx.job.schema")
