"""One attempt, from the order to start the ranks to the moment none is left. Facts only; the verdict is elsewhere."""

from __future__ import annotations

import math
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.core.errors import ExitCode
from phalanx.core.phases import read_black_box
from phalanx.launch.paths import black_box, error_report
from phalanx.launch.reports import ErrorReport, load_report
from phalanx.launch.server_process import ServerProcess
from phalanx.launch.signals import SignalInbox
from phalanx.launch.wire import Channel, Message

TICK_S = 0.1
# After the first failure: how long others may take to report theirs, while only consequences are known, or the cause.
SUSPECT_WINDOW_S, CAUSE_WINDOW_S = 1.0, 0.3
# While stopping, after the first rank left with an error: the save can no longer succeed.
BROKEN_STOP_S = 5.0
KILL_PATIENCE_S = 2.0
LEAVING = (ExitCode.PREEMPTED, ExitCode.INTERRUPTED)


@dataclass(frozen=True)
class RankExit:
    """How a rank's process ended: a code or a signal. `by_us`: it was still alive when we killed the rest."""

    rank: int
    code: int | None
    signal: int | None
    by_us: bool
    died_unix_s: float
    detected_s: float

    @property
    def failed(self) -> bool:
        return not self.by_us and self.code not in (0, *LEAVING)


@dataclass
class Stop:
    """The wish to stop, once it was uttered. `at_once`: Ctrl-C a second time."""

    signal: signal.Signals | None = None
    at_once: bool = False


@dataclass
class AttemptEnd:
    """What is known when no rank is left."""

    number: int
    exits: dict[int, RankExit] = field(default_factory=dict)
    reports: dict[int, ErrorReport] = field(default_factory=dict)
    start_error: ErrorReport | None = None
    server_loss: str = ""
    store_loss: str = ""
    grace_over: bool = False


class Attention:
    """Waits for a message, a signal or the next tick, whichever comes first."""

    def __init__(self, inbox: SignalInbox, on_tick: Callable[[], None]) -> None:
        self._inbox = inbox
        self._on_tick = on_tick
        self._next_tick = 0.0

    def wait(self, link: Channel, until: float = math.inf) -> tuple[list[Message], list[int]]:
        """Messages and signals, both possibly none, after `until` (monotonic seconds) or a tick at the latest."""
        timeout_s = max(0.0, min(self._next_tick, until) - time.monotonic())
        sources: list[Any] = [link, self._inbox]
        readable, _, _ = select.select(sources, [], [], timeout_s)
        messages = link.receive() if link in readable else []
        if time.monotonic() >= self._next_tick:
            self._on_tick()
            self._next_tick = time.monotonic() + TICK_S
        return messages, self._inbox.take()


class AttemptWatch:
    """Drives one attempt through `server`. `stop` outlives it and is shared with the supervisor."""

    def __init__(
        self,
        number: int,
        num_ranks: int,
        run_dir: Path,
        grace_s: float,
        server: ServerProcess,
        attention: Attention,
        stop: Stop,
        say: Callable[[str], None],
        on_started: Callable[[list[int]], None],
    ) -> None:
        self.end = AttemptEnd(number)
        self._num_ranks, self._run_dir, self._grace_s = num_ranks, run_dir, grace_s
        self._server, self._attention, self._stop = server, attention, stop
        self._say, self._on_started = say, on_started
        self._first_failure_at = math.inf
        self._grace_until = math.inf
        self._killed_at = math.inf

    def run(self, entry: str, payload: dict[str, Any]) -> AttemptEnd:
        """Start the ranks and return when all are gone."""
        order = {"do": "start", "attempt": self.end.number, "num_ranks": self._num_ranks}
        self._server.link.send(order | {"entry": entry, "payload": payload})
        while not self._is_over():
            messages, signals = self._attention.wait(self._server.link, self._next_deadline())
            for message in messages:
                self._hear(message)
            for number in signals:
                self._on_signal(number)
            self._keep_deadlines()
        self._collect_reports()
        if self._server.link.closed and len(self.end.exits) < self._num_ranks:
            self._server.kill()
            self.end.server_loss = self._server.how_it_ended()
        return self.end

    def _is_over(self) -> bool:
        return self._server.link.closed or len(self.end.exits) == self._num_ranks or self.end.start_error is not None

    def _hear(self, message: Message) -> None:
        match message["say"]:
            case "started":
                self._on_started(message["pids"])
            case "start_failed":
                self.end.start_error = ErrorReport(**message["report"])
            case "store_exit" if message["attempt"] == self.end.number:
                self.end.store_loss = f"exit status {message['code']}"
                self._first_failure_at = min(self._first_failure_at, time.monotonic())
            case "exit" if message["attempt"] == self.end.number:
                self._on_exit(message)

    def _on_exit(self, message: Message) -> None:
        now = time.monotonic()
        left = RankExit(
            rank=message["rank"],
            code=message["code"],
            signal=message["signal"],
            by_us=message["by_us"],
            died_unix_s=message["died_unix_s"],
            detected_s=max(0.0, now - message["died_monotonic_s"]),
        )
        self.end.exits[left.rank] = left
        if left.failed:
            self._first_failure_at = min(self._first_failure_at, now)
        elif left.code in LEAVING:  # the ranks agreed to leave; one that stays behind does not stay for ever
            self._grace_until = min(self._grace_until, now + self._grace_s)

    def _on_signal(self, number: int) -> None:
        if self._stop.signal is None:
            self._stop.signal = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
            self._grace_until = min(self._grace_until, time.monotonic() + self._grace_s)
            self._server.link.send({"do": "signal", "signal": int(self._stop.signal)})
            self._say(stopping_line(self._stop.signal, self._grace_s))
        elif number == signal.SIGINT:
            self._stop.at_once = True
            self._server.kill(timeout_s=1.0)

    def _kill_at(self) -> float:
        """When what is left must be killed, as things stand."""
        return min(self._grace_until, self._first_failure_at + self._failure_window_s())

    def _failure_window_s(self) -> float:
        if math.isinf(self._first_failure_at):
            return 0.0
        self._collect_reports()
        if len(self.end.exits.keys() | self.end.reports.keys()) == self._num_ranks:
            return 0.0  # nobody is left who could tell us more
        if self._stop.signal is not None:
            return BROKEN_STOP_S if self._in_training() else CAUSE_WINDOW_S
        died = any(left.failed and left.rank not in self.end.reports for left in self.end.exits.values())
        cause_known = died or any(not report.secondary for report in self.end.reports.values())
        return CAUSE_WINDOW_S if cause_known else SUSPECT_WINDOW_S

    def _next_deadline(self) -> float:
        return self._kill_at() if math.isinf(self._killed_at) else self._killed_at + KILL_PATIENCE_S

    def _keep_deadlines(self) -> None:
        now = time.monotonic()
        if self._is_over():
            return
        if math.isinf(self._killed_at) and now >= self._kill_at():
            self._killed_at = now
            self.end.grace_over = now >= self._grace_until
            self._server.link.send({"do": "kill"})
        elif now >= self._killed_at + KILL_PATIENCE_S:  # the server does not answer
            self._server.kill()

    def _collect_reports(self) -> None:
        for rank in range(self._num_ranks):
            if rank not in self.end.reports:
                report = load_report(error_report(self._run_dir, rank, self.end.number))
                if report is not None:
                    self.end.reports[rank] = report

    def _in_training(self) -> bool:
        places = (read_black_box(black_box(self._run_dir, rank)) for rank in range(self._num_ranks))
        return any(place is not None and place.step >= 1 for place in places)


def stopping_line(number: signal.Signals, grace_s: float) -> str:
    if number == signal.SIGINT:
        return "stopping after this step and saving; press Ctrl-C again to stop at once"
    return f"{number.name}: stopping after this step and saving, within {grace_s:g} s"
