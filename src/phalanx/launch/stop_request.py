"""A request to stop a run, and what is said of it."""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass


@dataclass
class StopRequest:
    """A request to stop, once there is one: SIGINT, SIGTERM or a signal that is taken as it.
    `at_once`: Ctrl-C a second time. `asked_s`: when ranks were first asked (monotonic): their grace
    goes on over attempts."""

    signal: signal.Signals | None = None
    at_once: bool = False
    asked_s: float = math.inf

    @property
    def signal_to_ranks(self) -> int:
        """What the ranks are told: they know two kinds of stops, SIGINT and SIGTERM."""
        return int(signal.SIGINT if self.signal == signal.SIGINT else signal.SIGTERM)


def describe_stop_on_signal(number: int, grace_s: float, *, is_work_done: bool = False) -> str:
    """What is said when a signal asks for a stop; `is_work_done`: ranks have only to end."""
    doing = "stopping after this step and saving"
    if is_work_done:
        doing = "all work is done; waiting for the processes of ranks to end"
    if number == signal.SIGINT:
        return f"{doing}; press Ctrl-C again to stop at once"
    return f"{name_stop_signal(number)}: {doing}, within {grace_s:g} s"


def name_stop_signal(number: int) -> str:
    """ "SIGTERM"; of one that people do not send by name, what it means."""
    name = signal.Signals(number).name
    if number == signal.SIGHUP:
        name += " (the terminal was closed)"
    return name
