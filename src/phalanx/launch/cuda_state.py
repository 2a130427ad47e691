"""Finds out if this process has begun to use CUDA: asks NVIDIA's driver, without beginning to.

Torch-free.
"""

from __future__ import annotations

import ctypes
import os

_CUDA_DRIVER_LIBRARY = "libcuda.so.1"
_CUDA_ERROR_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED


def is_cuda_driver_initialized() -> bool:
    """True where this process has initialised the driver: what it forks cannot use CUDA any more.

    A driver that is not loaded is not loaded for the question.
    """
    try:
        driver = ctypes.CDLL(_CUDA_DRIVER_LIBRARY, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except (OSError, AttributeError):  # not loaded, or not Linux
        return False
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) != _CUDA_ERROR_NOT_INITIALIZED
