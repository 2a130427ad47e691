"""SIGTERM and Ctrl-C while no rank trains: before ranks start, and after they have ended."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from phalanx.core.errors import ExitCode, PhalanxError


class StoppedBySignalError(PhalanxError):
    """SIGTERM where no rank trains: before, or after."""

    exit_code = ExitCode.PREEMPTED


@contextlib.contextmanager
def raising_on_stop_signals() -> Iterator[None]:
    """SIGTERM and Ctrl-C end the body by an exception, once: ranks and their supervisor have
    handlers of their own.

    One stop often arrives twice: torchrun and Slurm signal a rank and its guard, which passes on
    what it gets. The second one would strike in the middle of what the first one has cleaned up. An
    ignored SIGINT stays ignored. Outside the main thread, where Python allows no handlers, nothing
    changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous: dict[signal.Signals, Any] = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, _raise_stop_once)
    }
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        previous[signal.SIGINT] = signal.signal(signal.SIGINT, _raise_stop_once)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _raise_stop_once(number: int, frame: FrameType | None) -> None:
    # First of all: a second signal must not strike while the first one's clean-up goes on.
    for other in (signal.SIGTERM, signal.SIGINT):
        signal.signal(other, signal.SIG_IGN)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise StoppedBySignalError(
        "stopped by SIGTERM while no rank was training",
        fix="run again, with --resume if it had begun",
    )
