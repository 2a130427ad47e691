"""Old checkpoints are removed beside training, on rank 0, by a thread of its own: a save need
not wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from phalanx.checkpoint.ownership.fencing_token import Epoch
from phalanx.checkpoint.stores.protocol import Store
from phalanx.checkpoint.writing.background_write import Flight
from phalanx.checkpoint.writing.retention import Retention, prune
from phalanx.core.errors import CheckpointError
from phalanx.observe.events import CheckpointsRemoved, Event, Note

# for a removal that was told to hurry: it reads or removes one thing more, if the store answers
PATIENCE_S = 1.0


class _HurriedError(Exception):
    """Training stops, and nobody has time for old checkpoints."""


class Tidier:
    """Removes what `retention()` does not keep of a store.

    What went, and what was not possible, goes to `tell`.

    Nothing goes once the run is no longer that of `epoch`.
    """

    def __init__(
        self,
        store: Store,
        retention: Callable[[], Retention],
        tell: Callable[[Event], None],
        epoch: Epoch | None = None,
    ) -> None:
        self._store, self._retention, self._tell, self._epoch = store, retention, tell, epoch
        self._flight: Flight | None = None
        self._in_haste = threading.Event()
        self._hurried_s = 0.0

    def begin(self) -> None:
        """After the removal that is still at work, if there is one.

        Who calls is this rank's only save.
        """
        earlier = None if self._flight is None or self._flight.is_done else self._flight

        def work() -> None:
            if earlier is not None:
                earlier.join()
            self._tidy()

        self._flight = Flight("phalanx-tidy", work)
        self._flight.start()

    def hurry(self) -> None:
        """From now on what is not removed yet is left to another time."""
        if not self._in_haste.is_set():
            self._hurried_s = time.monotonic()
            self._in_haste.set()

    def take_time(self) -> None:
        """There is time again."""
        self._in_haste.clear()

    @property
    def is_waited_for(self) -> bool:
        """Whether a removal is at work that may take its time, or had none yet to notice that it
        may not."""
        if self._flight is None or self._flight.is_done:
            return False
        return not self._in_haste.is_set() or time.monotonic() - self._hurried_s < PATIENCE_S

    def join(self, timeout_s: float) -> None:
        if self._flight is not None:
            self._flight.join(timeout_s)

    def raise_crash(self) -> None:
        """Raises, once, what ended the thread and should not have."""
        flight = self._flight
        if flight is not None and flight.is_done and flight.crash is not None:
            crash, flight.crash = flight.crash, None
            raise crash

    def _tidy(self) -> None:
        """That it cannot be done is said, and ends nothing."""

        def go_on(num_bytes: int) -> None:
            if self._in_haste.is_set():
                raise _HurriedError

        try:
            go_on(0)
            before = self._steps()
            try:
                say, retention = self._say_why_old_stay, self._retention()
                prune(self._store, retention, say=say, progress=go_on, epoch=self._epoch)
            finally:
                gone = sorted(before - self._steps())
                if gone:
                    self._tell(CheckpointsRemoved(gone))
        except _HurriedError:
            return
        except (CheckpointError, OSError) as error:
            if (
                not self._in_haste.is_set()
            ):  # or a save went on meanwhile, which also removes what is half removed
                self._say_why_old_stay(str(error))

    def _steps(self) -> set[int]:
        return {folder.step for folder in self._store.folders()}

    def _say_why_old_stay(self, why: str) -> None:
        self._tell(Note("old_checkpoints_stay", {"why": f"old checkpoints are not removed: {why}"}))
