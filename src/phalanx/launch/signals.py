"""Signals that are read from a descriptor: the supervisor waits on it, and no handler interrupts
it."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from phalanx.core.stop_signals import stop_signals_for_phalanx


class SignalInbox:
    """While open, signals that ask for a stop arrive as numbers from `take_signals()`, and
    `fileno()` becomes readable.

    An ignored SIGHUP (nohup) stays ignored, and SIGUSR1 with a handler of the user's stays theirs.
    Outside the main thread, where Python allows no handlers, it is empty.
    """

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()
        # set_wakeup_fd refuses a descriptor that blocks.
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        self._previous: dict[int, Any] = {}
        self._previous_wakeup = -1

    def __enter__(self) -> SignalInbox:
        if threading.current_thread() is threading.main_thread():
            self._previous_wakeup = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
            for number in stop_signals_for_phalanx():
                self._previous[number] = signal.signal(number, _ignore_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            # None: a handler of C code, which Python cannot put back.
            if handler is None:
                handler = signal.SIG_DFL
            signal.signal(number, handler)
        # Before the pipe closes: a signal would be written to a descriptor of somebody else.
        if self._previous:
            signal.set_wakeup_fd(self._previous_wakeup)
        os.close(self._read_end)
        os.close(self._write_end)

    def fileno(self) -> int:
        return self._read_end

    def take_signals(self) -> list[int]:
        """The signals since the last call, in order of arrival."""
        try:
            # A byte for each signal: Python writes its number.
            numbers = os.read(self._read_end, 512)
        except BlockingIOError:
            return []
        # Every signal with a Python handler is written here: those of other code are not ours.
        return [number for number in numbers if number in self._previous]


def _ignore_signal(number: int, frame: FrameType | None) -> None:
    """The wake-up descriptor carries the number; a Python handler must exist for it to be
    written."""


def format_signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
