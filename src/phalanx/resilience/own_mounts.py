"""The mounts that a run has for itself, and what a fault may do to them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from phalanx.core.errors import EnvironmentProblem

OWN_MOUNTS_VARIABLE = "OWN_MOUNTS"
"""Set by the drill for the processes of a run that has a mount namespace for itself."""


def require_own_mounts() -> None:
    """Raises EnvironmentProblem unless this run has mounts of its own: what is mounted then is
    seen by its processes alone, and gone with the last of them."""
    if OWN_MOUNTS_VARIABLE not in os.environ:
        raise EnvironmentProblem(
            "this fault changes mounts that the run has for itself, and it has none",
            fix="run it by phalanx drill",
        )


def make_read_only(folder: Path) -> None:
    """Let the kernel refuse all changes below `folder`, but of what is open by now.

    Raises EnvironmentProblem where the run shares its mounts, or the kernel refuses.
    """
    require_own_mounts()
    _run_or_raise("mount", "--bind", str(folder), str(folder))
    # Of this mount alone: the file system itself is not made read-only while files are written.
    _run_or_raise("mount", "-o", "remount,bind,ro", str(folder))


def make_writable(folder: Path) -> None:
    """Undo `make_read_only`."""
    subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=False)


def _run_or_raise(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EnvironmentProblem("nothing can be mounted", why=done.stderr.strip())
