"""What a result says of the machine it was measured on: no names, no paths."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import version
from typing import Any

import psutil

from phalanx.core.units import GIB


def machine_facts() -> dict[str, Any]:
    return {
        "cpu": cpu_model(),
        "cores": num_cores(),
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "phalanx": version("phalanx"),
    }


def cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = (
                line.partition(":")[2].strip() for line in file if line.startswith("model name")
            )
            return next(names, "") or platform.machine()
    except OSError:
        return platform.processor() or platform.machine()


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_label() -> str:
    """What a results file is called after: "amd-epyc-2c"."""
    words = re.sub(r"[^a-z0-9]+", "-", cpu_model().lower()).strip("-")
    return f"{words[:40].rstrip('-')}-{num_cores()}c"
