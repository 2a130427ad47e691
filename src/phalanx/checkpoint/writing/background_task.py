"""A task of one rank beside training (a write, a pruning): a thread whose error is never lost."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from phalanx.core.errors import CheckpointError, RunTakenError

# A third of the share of a core that a thread of training has (a level is a factor of 1.25).
CHECKPOINT_THREAD_NICENESS = 5


class BackgroundTask:
    """A thread that runs `work` once.

    `failed`: a CheckpointError ended it; `taken` is that error if another job or run owns the run
    or its store by now. `crash`: any other exception that ended it.
    """

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self.failed = False
        self.taken: RunTakenError | None = None
        self.crash: BaseException | None = None
        self._work = work
        self._is_done = threading.Event()
        # A daemon: a store that never answers must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return self._is_done.is_set()

    def join(self, timeout_s: float | None = None) -> None:
        self._is_done.wait(timeout_s)

    def _run(self) -> None:
        try:
            _lower_thread_priority()
            self._work()
        except CheckpointError as error:
            # Its message was emitted where it was caught.
            self.failed = True
            if isinstance(error, RunTakenError):
                self.taken = error
        except BaseException as crash:
            # Kept for training's thread: what is raised here nobody would catch.
            self.crash = crash
        finally:
            # Last: who sees it may read the outcome without a lock.
            self._is_done.set()


def _lower_thread_priority() -> None:
    """Lower this thread's priority, so that training's threads come first where cores are short.

    Does nothing on systems other than Linux: they know priorities of whole processes only.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            # Against POSIX, Linux has a priority for each thread, by its own id (setpriority(2)).
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), CHECKPOINT_THREAD_NICENESS)
