"""A store whose first checkpoint is written late: what a thread writes must be a copy, which
training no longer changes."""

from __future__ import annotations

import threading

from phalanx.checkpoint.stores.local import LocalDraft, LocalStore

# Until a run goes on without the update that is waited for: it is wrong by itself then.
MAX_WRITE_DELAY_S = 10.0


class DelayedCheckpointStore(LocalStore):
    """Begins to write the checkpoint of `step` after `release` was called: between its copy and its
    write then lies an update. Every other one it writes as LocalStore does."""

    def __init__(
        self, store: LocalStore, step: int, *, max_delay_s: float = MAX_WRITE_DELAY_S
    ) -> None:
        super().__init__(store.root)
        self._step, self._is_released = step, threading.Event()
        self._max_delay_s = max_delay_s
        self.was_late = False
        """The checkpoint was written before `release`."""

    def release(self) -> None:
        """Let the checkpoint be written."""
        self._is_released.set()

    def release_and_wait(self) -> None:
        """Let it be written, and wait until no thread of this rank is at work on checkpoints."""
        self.release()
        # A save begins a removal before it is done.
        for name in ("phalanx-save", "phalanx-prune"):
            for thread in threading.enumerate():
                if thread.name == name:
                    thread.join(self._max_delay_s)

    def begin_draft(self, step: int) -> LocalDraft:
        if step == self._step:
            self.was_late = not self._is_released.wait(self._max_delay_s)
        return super().begin_draft(step)
