"""The end of a fault that goes on for some steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from phalanx.resilience.fault import FaultSite

_POLL_S = 0.005


def call_after_steps(
    site: FaultSite,
    num_steps: int,
    undo: Callable[[], None],
    *,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Call `undo` in a thread once the trainer has done `num_steps` more, and `meanwhile` again and
    again until then; returns at once."""
    trainer = site.trainer
    assert trainer is not None, "this fault strikes a rank that trains"
    last = trainer.state.step + num_steps

    def wait_and_undo() -> None:
        while trainer.state.step < last:
            meanwhile()
            time.sleep(_POLL_S)
        undo()

    threading.Thread(target=wait_and_undo, daemon=True).start()
