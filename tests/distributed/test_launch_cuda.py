"""The process that forks ranks never begins to use CUDA: after that, no rank could."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_launch import Run, _nothing_is_left, run  # noqa: F401  (fixtures)

from phalanx.job.schema import Job
from phalanx.launch.server_process import _build_server_environment
from phalanx.observe.events import Note
from phalanx.run.needs import list_modules_to_preload

DRIVER = """
static int begun;
int cuInit(unsigned flags) { begun = 1; return 0; }
int cuDeviceGetCount(int *count) { if (!begun) return 3; *count = 1; return 0; }
"""
BEGINS_CUDA = "import ctypes\nctypes.CDLL({driver!r}).cuInit(0)\n"


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library that answers as NVIDIA's driver does, and beside it a module that begins to use
    it when imported."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler to build a driver with")
    (tmp_path / "driver.c").write_text(DRIVER)
    library = tmp_path / "libcuda.so.1"
    command = [
        compiler,
        "-shared",
        "-fPIC",
        "-Wl,-soname,libcuda.so.1",
        "-o",
        str(library),
        str(tmp_path / "driver.c"),
    ]
    subprocess.run(command, check=True)
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "begins_cuda.py").write_text(BEGINS_CUDA.format(driver=str(library)))
    (modules / "loads_driver.py").write_text(f"import ctypes\nctypes.CDLL({str(library)!r})\n")
    monkeypatch.syspath_prepend(str(modules))
    return library


def test_a_module_that_begins_cuda_is_left_to_the_ranks(run: Run, driver: Path) -> None:  # noqa: F811
    modules = ("json", "begins_cuda", "loads_driver")
    outcome = run.supervise("uses_the_driver", preload=modules, payload={"driver": str(driver)})
    assert (outcome.exit_code, outcome.attempts) == (0, 1), outcome.message
    assert run.marked() == [f"{name}-{rank}-0" for name in ("begun", "clean") for rank in (0, 1)]
    said = [
        (note.event.code, note.event.facts)
        for note in run.events(Note)
        if isinstance(note.event, Note)
    ]
    assert [facts for code, facts in said if code == "preload_begins_cuda"] == [
        {"module": "begins_cuda"}
    ]
    assert [code for code, _ in said].count("server_ready") == 1


@pytest.mark.long
def test_a_driver_that_is_only_loaded_is_no_obstacle(run: Run, driver: Path) -> None:  # noqa: F811
    outcome = run.supervise(
        "uses_the_driver", preload=("loads_driver",), payload={"driver": str(driver)}
    )
    assert outcome.exit_code == 0, outcome.message
    assert not [
        n
        for n in run.events(Note)
        if isinstance(n.event, Note) and n.event.code == "preload_begins_cuda"
    ]


PRELOADS = """
import importlib, sys, torch

def refuse(*args, **kwargs):
    raise SystemExit("CUDA was asked for while modules are imported that forks are to share")

# As in a build for GPUs, on a machine with one: NVML is asked without beginning to use CUDA.
torch.cuda.is_available = lambda: torch.cuda._nvml_based_avail() or refuse()
torch.cuda.device_count = lambda: 1
torch.cuda._lazy_init = refuse
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


@pytest.mark.long
def test_nothing_that_the_server_imports_begins_cuda(tmp_path: Path) -> None:
    """torchao, which transformers imports where it is installed, asks torch for GPUs four times."""
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    modules = list_modules_to_preload(Job.model_validate({"model": {"kind": f"hf:{tmp_path}"}}))
    assert "transformers.modeling_utils" in modules
    command = [sys.executable, "-W", "ignore", "-c", PRELOADS, *modules]
    done = subprocess.run(
        command, env=_build_server_environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
