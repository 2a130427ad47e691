"""What is said when a signal asks a run to stop."""

from __future__ import annotations

import signal

import pytest

from phalanx.launch.attempt import describe_stop_on_signal


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGINT, "press Ctrl-C again"),
        (signal.SIGTERM, "SIGTERM: stopping after this step and saving, within 30 s"),
        (signal.SIGHUP, "SIGHUP (the terminal was closed): stopping"),
    ],
)
def test_a_stop_names_its_signal(number: signal.Signals, words: str) -> None:
    # As they come from the pipe of signals: numbers.
    assert words in describe_stop_on_signal(int(number), 30.0)
