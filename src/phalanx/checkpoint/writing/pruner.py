"""Pruning of old checkpoints beside training: rank 0 removes them in a thread of its own, so that
a save need not wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from phalanx.checkpoint.best import read_best_step_to_protect
from phalanx.checkpoint.run_storage import RunStorage
from phalanx.checkpoint.writing.background_task import BackgroundTask
from phalanx.checkpoint.writing.retention import RetentionRule, prune_checkpoints
from phalanx.core.errors import CheckpointError
from phalanx.job.schema import Checkpoint
from phalanx.observe.events import CheckpointsRemoved, Event, Note

# An interrupted removal still reads or removes one thing more; this is how long a stop waits for
# it, if the store answers.
INTERRUPTED_PRUNING_WAIT_S = 1.0


class _PruningInterruptedError(Exception):
    """Training stops, and the rest of the old checkpoints stays until the next pruning."""


class CheckpointPruner:
    """Removes the checkpoints of a run that the job's `options` do not keep; the best one stays.

    `emit` gets an event of what was removed, and of what could not be. Nothing is removed without
    keep_last, or once another job has the run.
    """

    def __init__(
        self, storage: RunStorage, options: Checkpoint, emit: Callable[[Event], None]
    ) -> None:
        self._storage, self._options, self._emit = storage, options, emit
        self._thread: BackgroundTask | None = None
        self._is_interrupted = threading.Event()
        self._interrupted_s = 0.0

    def start(self) -> None:
        """Start a pruning, if the job asks for it, after the one that is still at work.

        The caller is this rank's only save.
        """
        if self._options.keep_last is None:
            return
        earlier = self._thread

        def work() -> None:
            if earlier is not None:
                # One at a time: two would remove the same folders.
                earlier.join()
            self._prune_in_thread()

        self._thread = BackgroundTask("phalanx-prune", work)
        self._thread.start()

    def interrupt(self) -> None:
        """From now on leave what is not removed yet to another time."""
        if not self._is_interrupted.is_set():
            self._interrupted_s = time.monotonic()
            self._is_interrupted.set()

    def clear_interrupt(self) -> None:
        """Pruning may take its time again."""
        self._is_interrupted.clear()

    @property
    def should_wait(self) -> bool:
        """True if a pruning is at work that may take its time, or that has not had
        INTERRUPTED_PRUNING_WAIT_S yet to notice its interruption."""
        if self._thread is None or self._thread.is_done:
            return False
        if not self._is_interrupted.is_set():
            return True
        return time.monotonic() - self._interrupted_s < INTERRUPTED_PRUNING_WAIT_S

    def join(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def raise_exception_of_thread(self) -> None:
        """Raise, once, the exception that ended the thread, if it was no CheckpointError."""
        thread = self._thread
        if thread is not None and thread.is_done and thread.crash is not None:
            crash, thread.crash = thread.crash, None
            raise crash

    def _prune_in_thread(self) -> None:
        """The thread's work. A store that refuses is an event, and ends nothing."""

        def raise_if_interrupted(num_bytes: int) -> None:
            if self._is_interrupted.is_set():
                raise _PruningInterruptedError

        try:
            raise_if_interrupted(0)
            before = self._list_steps_in_store()
            try:
                prune_checkpoints(
                    self._storage.store,
                    self._build_retention_rule(),
                    say=self._emit_nothing_removed,
                    progress=raise_if_interrupted,
                    fencing_token=self._storage.fencing_token,
                )
            finally:
                # Also after an interruption or an error: what went until then is gone.
                removed = sorted(before - self._list_steps_in_store())
                if removed:
                    self._emit(CheckpointsRemoved(removed))
        except _PruningInterruptedError:
            return
        except (CheckpointError, OSError) as error:
            # After an interruption a save may have gone on meanwhile, which also removes what is
            # half removed: then the error says nothing.
            if not self._is_interrupted.is_set():
                self._emit_nothing_removed(str(error))

    def _build_retention_rule(self) -> RetentionRule:
        """The rule of this pruning: the best step may be another one than at the last."""
        best_steps = read_best_step_to_protect(self._storage.run_dir)
        return RetentionRule(self._options.keep_last, self._options.keep_every, best_steps)

    def _list_steps_in_store(self) -> set[int]:
        return {folder.step for folder in self._storage.store.folders()}

    def _emit_nothing_removed(self, why: str) -> None:
        message = f"old checkpoints are not removed: {why}"
        self._emit(Note("old_checkpoints_stay", {"why": message}))
