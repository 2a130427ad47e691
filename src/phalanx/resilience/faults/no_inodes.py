"""The file system of the run has no inodes left for some steps with a save among them, though there
is room; then it has some again."""

from __future__ import annotations

import errno
import itertools
import os
from dataclasses import replace
from pathlib import Path

from phalanx.core.errors import EnvironmentProblem
from phalanx.core.files import create_regular_file
from phalanx.resilience.after_steps import call_after_steps
from phalanx.resilience.expectation import REFUSED_SAVE
from phalanx.resilience.fault import FaultSite

EXPECTATION = replace(REFUSED_SAVE, stage="few_inodes", says="no inodes left")
NUM_STEPS_WITHOUT = 12
# More a disk of a drill has not, and no machine should be asked for by one.
MAX_FILLERS = 10_000
FILLERS_FOLDER = "fillers"


def inject(site: FaultSite) -> None:
    """Make empty files until the file system of the run has no inode left (ENOSPC), for twelve
    steps.

    The real condition: the drill gives the run a small file system of its own with few inodes.
    Raises EnvironmentProblem on one that has many.
    """
    folder = site.run_dir / FILLERS_FOLDER
    if not 0 < os.statvfs(site.run_dir).f_favail <= MAX_FILLERS:
        raise EnvironmentProblem(
            f"this fault takes all inodes of the run's disk, which has more than {MAX_FILLERS}",
            fix="run it by phalanx drill",
        )
    folder.mkdir()
    take_inodes(folder)
    call_after_steps(site, NUM_STEPS_WITHOUT, lambda: give_back_inodes(folder))


def take_inodes(folder: Path) -> None:
    """Make empty files in `folder` until there is no inode for one more."""
    try:
        for number in itertools.count():
            create_regular_file(folder / str(number)).close()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


def give_back_inodes(folder: Path) -> None:
    """Remove `folder` and the files in it."""
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
