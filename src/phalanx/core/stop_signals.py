"""Signals that ask ranks to leave: that of the supervisor, which no person or scheduler sends, and
those that wait for a rank to have handlers."""

from __future__ import annotations

import signal

# Ranks save and leave, as on SIGTERM, and then start again with more of them. Where there are no
# real-time signals it is SIGTERM itself.
LEAVE_FOR_MORE_RANKS_SIGNAL = int(
    signal.SIGRTMIN + 12 if hasattr(signal, "SIGRTMIN") else signal.SIGTERM
)
# The `reason` of `stop_requested` then.
MORE_RANKS_REASON = "more_ranks"

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_are_held = False


def hold_stop_signals() -> set[signal.Signals]:
    """The signals that the caller is to block: they wait until this process calls
    `release_stop_signals`."""
    global _are_held
    _are_held = True
    return set(_STOP_SIGNALS)


def release_stop_signals() -> None:
    """Take SIGTERM and SIGINT from now on, and those that wait, if they are held."""
    global _are_held
    if _are_held:
        _are_held = False
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
