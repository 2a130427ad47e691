"""Which signals ask for a stop, and which ones code of the user's keeps."""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
from collections.abc import Iterator
from types import FrameType

import pytest

from phalanx.core.process_stat import has_signal_handler
from phalanx.core.stop_signals import (
    STOP_SIGNALS,
    ignore_stop_signals,
    is_signal_left_to_phalanx,
    stop_ignoring_signals,
)
from phalanx.launch.signals import SignalInbox
from phalanx.run.stop_signals import (
    StoppedBySignalError,
    outliving_repeated_stops,
    raising_on_stop_signals,
)
from phalanx.train.stop import StopSignalFlags

EXTRA = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def _handle_as_user(number: int, frame: FrameType | None) -> None:
    pass


@pytest.fixture(autouse=True)
def _default_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number in EXTRA:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, *EXTRA])
def test_a_stop_that_is_being_told_is_not_stopped_by_the_next_one(number: signal.Signals) -> None:
    with raising_on_stop_signals():
        with outliving_repeated_stops():
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
        with pytest.raises(StoppedBySignalError, match=number.name):
            os.kill(os.getpid(), number)
    with pytest.raises(KeyboardInterrupt), raising_on_stop_signals(), outliving_repeated_stops():
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("number", EXTRA)
def test_a_signal_of_schedulers_is_a_stop_like_sigterm(number: signal.Signals) -> None:
    with SignalInbox() as inbox:
        os.kill(os.getpid(), number)
        assert inbox.take_signals() == [number]
    assert signal.getsignal(number) is signal.SIG_DFL
    flags = StopSignalFlags()
    # In a rank of another launcher the handler of its start comes first.
    with raising_on_stop_signals():
        flags.request_stop_on_signals()
        os.kill(os.getpid(), number)
        assert (flags.sigterm, flags.sigint) == (True, False)
        # The next attempt of a rank that is kept.
        following = StopSignalFlags()
        following.request_stop_on_signals()
        os.kill(os.getpid(), number)
        assert following.sigterm
    with pytest.raises(StoppedBySignalError, match=number.name):
        _get_signal_where_no_rank_trains(number)


@pytest.mark.parametrize(
    ("advice", "said"),
    [
        ("", "stopped by SIGTERM while no rank was training; run again, with --resume"),
        ("the same command begins again", "stopped by SIGTERM; the same command begins again"),
    ],
)
def test_a_stop_ends_with_the_advice_of_what_was_stopped(advice: str, said: str) -> None:
    with raising_on_stop_signals(advice):
        # Whatever the advice, the handler is one of phalanx.
        assert is_signal_left_to_phalanx(signal.SIGUSR1)
        with pytest.raises(StoppedBySignalError) as stop:
            os.kill(os.getpid(), signal.SIGTERM)
    assert str(stop.value).startswith(said)


def _get_signal_where_no_rank_trains(number: signal.Signals) -> None:
    with raising_on_stop_signals():
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, _handle_as_user])
def test_a_signal_that_the_user_handles_or_ignores_stays_theirs(handler: signal.Handlers) -> None:
    signal.signal(signal.SIGUSR1, handler)
    with raising_on_stop_signals(), SignalInbox() as inbox:
        flags = StopSignalFlags()
        flags.request_stop_on_signals()
        assert signal.getsignal(signal.SIGUSR1) is handler
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not flags.sigterm
        assert not inbox.take_signals()
        # It came after phalanx's own.
        signal.signal(signal.SIGUSR2, handler)
        assert flags.take_signals_back() == []
        assert signal.getsignal(signal.SIGUSR2) is handler


def test_a_handler_in_c_is_the_users_too() -> None:
    assert is_signal_left_to_phalanx(signal.SIGUSR1)
    faulthandler.register(signal.SIGUSR1)
    try:
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
        assert not is_signal_left_to_phalanx(signal.SIGUSR1)
    finally:
        faulthandler.unregister(signal.SIGUSR1)


def test_a_handler_in_c_that_came_between_two_attempts_of_a_kept_rank_stays() -> None:
    flags = StopSignalFlags()
    flags.request_stop_on_signals()
    with tempfile.TemporaryFile() as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        try:
            flags.request_stop_on_signals()
            os.kill(os.getpid(), signal.SIGUSR1)
            assert not flags.sigterm
            assert stacks.tell() > 0
        finally:
            faulthandler.unregister(signal.SIGUSR1)


@pytest.mark.parametrize("is_earlier", [True, False])
def test_ranks_have_a_handler_in_c_that_the_process_before_them_has(*, is_earlier: bool) -> None:
    """That of a sitecustomize comes before phalanx ignores signals, that of a package's plugin
    after."""
    try:
        if is_earlier:
            faulthandler.register(signal.SIGUSR1)
        ignore_stop_signals()
        if not is_earlier:
            faulthandler.register(signal.SIGUSR1)
        stop_ignoring_signals(frozenset({signal.SIGHUP}))
        assert has_signal_handler("self", signal.SIGUSR1)
        assert not is_signal_left_to_phalanx(signal.SIGUSR1)
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        faulthandler.unregister(signal.SIGUSR1)
