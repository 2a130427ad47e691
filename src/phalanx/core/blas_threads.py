"""numpy without threads that a process of few products has no use for."""

from __future__ import annotations

import os

# Read by OpenBLAS, which numpy's wheels bring, when it is loaded.
OPENBLAS_THREADS_VARIABLE = "OPENBLAS_NUM_THREADS"


def import_numpy_without_threads() -> None:
    """Import numpy so that OpenBLAS starts no threads here: one a core, each of which spins for
    some hundredths of a second before it sleeps. A number that the user gave stays, and processes
    that this one starts inherit nothing."""
    if OPENBLAS_THREADS_VARIABLE in os.environ:
        return
    os.environ[OPENBLAS_THREADS_VARIABLE] = "1"
    try:
        import numpy  # noqa: F401
    finally:
        del os.environ[OPENBLAS_THREADS_VARIABLE]
