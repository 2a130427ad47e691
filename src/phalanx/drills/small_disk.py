"""A small file system of a run's own, which a fault can fill."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from phalanx.core.errors import EnvironmentProblem

DISK_BYTES = 64 << 20


@contextlib.contextmanager
def mounting_small_disk(folder: Path) -> Iterator[None]:
    """Inside, `folder` is an empty file system of 64 MiB in memory. Raises EnvironmentProblem."""
    folder.mkdir(parents=True)
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if mount.returncode:
        raise EnvironmentProblem(
            "no file system can be mounted for the fault disk_full", why=mount.stderr.strip()
        )
    try:
        yield
    finally:
        subprocess.run(
            ["umount", "-l", str(folder)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
