"""Is there a GPU?

Asked of NVIDIA's driver itself, without torch: an answer takes milliseconds where there is none.
"""

from __future__ import annotations

import ctypes


def why_not() -> str | None:
    """None if this process may use a CUDA GPU, else why it may not."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "NVIDIA's driver (libcuda.so.1) is not installed"
    count = ctypes.c_int(0)
    for call in (lambda: driver.cuInit(0), lambda: driver.cuDeviceGetCount(ctypes.byref(count))):
        code = call()
        if code != 0:
            return f"NVIDIA's driver says error {code}"
    return None if count.value > 0 else "NVIDIA's driver shows none (CUDA_VISIBLE_DEVICES?)"
