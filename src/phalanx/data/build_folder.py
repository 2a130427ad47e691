"""The folder that a build writes: what may be in it, and the lock by which one build alone is at
it. Torch-free."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from phalanx.core.disk_errors import build_path_resource_error
from phalanx.core.errors import DataError, RunLockedError
from phalanx.core.file_locks import try_to_lock_file
from phalanx.data.dataset import DATASET_FILE_NAME
from phalanx.data.listing import find_dataset_around

BUILD_STATE_FOLDER = ".build"
LOCK_FILE_NAME = "lock"


def refuse_unsuitable_output_folder(out: Path) -> None:
    """Refuse a place that holds anything but a dataset, finished or not, and one inside of a
    dataset.
    """
    around = find_dataset_around(out)
    if around is not None:
        raise DataError(
            "the folder lies inside a dataset",
            where=str(out),
            why=f"{around} is one",
            fix="give another --out",
        )
    if not os.path.lexists(out):
        return
    try:
        names = os.listdir(out)
    except NotADirectoryError:
        raise DataError("not a folder", where=str(out), fix="give another --out") from None
    except OSError as error:
        raise build_path_resource_error(
            error, "opening the folder of the dataset", out, place="folder"
        ) from None
    if names and BUILD_STATE_FOLDER not in names and DATASET_FILE_NAME not in names:
        raise DataError(
            "the folder holds something else",
            where=str(out),
            why=f"{sorted(names)[0]!r} is there and dataset.json is not",
            fix="give an empty folder, or one that does not exist",
        )


@contextlib.contextmanager
def lock_output_folder(out: Path) -> Iterator[None]:
    """Hold OUT/.build for this process: the lock goes with it, however it ends.

    Where files cannot be locked, nothing keeps a second build out.
    """
    handle = _lock_state_folder(out)
    try:
        yield
    finally:
        os.close(handle)


def _lock_state_folder(out: Path) -> int:
    path = out / BUILD_STATE_FOLDER / LOCK_FILE_NAME
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # a build that finished took its state away meanwhile
            continue
        try:
            is_locked = try_to_lock_file(handle)
            # A build that finished removes the file: the lock of one that is gone holds nobody off.
            if is_locked and os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
        except FileNotFoundError:
            is_locked = True
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
        # Whoever builds may be at it for hours, so nobody waits here.
        if not is_locked:
            raise RunLockedError(
                "another build is writing there", where=str(out), fix="wait for it"
            )


def remove_build_output(out: Path, names: Iterable[str], *, is_new: bool) -> None:
    """Take away what a build may have written: files of these `names`, and the folder if it is
    new."""
    with contextlib.suppress(OSError):
        for name in names:
            (out / name).unlink(missing_ok=True)
        shutil.rmtree(out / BUILD_STATE_FOLDER)
        if is_new:
            out.rmdir()
