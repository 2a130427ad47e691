"""The endpoint /metrics: answers with the newest snapshot, and never waits for a run."""

from __future__ import annotations

import ipaddress
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from phalanx.core.errors import EnvironmentProblem
from phalanx.report.prometheus.exposition import build_metrics_app
from phalanx.report.prometheus.values import MetricSnapshot

METRICS_PATH = "/metrics"
_REQUEST_TIMEOUT_S = 10.0  # a client that sends nothing is left
_SERVER_ERROR = "500 Internal Server Error"
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")

StartResponse = Callable[[str, list[tuple[str, str]]], Any]
_INDEX = b'<!doctype html><title>phalanx</title><a href="/metrics">metrics</a>\n'


class MetricsServer:
    """Serves snapshots on a port, each scrape in a thread of its own.

    Until the first snapshot is published it answers 503: counters that begin too low would look as
    if the run had been started again. Where there is none to answer with it answers 500: a page
    without values would look like a run without facts.
    """

    def __init__(self, server: WSGIServer, host: str) -> None:
        self.host, self.port = host, int(server.server_address[1])
        self._server = server
        self._render = build_metrics_app(lambda: self._snapshot)
        self._snapshot: MetricSnapshot | None = None
        self._failure = ""
        self._condition = threading.Condition()
        # Monotonic seconds of the last two scrapes.
        self._scraped_s: list[float] = []
        self._scraped_snapshot: MetricSnapshot | None = None
        self._thread = threading.Thread(
            target=server.serve_forever, name="phalanx-metrics", daemon=True
        )

    def start(self) -> None:
        self._server.set_app(self._answer)
        self._thread.start()

    @property
    def address(self) -> str:
        """ "127.0.0.1:9464", as Prometheus names a target."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}{METRICS_PATH}"

    @property
    def scrape_interval_s(self) -> float | None:
        """Seconds between the last two scrapes; None before there were two."""
        with self._condition:
            if len(self._scraped_s) < 2:
                return None
            return self._scraped_s[1] - self._scraped_s[0]

    @property
    def scrape_age_s(self) -> float | None:
        """Seconds since the last scrape; None before there was one."""
        with self._condition:
            if not self._scraped_s:
                return None
            return time.monotonic() - self._scraped_s[-1]

    def publish(self, snapshot: MetricSnapshot) -> None:
        """Answer with `snapshot` from now on."""
        self._snapshot, self._failure = snapshot, ""

    def publish_failure(self, reason: str) -> None:
        """Answer 500 with `reason` until the next snapshot."""
        self._failure = reason

    def wait_until_scraped(self, timeout_s: float) -> bool:
        """Wait until the newest snapshot has been served; False if it was not in time."""
        with self._condition:
            return self._condition.wait_for(
                lambda: self._scraped_snapshot is self._snapshot, timeout_s
            )

    def close(self) -> None:
        """Give the port back."""
        # shutdown waits for serve_forever, and would wait for ever for one that never ran.
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()

    def _answer(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        if refusal := self._find_refusal(environ):
            return _send_text(start_response, refusal)
        if environ.get("PATH_INFO") == "/":
            start_response("200 OK", [("Content-Type", "text/html; charset=utf-8")])
            return [_INDEX]
        if self._failure:
            return _send_text(start_response, _SERVER_ERROR, self._failure)
        served = self._snapshot
        if served is None:
            return _send_text(start_response, "503 Service Unavailable", "reading the run")
        try:
            # It has all of the answer before it starts one.
            answer: Iterable[bytes] = self._render(environ, start_response)
        except Exception as error:
            reason = f"the metrics cannot be rendered: {type(error).__name__}: {error}"
            print(f"phalanx: {reason}", file=sys.stderr)
            return _send_text(start_response, _SERVER_ERROR, reason)
        with self._condition:
            self._scraped_s = [*self._scraped_s, time.monotonic()][-2:]
            self._scraped_snapshot = served
            self._condition.notify_all()
        return answer

    def _find_refusal(self, environ: dict[str, Any]) -> str | None:
        """The status of a request that is not answered; None of one that is."""
        if environ.get("REQUEST_METHOD") != "GET":
            return "405 Method Not Allowed"
        if is_loopback(self.host) and not _names_loopback(environ.get("HTTP_HOST", "")):
            # A web page whose name was pointed at this machine must not read what it serves.
            return "421 Misdirected Request"
        if environ.get("PATH_INFO") not in ("/", METRICS_PATH):
            return "404 Not Found"
        return None


def open_metrics_server(host: str, port: int) -> MetricsServer:
    """Bind a port (0: a free one); nothing is served before `start`.

    Raises EnvironmentProblem if it cannot be bound.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        server_class = _ServerV6 if family == socket.AF_INET6 else _Server
        return MetricsServer(server_class((host, port), _QuietHandler), host)
    except OSError as error:
        raise EnvironmentProblem(
            f"metrics cannot be served on {host}:{port}",
            why=error.strerror or str(error),
            fix="choose another port, or 0 for a free one",
        ) from None


def is_loopback(host: str) -> bool:
    """True for addresses that only this machine reaches."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _names_loopback(host_header: str) -> bool:
    """True if the header Host names this machine by itself, with or without a port."""
    name, _, port = host_header.rpartition(":")
    if not name or not port.isdecimal():
        name = host_header
    return name in _LOOPBACK_NAMES or is_loopback(name.strip("[]"))


def _send_text(
    start_response: StartResponse, status: str, text: str | None = None
) -> Sequence[bytes]:
    start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{text or status}\n".encode()]


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True  # a scrape that hangs does not keep the process

    def server_bind(self) -> None:
        # HTTPServer's would ask the resolver for this host's full name, which may take long.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def handle_error(self, *_: Any) -> None:
        """Say what went wrong. A client that has gone is no news."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            print(f"phalanx: a scrape failed: {type(error).__name__}: {error}", file=sys.stderr)


class _ServerV6(_Server):
    address_family = socket.AF_INET6


class _QuietHandler(WSGIRequestHandler):
    timeout = _REQUEST_TIMEOUT_S

    def log_message(self, *_: Any) -> None:
        """Log nothing."""
