"""Work of one rank that goes on beside training: a thread whose end is never lost."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from phalanx.core.errors import CheckpointError, RunTakenError

NICENESS = 5  # a third of the share of a core that a thread of training has


class Flight:
    """A thread that does `work`.

    `failed`: by a CheckpointError, which is `taken` if the run or its store is another's; `crash`:
    anything else that ended it.
    """

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self.failed = False
        self.taken: RunTakenError | None = None
        self.crash: BaseException | None = None
        self._work = work
        self._is_done = threading.Event()
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
            _step_back()
            self._work()
        except CheckpointError as error:  # told where it was caught
            self.failed = True
            self.taken = error if isinstance(error, RunTakenError) else None
        except BaseException as crash:
            self.crash = crash
        finally:
            self._is_done.set()


def _step_back() -> None:
    """Where cores are short, training's threads come first.

    Of a thread alone only Linux can be told that.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
