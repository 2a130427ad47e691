"""Requests to stop a run: signals to any rank, on which all ranks agree."""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass


@dataclass
class StopSignalFlags:
    """Signals that this rank has got. Ranks agree on them in the reduction of each step."""

    sigterm: bool = False
    sigint: bool = False

    def request_stop_on_signals(self) -> None:
        """From now on SIGTERM and SIGINT ask for a stop at a step boundary.

        Outside the main thread, where Python allows no handlers, this rank stops only as others ask
        for it.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        # Only a flag is set: a handler may run between any two instructions of Python.
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "sigterm", True))
        signal.signal(signal.SIGINT, lambda *_: setattr(self, "sigint", True))


class StopRequestedError(Exception):
    """All ranks agreed, inside an evaluation, to stop. Never leaves the trainer."""
