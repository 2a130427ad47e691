"""Energy and utilisation of one NVIDIA GPU, by the driver's own library (libnvidia-ml), without a
package for it.

Each call is of a few functions whose form has been the same since NVML 2 (energy: since Volta). A
library, device or function that is not there means that nothing is known, and never an error.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

LIBRARY_NAME = "libnvidia-ml.so.1"
_SUCCESS = 0


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t: per cent of the last sample period (1/6 s to 1 s)."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


@dataclass(frozen=True)
class GpuReading:
    """`energy_j`: since the driver was loaded, of all that uses the GPU. `busy_share` (0 to 1): of
    the last sample period, in which any kernel ran; `memory_busy_share`: in which memory was read
    or written. None: the GPU does not say."""

    energy_j: float | None
    busy_share: float | None
    memory_busy_share: float | None


class GpuMeter:
    """Reads one GPU, whose handle the library gave."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._library, self._handle = library, handle

    def read(self) -> GpuReading:
        """The GPU now. Waits for the driver (well below a millisecond), not for the GPU."""
        energy_mj = ctypes.c_ulonglong()
        energy_j = None
        if self._call("nvmlDeviceGetTotalEnergyConsumption", ctypes.byref(energy_mj)):
            energy_j = energy_mj.value / 1000
        utilization = _Utilization()
        if not self._call("nvmlDeviceGetUtilizationRates", ctypes.byref(utilization)):
            return GpuReading(energy_j, None, None)
        return GpuReading(energy_j, utilization.gpu / 100, utilization.memory / 100)

    def _call(self, name: str, result: object) -> bool:
        function = getattr(self._library, name, None)
        return function is not None and function(self._handle, result) == _SUCCESS


def open_gpu_meter(uuid: str, library_name: str = LIBRARY_NAME) -> GpuMeter | None:
    """The meter of the GPU `uuid` ("GPU-8932f937-..."); None where the library or the GPU is not
    there."""
    try:
        library = ctypes.CDLL(library_name)
        handle = ctypes.c_void_p()
        if library.nvmlInit_v2() != _SUCCESS:
            return None
        if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) != _SUCCESS:
            return None
    except (OSError, AttributeError):
        return None
    return GpuMeter(library, handle)
