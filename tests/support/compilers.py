"""The C++ compiler that `train.compile` uses on CPUs, which not every machine has."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest


def find_what_is_missing() -> str:
    """Why g++ cannot compile what torch writes; empty if it can."""
    if shutil.which("g++") is None:
        return "there is no g++"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "there are no headers of this Python (python3-dev) for g++"
    return ""


needs_cpp_compiler = pytest.mark.skipif(
    bool(find_what_is_missing()), reason=find_what_is_missing() or "there is one"
)
