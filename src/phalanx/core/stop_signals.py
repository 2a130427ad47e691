"""Signals that ask for a stop: which ones, whose they are, and those that wait for a rank to have
handlers; and that of the supervisor, which no person or scheduler sends."""

from __future__ import annotations

import signal
from collections.abc import Iterator

from phalanx.core.process_stat import has_signal_handler

# Each asks for a stop as SIGTERM does: a lost terminal, and what schedulers send some time before
# they end a job (Slurm's --signal=USR1@120). Where there are no real-time signals SIGUSR2 asks a
# rank for its stack (`launch.rank`).
SIGNALS_TAKEN_AS_SIGTERM: tuple[signal.Signals, ...] = (signal.SIGHUP, signal.SIGUSR1)
if hasattr(signal, "SIGRTMIN"):
    SIGNALS_TAKEN_AS_SIGTERM += (signal.SIGUSR2,)
# A scheduler may send any of them to every process of a job.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, *SIGNALS_TAKEN_AS_SIGTERM)

# Ranks save and leave, as on SIGTERM, and then start again with more of them. Where there are no
# real-time signals it is SIGTERM itself.
LEAVE_FOR_MORE_RANKS_SIGNAL = int(
    signal.SIGRTMIN + 12 if hasattr(signal, "SIGRTMIN") else signal.SIGTERM
)
# The `reason` of `stop_requested` then.
MORE_RANKS_REASON = "more_ranks"

_are_held = False


def is_signal_left_to_phalanx(number: int) -> bool:
    """True where a signal of this process has its default effect, or a handler of phalanx.

    Code of the user's that handles it keeps it, and what is ignored (nohup) stays ignored.
    """
    handler = signal.getsignal(number)
    if handler is signal.SIG_DFL:
        # Python knows nothing of handlers in C, such as that of faulthandler.register.
        return not has_signal_handler("self", number)
    module = getattr(handler, "__module__", None) or ""
    return bool(module.partition(".")[0] == __name__.partition(".")[0])


def stop_signals_for_phalanx() -> Iterator[signal.Signals]:
    """Stop signals whose handlers phalanx may set now: SIGTERM and SIGINT always, and those that
    are taken as SIGTERM where nobody else has them."""
    for number in STOP_SIGNALS:
        if number not in SIGNALS_TAKEN_AS_SIGTERM or is_signal_left_to_phalanx(number):
            yield number


def ignore_stop_signals() -> None:
    """Have this process, which helps others that decide when it ends, outlive stop signals.

    Code of the user's that runs before (sitecustomize) keeps those that are taken as SIGTERM.
    """
    for number in stop_signals_for_phalanx():
        signal.signal(number, signal.SIG_IGN)


def stop_ignoring_signals(kept_signals: frozenset[int]) -> None:
    """Have signals that are taken as SIGTERM, and that `ignore_stop_signals` ignores, take their
    default effect, but for those `kept_signals` and for those that code of the user's handles."""
    for number in SIGNALS_TAKEN_AS_SIGTERM:
        # Not `getsignal`: after faulthandler.register it says what was before.
        if number not in kept_signals and not has_signal_handler("self", number):
            signal.signal(number, signal.SIG_DFL)


def hold_stop_signals() -> set[signal.Signals]:
    """The signals that the caller is to block: they wait until this process calls
    `release_stop_signals`."""
    global _are_held
    _are_held = True
    return set(STOP_SIGNALS)


def release_stop_signals() -> None:
    """Take stop signals from now on, and those that wait, if they are held."""
    global _are_held
    if _are_held:
        _are_held = False
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
