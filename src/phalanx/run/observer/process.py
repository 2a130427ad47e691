"""The observer of a run, a process: `python -m phalanx.run.observer.process SETTINGS`.

It reads the run directory once a second at a low priority, serves metrics and sends alerts. It
outlives restarts of the ranks, and ends when its standard input does, which the process that holds
the run keeps open: after the last alert was sent and the end of the run was scraped, both within
limits. What it has to say goes out as lines of JSON on its standard output.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from phalanx.core.errors import EnvironmentProblem
from phalanx.core.files import write_json_atomically
from phalanx.core.logs import redirect_output_to_log
from phalanx.core.secrets import Redactor
from phalanx.core.stop_signals import ignore_stop_signals
from phalanx.observe.alerts.alert import Alert
from phalanx.observe.alerts.detector import AlertDetector
from phalanx.observe.alerts.sender import AlertSender
from phalanx.observe.events import Envelope
from phalanx.report.prometheus.http_server import MetricsServer, open_metrics_server
from phalanx.run.observer.follower import SILENCE_S, MetricsPublisher, RunFollower
from phalanx.run.observer.hang_watch import HangWatch
from phalanx.run.observer.requirements import list_alert_targets
from phalanx.run.observer.settings import (
    LAST_ALERTS_TIMEOUT_S,
    MAX_LAST_SCRAPE_WAIT_S,
    ObserverSettings,
)

READ_INTERVAL_S = 1.0
OBSERVER_NICENESS = 5  # the ranks come first
MAX_PIPE_READ_BYTES = 1 << 16
METRICS_TARGET_FILE = "metrics-target.json"
# While a process of before still has the port.
BIND_TIMEOUT_S = 30.0
_USUAL_SCRAPE_INTERVAL_S = 15.0
# Whoever stops a run kills it soon after.
LAST_ALERTS_IN_HASTE_S = 3.0


def run_observer_process(arguments: Sequence[str]) -> int:
    """The process, from its settings (JSON) to the end of its standard input."""
    settings = ObserverSettings.from_json(json.loads(arguments[0]))
    # Sent to the whole job: whoever holds the run decides when this ends.
    ignore_stop_signals()
    with contextlib.suppress(OSError):
        os.nice(OBSERVER_NICENESS)
    # A copy of standard output is the way back; what commands of the user's print goes to a log.
    speaker = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    redirect_output_to_log(settings.run_dir / "logs" / "observer.log", Redactor(os.environ))
    observer = Observer(settings, speaker)
    try:
        observer.observe_until_end_of_input(sys.stdin.fileno())
    finally:
        observer.close()
    return 0


class Observer:
    """Serves the metrics of one run and sends its alerts."""

    def __init__(self, settings: ObserverSettings, speaker: TextIO) -> None:
        self._settings, self._speaker = settings, speaker
        self._redactor = Redactor(os.environ)
        # Often enough that a step which takes long is not taken for a hang.
        silence_s = min(SILENCE_S, settings.hang_alert_s / 3)
        self._follower = RunFollower(settings.run_dir, silence_s)
        self._detector = AlertDetector(settings.attempt_from)
        self._hang = HangWatch(settings.run_dir, settings.hang_alert_s)
        self._sender = AlertSender(
            settings.run_dir, list_alert_targets(settings, os.environ), self._say
        )
        self._server: MetricsServer | None = None
        self._publisher: MetricsPublisher | None = None
        self._bind_until_s = time.monotonic() + BIND_TIMEOUT_S

    def observe_until_end_of_input(self, handle: int) -> None:
        self._sender.start()
        self._open_server_if_due()
        # Until it is read, the server says that it is not ready.
        self._tell_of_alerts(self._follower.iterate_past())
        last_words = b""
        while not last_words.endswith(b"\n"):
            self._open_server_if_due()
            self._read_news()
            if not select.select([handle], [], [], READ_INTERVAL_S)[0]:
                continue
            data = os.read(handle, MAX_PIPE_READ_BYTES)
            if not data:
                break
            last_words += data
        self._read_news()
        self._queue_alerts(self._detector.take_held_alerts())
        if self._follower.metrics.is_live:
            # Nothing on record says how the run ended.
            text = describe_end_of_holder(last_words, self._follower.metrics.state)
            self._sender.queue_alert(Alert("run_failed", text, time.time()))

    def close(self) -> None:
        """Send the last alerts, wait for the last scrape, give the port back."""
        state = self._follower.metrics.state
        is_in_haste = state in ("preempted", "interrupted")
        self._sender.close(LAST_ALERTS_IN_HASTE_S if is_in_haste else LAST_ALERTS_TIMEOUT_S)
        if self._server is None:
            return
        if state in ("finished", "failed"):
            self._server.wait_until_scraped(self._find_last_scrape_wait_s(self._server))
        self._server.close()
        with contextlib.suppress(OSError):
            (self._settings.run_dir / METRICS_TARGET_FILE).unlink()

    def _read_news(self) -> None:
        self._tell_of_alerts(self._follower.read_news())
        self._queue_alerts(self._detector.take_held_alerts(time.monotonic()))
        if self._settings.has_alerts:
            hang = self._hang.find_alert(self._follower)
            if hang is not None:
                self._sender.queue_alert(hang)
        if self._publisher is not None:
            self._publisher.publish()

    def _tell_of_alerts(self, envelopes: Iterable[Envelope]) -> None:
        for envelope in envelopes:
            alert = self._detector.find_alert(envelope, time.monotonic())
            if alert is not None:
                self._sender.queue_alert(alert)

    def _queue_alerts(self, alerts: Iterable[Alert]) -> None:
        for alert in alerts:
            self._sender.queue_alert(alert)

    def _open_server_if_due(self) -> None:
        settings = self._settings
        if self._server is not None or settings.metrics_port is None or not self._bind_until_s:
            return
        try:
            self._server = open_metrics_server(settings.metrics_host, settings.metrics_port)
        except EnvironmentProblem as error:
            if time.monotonic() >= self._bind_until_s:
                # Tried long enough: training goes on without.
                self._bind_until_s = 0.0
                self._say(str(error))
            return
        self._publisher = MetricsPublisher(self._server, self._follower, self._say_failure)
        self._server.start()
        _write_target_file(settings.run_dir, self._server)
        self._say(f"metrics for Prometheus at {self._server.url}")

    def _find_last_scrape_wait_s(self, server: MetricsServer) -> float:
        """Seconds that the end of the run waits to be scraped: not at all where nobody scrapes."""
        age_s = server.scrape_age_s
        if age_s is None:
            return 0.0
        interval_s = server.scrape_interval_s or _USUAL_SCRAPE_INTERVAL_S
        if age_s > 2 * interval_s:
            return 0.0
        return min(1.5 * interval_s + READ_INTERVAL_S, MAX_LAST_SCRAPE_WAIT_S)

    def _say_failure(self, reason: str) -> None:
        # A run that is refused before its first step takes its directory away.
        if self._settings.run_dir.exists():
            self._say(f"metrics are not served now: {reason}")

    def _say(self, line: str) -> None:
        # Into the log, too: at the end of a run nobody may hear it any more.
        print(line, file=sys.stderr)
        with contextlib.suppress(OSError, ValueError):
            message = {"say": self._redactor.redact_text(line)}
            self._speaker.write(json.dumps(message) + "\n")


def describe_end_of_holder(last_words: bytes, state: str) -> str:
    """A sentence on a run whose end is not on record. `last_words`: the reason that the process
    which held it gave for its own end; empty where it was killed."""
    if not last_words:
        return (
            f"the process that holds the run was killed while the run was {state}; if its launcher"
            " does not start it again, resume it"
        )
    reason = last_words.decode("utf-8", "replace").strip()
    return f"the run ended while it was {state}: {reason}"


def _write_target_file(run_dir: Path, server: MetricsServer) -> None:
    """Write where the metrics are, as Prometheus' file_sd_configs read it."""
    document: list[dict[str, Any]] = [{"targets": [server.address], "labels": {"job": "phalanx"}}]
    with contextlib.suppress(OSError):
        write_json_atomically(run_dir / METRICS_TARGET_FILE, document, durable=False)


if __name__ == "__main__":
    sys.exit(run_observer_process(sys.argv[1:]))
