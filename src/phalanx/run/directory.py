"""The run directory: created, locked and described before ranks start; what cannot start leaves
nothing behind."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from phalanx.checkpoint.ownership.run_lock import LOCK_FILE_NAME, RunLock, holding_run_lock
from phalanx.core.disk_errors import build_path_resource_error
from phalanx.core.errors import ResourceError, UsageError
from phalanx.core.files import (
    create_writable_run_directory,
    read_whole_regular_file,
    write_bytes_atomically,
    write_json_atomically,
)
from phalanx.launch.paths import next_attempt_number
from phalanx.observe.events import RunStarted
from phalanx.observe.tail import read_recorded_events

JOB_FILE, PLAN_FILE = "job.json", "plan.json"
# In the run directory.
DATA_FOLDER = "data"


def refuse_existing_run(run_dir: Path, *, resume: bool) -> None:
    """Raise at once, before anything slow, for a run directory that cannot be used.

    Raises RunLockedError (exit 9) if a live job holds it, UsageError if a run is there and is not
    to be resumed, and ResourceError for a name that no file system takes.
    """
    try:
        is_locked, is_run = (run_dir / LOCK_FILE_NAME).exists(), (run_dir / JOB_FILE).exists()
    except OSError as error:
        raise build_path_resource_error(error, "opening the run directory", run_dir) from None
    if is_locked:
        # To try it is to learn whether its holder lives; what the disk refuses is said later.
        with contextlib.suppress(ResourceError), holding_run_lock(run_dir):
            pass
    if not resume and is_run:
        raise UsageError(
            "a run is there already",
            where=str(run_dir),
            fix=f"use --resume {run_dir} or another run.dir",
        )


class RunDirectory:
    """A run directory that this process holds.

    Its new folders are removed at the end unless `keep_run_directory` was called. With
    `is_name_chosen` nobody asked for this name: where another job has taken it since, `hold`
    changes `path` to the name with a number.
    """

    def __init__(self, run_dir: Path, *, is_name_chosen: bool = False) -> None:
        self.path = run_dir
        self._is_name_chosen = is_name_chosen
        # Before anything is created: only these may go again.
        self._new_folders = [
            folder for folder in (run_dir, *run_dir.parents) if not folder.exists()
        ]
        self._is_kept = False

    def keep_run_directory(self) -> None:
        """From here on it is the directory of a run."""
        self._is_kept = True

    def remove_run_directory(self) -> None:
        """A directory that was there before stays, but is no run any more; a new one goes at the
        end."""
        self._is_kept = False
        for name in (JOB_FILE, PLAN_FILE):
            (self.path / name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def hold(self) -> Iterator[RunLock]:
        """Create and lock the directory; remove at the end what is new of it and was not kept.

        Only the holder of the lock removes files: of two jobs that race for a new directory, the
        loser leaves it alone.
        """
        try:
            if self._is_name_chosen:
                self._make_directory_of_free_name()
            create_writable_run_directory(self.path)
            with holding_run_lock(self.path) as lock:
                try:
                    yield lock
                finally:
                    if self.path in self._list_folders_to_remove() and lock.is_ours():
                        shutil.rmtree(self.path, ignore_errors=True)
        finally:
            # From the run's own folder upwards: a folder is empty when what is in it went.
            for folder in self._list_folders_to_remove():
                # It is not empty: it is another job's by now.
                with contextlib.suppress(OSError):
                    folder.rmdir()

    def _make_directory_of_free_name(self) -> None:
        """Make the directory, and no other job's: each of two that have chosen one name, as both
        were started in the same second, gets its own."""
        chosen, number = self.path, 1
        while True:
            try:
                os.makedirs(self.path)
            except FileExistsError:
                number += 1
                self.path = chosen.with_name(f"{chosen.name}-{number}")
                continue
            except OSError as error:
                raise build_path_resource_error(
                    error, "opening the run directory", self.path
                ) from None
            break
        if self.path not in self._new_folders:
            others = [folder for folder in self._new_folders if folder != chosen]
            self._new_folders = [self.path, *others]

    def _list_folders_to_remove(self) -> list[Path]:
        if self._is_kept:
            return []
        return self._new_folders


@contextlib.contextmanager
def hold_run_facts_files(
    run_dir: Path, lock: RunLock, facts: Mapping[str, object]
) -> Iterator[None]:
    """Write the JSON files `facts` (values by file name) of a run, for as long as the body goes on.

    The files of an old run return if the body starts no training: it was refused after all. Not a
    byte is written once another job has taken the run: this one may have stood still for hours
    before.
    """
    # This process may have stood still for hours since it took the lock.
    lock.require_lock_still_ours()
    paths = [run_dir / name for name in facts]
    # Asked before the ranks start: events of this attempt or later are of this start.
    attempt = next_attempt_number(run_dir)
    try:
        old_bytes = {path: read_whole_regular_file(path) for path in paths if path.exists()}
        for path, value in zip(paths, facts.values(), strict=True):
            write_json_atomically(path, value)
    except OSError as error:
        raise build_path_resource_error(error, "writing the run's facts", run_dir) from None
    try:
        yield
    finally:
        if old_bytes and lock.is_ours() and not _has_attempt_begun_training(run_dir, attempt):
            with contextlib.suppress(OSError):
                for path, data in old_bytes.items():
                    write_bytes_atomically(path, data)


def _has_attempt_begun_training(run_dir: Path, attempt: int) -> bool:
    """True if ranks have begun to train in `attempt` or later."""
    return any(
        envelope.attempt >= attempt for envelope in read_recorded_events(run_dir, RunStarted)
    )
