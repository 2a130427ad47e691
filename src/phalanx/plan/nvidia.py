"""Which NVIDIA GPUs this process may use: asked of NVML, else of nvidia-smi.

Torch-free, and without beginning to use them. A machine that has a driver and gives no answer is
never taken for one without GPUs.
"""

from __future__ import annotations

import functools
import glob
import importlib
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.core.errors import EnvironmentProblem

NVIDIA_SMI_TIMEOUT_S = 60.0  # eight GPUs without persistence mode are woken one after the other


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one MIG slice. `capability` is (0, 0) if it is unknown."""

    name: str
    memory_bytes: int
    uuid: str = ""
    capability: tuple[int, int] = (0, 0)


class _GpuQueryFailure(Exception):
    """The reason why a source (NVML, nvidia-smi) tells nothing of GPUs. `is_absent`: the source is
    not there."""

    def __init__(self, why: str, *, is_absent: bool = False) -> None:
        super().__init__(why)
        self.is_absent = is_absent


def list_visible_gpus() -> tuple[Gpu, ...]:
    """The GPUs that CUDA would show this process, in their order; none on a machine without.

    Raises EnvironmentProblem (exit 6) where there is a driver and neither NVML nor nvidia-smi
    answers, or where CUDA_VISIBLE_DEVICES names none of the GPUs that are there.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # CUDA shows none for these two, and NVML would list all.
    if visible is not None and visible.strip() in ("", "-1"):
        return ()
    gpus = _query_all_gpus(os.environ.get("PATH", ""))
    if visible is None or not gpus:
        return gpus
    chosen = _select_visible_gpus(gpus, visible.split(","))
    if not chosen:
        raise EnvironmentProblem(
            f"CUDA_VISIBLE_DEVICES is {visible!r}, which names none of the {len(gpus)} GPUs here",
            fix="unset it, or set cluster.device=cpu",
        )
    return chosen


@functools.cache
def _query_all_gpus(path: str) -> tuple[Gpu, ...]:
    """`path` is where nvidia-smi is looked for. Asked once: an answer can take many seconds."""
    silences = []
    # NVML first: it tells MIG slices and reserved memory, which this query of nvidia-smi does not.
    for ask in (_query_nvml, _query_nvidia_smi):
        try:
            return ask()
        except _GpuQueryFailure as silence:
            silences.append(silence)
    sign = _find_sign_of_nvidia_driver()
    # Two silent sources prove no machine without GPUs, only two that are not installed do.
    if sign is None and all(silence.is_absent for silence in silences):
        return ()
    raise EnvironmentProblem(
        f"{sign or 'nvidia-smi'} is here, and its GPUs cannot be asked for",
        why="; ".join(map(str, silences)),
        fix=(
            "pip install 'phalanx[gpu]' and run nvidia-smi to see what it says, or set"
            " cluster.device=cpu"
        ),
    )


def _find_sign_of_nvidia_driver() -> str | None:
    nodes = sorted(glob.glob("/dev/nvidia[0-9]*"))
    if nodes:
        return nodes[0]
    import ctypes  # here: most commands look for no driver

    try:
        # Loading the library initialises nothing: no context, and no memory of a GPU.
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return "NVIDIA's driver (libcuda.so.1)"


def _query_nvml() -> tuple[Gpu, ...]:
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        raise _GpuQueryFailure("nvidia-ml-py is not installed", is_absent=True) from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        # By NVML's own numbers where a release of nvidia-ml-py lacks the names.
        absent = (
            getattr(nvml, "NVML_ERROR_LIBRARY_NOT_FOUND", 12),
            getattr(nvml, "NVML_ERROR_DRIVER_NOT_LOADED", 9),
        )
        code = getattr(error, "value", None)
        raise _GpuQueryFailure(f"NVML says: {error}", is_absent=code in absent) from None
    try:
        gpus: list[Gpu] = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            capability = tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle))
            gpus += [
                _build_nvml_gpu(nvml, part, capability)
                for part in _list_gpu_or_mig_slices(nvml, handle)
            ]
        return tuple(gpus)
    except nvml.NVMLError as error:
        raise _GpuQueryFailure(f"NVML says: {error}") from None
    finally:
        # NVML counts its users: each nvmlInit wants a shutdown, after an error as well.
        nvml.nvmlShutdown()


def _list_gpu_or_mig_slices(nvml: Any, handle: Any) -> list[Any]:
    """The GPU, or its MIG slices where it is cut into some: CUDA does not show the whole one
    then."""
    try:
        is_cut = nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE
    except nvml.NVMLError:  # not of a kind that can be cut
        return [handle]
    if not is_cut:
        return [handle]
    slices = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            slices.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
        except nvml.NVMLError:  # no slice has this number
            continue
    return slices


def _build_nvml_gpu(nvml: Any, handle: Any, capability: tuple[int, int]) -> Gpu:
    name, uuid = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle)
    try:  # the second version knows what the driver keeps for itself
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        usable = memory.total - memory.reserved
    except (nvml.NVMLError, AttributeError, TypeError):
        usable = nvml.nvmlDeviceGetMemoryInfo(handle).total
    return Gpu(_decode_text(name), int(usable), _decode_text(uuid), capability)


def _decode_text(value: Any) -> str:
    # Old releases of nvidia-ml-py return bytes.
    if isinstance(value, bytes):
        return value.decode()
    return str(value)


def _query_nvidia_smi() -> tuple[Gpu, ...]:
    fields = "name,memory.total,uuid,compute_cap,mig.mode.current"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, errors="replace", timeout=NVIDIA_SMI_TIMEOUT_S
        )
    except FileNotFoundError:
        raise _GpuQueryFailure("there is no nvidia-smi", is_absent=True) from None
    except OSError as error:
        # A folder of PATH that this user may not enter (root's, after `su`) makes the system say
        # "permission denied" of any program that is in none of them.
        if not _lies_on_path("nvidia-smi"):
            raise _GpuQueryFailure("there is no nvidia-smi", is_absent=True) from None
        raise _GpuQueryFailure(f"nvidia-smi cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise _GpuQueryFailure(f"nvidia-smi did not answer in {NVIDIA_SMI_TIMEOUT_S:g} s") from None
    output = " ".join((done.stdout + done.stderr).split())[:120]
    if "no devices were found" in output.lower():
        return ()
    if done.returncode != 0:  # an image that has it, on a machine without a driver
        reason = output or f"exit code {done.returncode}"
        raise _GpuQueryFailure(f"nvidia-smi says: {reason}", is_absent=True)
    return tuple(_parse_nvidia_smi_line(line) for line in done.stdout.splitlines() if line.strip())


def _lies_on_path(name: str) -> bool:
    """Whether a folder of PATH has such a file, be it one that may not be run."""
    return any(os.path.isfile(os.path.join(folder, name)) for folder in os.get_exec_path())


def _parse_nvidia_smi_line(line: str) -> Gpu:
    # From the right: the name, which comes first, may hold a comma.
    parts = [part.strip() for part in line.rsplit(",", 4)]
    if len(parts) != 5 or not parts[1].isdigit():
        raise _GpuQueryFailure(f"nvidia-smi says {line.strip()[:80]!r} of a GPU")
    name, mebibytes, uuid, capability, mig = parts
    if mig == "Enabled":
        raise _GpuQueryFailure(
            f"{name} is cut into MIG slices, whose memory nvidia-smi does not list"
        )
    major, _, minor = capability.partition(".")
    version = (0, 0)
    if major.isdigit() and minor.isdigit():
        version = int(major), int(minor)
    return Gpu(name, int(mebibytes) * 2**20, uuid, version)


def _select_visible_gpus(gpus: Sequence[Gpu], names: Sequence[str]) -> tuple[Gpu, ...]:
    """The GPUs that CUDA shows for such a list: numbers or beginnings of UUIDs, up to the first
    that names no GPU."""
    selected: list[Gpu] = []
    for name in map(str.strip, names):
        gpu = _find_gpu_by_index_or_uuid(gpus, name)
        if gpu is None or any(gpu is one for one in selected):
            break
        selected.append(gpu)
    return tuple(selected)


def _find_gpu_by_index_or_uuid(gpus: Sequence[Gpu], name: str) -> Gpu | None:
    if name.isdigit():
        if int(name) < len(gpus):
            return gpus[int(name)]
        return None
    for gpu in gpus:
        if name and gpu.uuid.startswith(name):
            return gpu
    return None
