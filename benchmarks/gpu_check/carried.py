"""Wheels that were carried here, put before everything else on the path of children without
installing anything."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path


def unpack(wheels: Path, target: Path) -> list[str]:
    """Unpack into `target` every wheel of `wheels` that this Python can import; their names,
    sorted."""
    fitting = [wheel for wheel in sorted(wheels.glob("*.whl")) if fits(wheel.name)]
    for wheel in fitting:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
    return [wheel.name.split("-")[0] for wheel in fitting]


def fits(name: str) -> bool:
    """By the tags in a wheel's name: pure, or compiled for this version's interface on Linux of
    this processor."""
    pythons, interface, platform = name.removesuffix(".whl").split("-")[-3:]
    own = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    if interface == "none":
        return "py3" in pythons.split(".") and platform == "any"
    is_made_here = sys.platform == "linux" and any(
        part.endswith("x86_64") for part in platform.split(".")
    )
    if interface == "abi3":
        oldest = min(int(python[3:]) for python in pythons.split("."))
        return is_made_here and oldest <= sys.version_info[1]
    return is_made_here and interface == own
