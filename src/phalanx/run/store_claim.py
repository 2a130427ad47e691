"""A run's checkpoint store, opened once by the process that prepares the run, and held for it:
writable, and no other run writes to it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from phalanx.checkpoint.ownership.run_lock import holding_run_lock
from phalanx.checkpoint.ownership.store_owner import claim_store, release_store
from phalanx.checkpoint.stores import Store, open_store_of_run
from phalanx.core.errors import RunLockedError, UsageError
from phalanx.core.store_urls import parse_file_url_directory
from phalanx.job.schema import Job
from phalanx.run.directory import JOB_FILE


@contextlib.contextmanager
def hold_claimed_store(
    job: Job, run_dir: Path, *, resume: bool, say: Callable[[str], None]
) -> Iterator[Store]:
    """Yield the run's store, and hold the one of `checkpoint.url` while the body goes on; the
    store in the run directory is held by the run's own lock.

    It is tried now, and not at the first save; `say` gets lines about a slow store until it is
    held. A directory is locked as a run's is: two runs that
    begin with an empty one would take each other's checkpoints for their own. An object store has
    no lock: a file in it says whose it is. Raises UsageError if a new run finds checkpoints in
    its store, wherever that is, and RunLockedError if a live job holds it.
    """
    is_speaking = True

    def say_while_claiming(line: str) -> None:
        if is_speaking:
            say(line)

    store = open_store_of_run(run_dir, job.checkpoint.url, say=say_while_claiming)
    if job.checkpoint.url is None:
        if not resume:
            _refuse_checkpoints_without_run(store, run_dir)
        yield store
        return
    # The first save may be hours away: what cannot be written is refused before.
    store.require_writable()
    with contextlib.ExitStack() as stack:
        directory = parse_file_url_directory(job.checkpoint.url)
        # The run's own directory is locked by now.
        if directory is not None and directory.resolve() != run_dir.resolve():
            _lock_store_directory(stack, directory)
        if not resume and store.folders():
            fix = "choose another checkpoint.url, or continue the run they belong to with --resume"
            raise UsageError("there are checkpoints of another run", where=store.url, fix=fix)
        # After the look at what is there: a refused run leaves no claim behind.
        stack.enter_context(_holding_store_claim(store, run_dir))
        # The console has the terminal from here on.
        is_speaking = False
        try:
            yield store
        finally:
            is_speaking = True


def _refuse_checkpoints_without_run(store: Store, run_dir: Path) -> None:
    """Raise UsageError if a new run finds checkpoints in its directory, which has no job: it would
    go on from their step in silence."""
    if not store.folders():
        return
    raise UsageError(
        "there are checkpoints of another run",
        where=store.url,
        why=f"--resume does not know their job, because {JOB_FILE} is not there",
        fix=f"choose another run.dir; model.init_from={run_dir} begins it from these weights",
    )


@contextlib.contextmanager
def _holding_store_claim(store: Store, run_dir: Path) -> Iterator[None]:
    """Write the run's claim, and take it back at the end if no run came of it."""
    try:
        claim_store(store, run_dir)
        yield
    finally:
        if not (run_dir / JOB_FILE).exists():
            release_store(store, run_dir)


def _lock_store_directory(stack: contextlib.ExitStack, directory: Path) -> None:
    """Lock the directory of a store; a refusal speaks of checkpoint.url instead of run.dir."""
    try:
        stack.enter_context(holding_run_lock(directory))
    except RunLockedError as error:
        message = error.what.replace("the run directory", "checkpoint.url")
        fix = (error.fix or "").replace("run.dir", "checkpoint.url")
        raise RunLockedError(message, where=error.where, fix=fix) from None
