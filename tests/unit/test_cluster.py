"""Which devices a machine has, with drivers, tools and libraries that answer, are slow, are
broken or are missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commands import DEADLINE_S

LOOK = """
import json, sys
from phalanx.core.errors import PhalanxError
from phalanx.plan import nvidia
from phalanx.plan.cluster import detect_least_compute_capability, detect_cluster
nvidia.NVIDIA_SMI_TIMEOUT_S = float(sys.argv[2])
try:
    found = detect_cluster(sys.argv[1])
    assert found.capability == (detect_least_compute_capability() if found.device == "cuda" else None)
    facts = (found.device, found.num_devices, found.memory_bytes, found.name, found.capability)
    print(json.dumps(facts))
except PhalanxError as error:
    print(json.dumps({"code": int(error.exit_code), "said": str(error)}))
"""
NO_NVML = "raise ImportError('not installed')"
NVML = """
from types import SimpleNamespace

class NVMLError(Exception):
    def __init__(self, value):
        self.value = value

nvmlMemory_v2, NVML_DEVICE_MIG_ENABLE = 2, 1
GPUS = [(name, total, reserved, slices) for name, total, reserved, slices in {gpus!r}]

def nvmlInit():
    if {refuses!r}:
        raise NVMLError({refuses!r})

def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return len(GPUS)
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetName(handle):
    return b"slice of " + GPUS[handle[0]][0] if isinstance(handle, tuple) else GPUS[handle][0]

def nvmlDeviceGetUUID(handle): return "MIG-%d-%d" % handle if isinstance(handle, tuple) else "GPU-%d" % handle
def nvmlDeviceGetCudaComputeCapability(handle): return (9, 0)

def nvmlDeviceGetMigMode(handle):
    if GPUS[handle][3] is None:
        raise NVMLError(3)
    return (1 if GPUS[handle][3] else 0, 0)

def nvmlDeviceGetMaxMigDeviceCount(handle): return 7

def nvmlDeviceGetMigDeviceHandleByIndex(handle, index):
    if index >= GPUS[handle][3]:
        raise NVMLError(6)
    return (handle, index)

def nvmlDeviceGetMemoryInfo(handle, version=1):
    _, total, reserved, slices = GPUS[handle[0] if isinstance(handle, tuple) else handle]
    if isinstance(handle, tuple):
        total, reserved = total // 8, 0
    return SimpleNamespace(total=total, reserved=reserved)
"""
H100 = "NVIDIA H100 80GB HBM3, 81559, GPU-aaaa, 9.0, Disabled"
A100 = "NVIDIA A100-SXM4-40GB, 40960, GPU-bbbb, 8.0, Disabled"


class Here:
    """A machine as `phalanx` finds it: what lies on PATH, which NVML can be imported, whether
    there is a driver."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("bin", "modules", "lib"):
            (folder / name).mkdir()
        self.nvml(NO_NVML)

    def nvml(self, source: str) -> None:
        (self.folder / "modules" / "pynvml.py").write_text(source)

    def smi(self, *lines: str) -> None:
        script = self.folder / "bin" / "nvidia-smi"
        script.write_text("\n".join(("#!/bin/sh", *lines, "")))
        script.chmod(0o755)

    def driver(self) -> None:
        """Any library will do: nothing in it is called."""
        maps = Path("/proc/self/maps").read_text().split()
        library = next(word for word in maps if word.startswith("/") and "/libm.so" in word)
        (self.folder / "lib" / "libcuda.so.1").symlink_to(library)

    def detect(self, device: str = "auto", *, patience_s: float = 20.0, **variables: str) -> Any:
        environ = {
            name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"
        } | variables
        for name, folder, rest in (
            ("PATH", "bin", "/usr/bin:/bin"),
            ("LD_LIBRARY_PATH", "lib", ""),
        ):
            environ[name] = f"{self.folder / folder}:{rest}".rstrip(":")
        environ["PYTHONPATH"] = os.pathsep.join(
            [str(self.folder / "modules"), *filter(None, sys.path)]
        )
        command = [sys.executable, "-c", LOOK, device, str(patience_s)]
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=DEADLINE_S
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def here(tmp_path: Path) -> Here:
    if Path("/dev/nvidia0").exists():
        pytest.skip("this machine has a GPU, which would be found")
    return Here(tmp_path)


def test_a_machine_without_anything_is_planned_for_its_cores(here: Here) -> None:
    assert here.detect()[0] == "cpu"
    refusal = here.detect("cuda")
    assert refusal["code"] == 6
    assert refusal["said"].startswith("no GPU was found")


def test_nvidia_smi_is_enough(here: Here) -> None:
    here.smi(f"echo '{H100}'", f"echo '{A100}'")
    assert here.detect() == ["cuda", 2, 40960 * 2**20, "NVIDIA H100 80GB HBM3", [8, 0]]
    assert here.detect("cpu")[0] == "cpu"


def test_nvml_is_asked_first_and_knows_what_the_driver_keeps(here: Here) -> None:
    here.smi("exit 1")
    here.nvml(NVML.format(gpus=[(b"H100", 80 * 2**30, 2**29, None)] * 4, refuses=0))
    assert here.detect() == ["cuda", 4, 80 * 2**30 - 2**29, "H100", [9, 0]]


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        ("0", 81559),
        ("1", 40960),
        ("GPU-b", 40960),
        ("0,7,1", 81559),
        ("1,0", 40960),
        ("", "cpu"),
        ("-1", "cpu"),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(
    here: Here, visible: str, found: Any
) -> None:
    here.smi(f"echo '{H100}'", f"echo '{A100}'")
    device, count, memory, *_ = here.detect(CUDA_VISIBLE_DEVICES=visible)
    assert (device if found == "cpu" else memory / 2**20) == found
    if found != "cpu":
        assert count == (2 if visible == "1,0" else 1)


def test_a_list_that_names_no_gpu_is_refused(here: Here) -> None:
    here.smi(f"echo '{H100}'")
    assert here.detect(CUDA_VISIBLE_DEVICES="3")["said"].startswith(
        "CUDA_VISIBLE_DEVICES is '3', which names none"
    )


def test_a_slice_of_a_gpu_has_its_own_memory(here: Here) -> None:
    here.nvml(NVML.format(gpus=[(b"A100", 80 * 2**30, 0, 3)] * 2, refuses=0))
    assert here.detect() == [
        "cuda",
        1,
        10 * 2**30,
        "slice of A100",
        [9, 0],
    ], "CUDA shows a process one slice"
    assert here.detect(CUDA_VISIBLE_DEVICES="MIG-1-2")[1:3] == [1, 10 * 2**30]
    here.nvml(NO_NVML)
    here.smi("echo 'NVIDIA A100, 81920, GPU-cccc, 8.0, Enabled'")
    refusal = here.detect()
    assert refusal["code"] == 6
    assert "MIG slices" in refusal["said"]


SILENCES = {
    "slow": (["exec sleep 100"], "nvidia-smi did not answer in 1 s"),
    "odd": (["echo '<html>proxy error</html>'"], "<html>proxy error</html>"),
    "fails": (
        ["echo 'couldn'\"'\"'t communicate with the NVIDIA driver'", "exit 9"],
        "communicate with the NVIDIA driver",
    ),
    "missing": ([], "there is no nvidia-smi"),
}


@pytest.mark.parametrize("how", list(SILENCES))
def test_a_driver_that_gives_no_answer_is_not_taken_for_no_gpu(here: Here, how: str) -> None:
    lines, why = SILENCES[how]
    if lines:
        here.smi(*lines)
    here.driver()
    # Who answers may need longer on a busy machine.
    patience_s = 1.0 if how == "slow" else 60.0
    for device in ("auto", "cuda"):
        refusal = here.detect(device, patience_s=patience_s)
        assert refusal["code"] == 6
        assert why in refusal["said"]
        assert "nvidia-ml-py is not installed" in refusal["said"]
        assert "cluster.device=cpu" in refusal["said"]
        assert "\n" not in refusal["said"]
    assert here.detect("cpu", patience_s=patience_s)[0] == "cpu"


def test_a_tool_without_a_driver_is_no_sign_of_a_gpu(here: Here) -> None:
    """As in images that are used on machines with GPUs and without."""
    here.smi("echo 'NVIDIA-SMI has failed'", "exit 9")
    here.nvml(NVML.format(gpus=[], refuses=12))
    assert here.detect()[0] == "cpu"


def test_a_folder_of_path_that_may_not_be_entered_holds_no_tool(here: Here) -> None:
    """After `su`, PATH may have folders of root's, and the system then says "permission denied" of
    a tool that is nowhere; it says so to root of what is no file."""
    (here.folder / "bin" / "nvidia-smi").mkdir()
    assert here.detect()[0] == "cpu"


def test_a_tool_that_may_not_be_run_is_a_sign_of_a_gpu(here: Here) -> None:
    here.smi()
    (here.folder / "bin" / "nvidia-smi").chmod(0o644)
    refusal = here.detect()
    assert refusal["code"] == 6
    assert "nvidia-smi cannot be run: Permission denied" in refusal["said"]


def test_a_driver_without_a_gpu_says_so(here: Here) -> None:
    here.driver()
    here.smi("echo 'No devices were found'", "exit 6")
    assert here.detect()[0] == "cpu"
