"""Sends alerts in the background: a bounded queue, a thread, and a few tries for each message."""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from phalanx.core.secrets import Redactor
from phalanx.observe.alerts.alert import Alert
from phalanx.observe.alerts.targets import AlertDeliveryError, AlertTarget

MAX_WAITING_ALERTS = 100  # what comes beyond is left out, and said
RETRY_DELAYS_S = (1.0, 4.0, 15.0)  # before the second try, the third and the last


class AlertSender:
    """Sends the alerts of a run to `targets`, one after the other. `say` takes a line for the
    person who trains, where one could not be sent."""

    def __init__(
        self,
        run_dir: Path,
        targets: Sequence[AlertTarget],
        say: Callable[[str], None],
        retry_delays_s: Sequence[float] = RETRY_DELAYS_S,
    ) -> None:
        self._run_dir, self._targets, self._say = run_dir.resolve(), targets, say
        self._retry_delays_s = retry_delays_s
        self._redactor = Redactor(os.environ)
        self._host = socket.gethostname()
        self._queue: queue.Queue[Alert | None] = queue.Queue(MAX_WAITING_ALERTS)
        self._is_closing = threading.Event()
        self._thread = threading.Thread(
            target=self._send_queued_alerts, name="phalanx-alerts", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def queue_alert(self, alert: Alert) -> None:
        """Hand over an alert. Never waits."""
        if not self._targets:
            return
        try:
            self._queue.put_nowait(alert)
        except queue.Full:
            self._say(f"an alert is left out, as {MAX_WAITING_ALERTS} wait: {alert.kind}")

    def close(self, timeout_s: float) -> None:
        """Send what waits, for up to `timeout_s`; between tries it no longer waits."""
        self._is_closing.set()
        until = time.monotonic() + timeout_s
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            pass
        self._thread.join(max(until - time.monotonic(), 0.0))
        if self._thread.is_alive():
            self._say(f"{self._queue.qsize()} alerts or more were not sent by the end of the run")

    def _send_queued_alerts(self) -> None:
        while (alert := self._queue.get()) is not None:
            message = alert.to_json(self._run_dir.name, str(self._run_dir), self._host)
            body = json.dumps(self._redactor.redact_value(message), allow_nan=False).encode()
            for target in self._targets:
                self._send_message(target, alert, body)

    def _send_message(self, target: AlertTarget, alert: Alert, body: bytes) -> None:
        for delay_s in (*self._retry_delays_s, None):
            try:
                target.deliver(body)
                return
            except AlertDeliveryError as error:
                if error.is_final or delay_s is None:
                    self._say(f"the alert {alert.kind} was not sent to {target.name}: {error.why}")
                    return
            # At the end of the run there is no time to wait: the next try comes at once.
            self._is_closing.wait(delay_s)
