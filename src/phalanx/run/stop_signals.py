"""Signals that ask for a stop while no rank trains: before ranks start, and after they have
ended."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from phalanx.core.errors import ExitCode, PhalanxError
from phalanx.core.stop_signals import (
    SIGNALS_TAKEN_AS_SIGTERM,
    ignore_stop_signals,
    is_signal_left_to_phalanx,
    stop_signals_for_phalanx,
)
from phalanx.launch.stop_request import name_stop_signal

_ADVICE_FOR_TRAINING = "run again, with --resume if it had begun"


class StoppedBySignalError(PhalanxError):
    """SIGTERM, or a signal that is taken as it, where no rank trains: before, or after."""

    exit_code = ExitCode.PREEMPTED


@contextlib.contextmanager
def raising_on_stop_signals(advice: str = "") -> Iterator[None]:
    """Signals that ask for a stop end the body by an exception, once: ranks and their supervisor
    have handlers of their own. `advice` is what the error says of what is left and how it goes on,
    in place of what is true of a run.

    One stop often arrives twice: torchrun and Slurm signal a rank and its guard, which passes on
    what it gets. The second one would strike in the middle of what the first one has cleaned up. An
    ignored SIGINT or SIGHUP stays ignored, and SIGUSR1 with a handler of the user's stays theirs.
    Outside the main thread, where Python allows no handlers, nothing
    changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    # A function of this module, and no partial one: `is_signal_left_to_phalanx` must know it.
    def raise_stop_once(number: int, frame: FrameType | None) -> None:
        # First of all: a second signal must not strike while the first one's clean-up goes on.
        ignore_stop_signals()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise _build_stop_error(number, advice)

    previous: dict[signal.Signals, Any] = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, raise_stop_once)
    }
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        previous[signal.SIGINT] = signal.signal(signal.SIGINT, raise_stop_once)
    for number in SIGNALS_TAKEN_AS_SIGTERM:
        if is_signal_left_to_phalanx(number):
            previous[number] = signal.signal(number, raise_stop_once)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def outliving_repeated_stops() -> Iterator[None]:
    """SIGTERM, and signals that are taken as it, change nothing in the body: what they ask for is
    done, and is being recorded and told. SIGINT does what it did.

    Outside the main thread, where Python allows no handlers, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous: dict[signal.Signals, Any] = {}
    for number in stop_signals_for_phalanx():
        if number != signal.SIGINT:
            previous[number] = signal.signal(number, _pass_over)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _pass_over(number: int, frame: FrameType | None) -> None:
    """A handler, and not SIG_IGN, which processes that are started meanwhile would inherit."""


def _build_stop_error(number: int, advice: str) -> StoppedBySignalError:
    by_signal = f"stopped by {name_stop_signal(number)}"
    if advice:
        return StoppedBySignalError(by_signal, fix=advice)
    return StoppedBySignalError(f"{by_signal} while no rank was training", fix=_ADVICE_FOR_TRAINING)
