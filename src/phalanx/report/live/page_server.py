"""`PageServer`: one page over HTTP, on the loopback interface, for whoever knows its token.

A web page of anybody, open in the same browser, can send requests to this machine: the name in the
Host header must be this machine's own (a name that was rebound to 127.0.0.1 is another), and the
path is a random token. Only GET is answered, with nothing but this page: no path leads to a file.
"""

from __future__ import annotations

import hmac
import http.client
import secrets
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from phalanx.core.errors import PhalanxError, UsageError
from phalanx.report.live.live_page import RenderedPage
from phalanx.report.page import LIVE_CONTENT_SECURITY_POLICY

LOOPBACK = "127.0.0.1"
_REQUEST_TIMEOUT_S = 20.0
_HEADERS = {
    "Content-Security-Policy": f"{LIVE_CONTENT_SECURITY_POLICY}; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class PageServer(ThreadingHTTPServer):
    """Serves what `render` gives at `url`. Open it with `open_page_server`."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, port: int, token: str, render: Callable[[], RenderedPage]) -> None:
        super().__init__((LOOPBACK, port), _PageRequestHandler)
        self.token, self.render = token, render

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away in the middle of an answer is no error."""


def open_page_server(port: int, render: Callable[[], RenderedPage]) -> PageServer:
    """A server on `port` (0: any that is free), not serving yet.

    Raises UsageError for a port that cannot be had.
    """
    try:
        return PageServer(port, secrets.token_urlsafe(24), render)
    except OSError as error:
        raise UsageError(
            f"port {port} cannot be opened",
            why=error.strerror or str(error),
            fix="give another --port, or none for one that is free",
        ) from None


class _PageRequestHandler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "phalanx", ""
    timeout = _REQUEST_TIMEOUT_S

    def do_GET(self) -> None:
        if not self._has_local_host_name():
            self._refuse(HTTPStatus.FORBIDDEN, "the Host header does not name this machine")
        elif not self._has_token():
            self._refuse(HTTPStatus.NOT_FOUND, "nothing is there")
        else:
            self._answer_with_page()

    def _answer_with_page(self) -> None:
        try:
            page = self.server.render()
        except PhalanxError as error:
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
        except Exception as error:
            # Our own bug: said here, as else the browser gets an empty answer.
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, f"internal error: {error!r}")
        else:
            self._send_page(page)

    def _refuse_method(self) -> None:
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "only GET is answered")

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = (
        _refuse_method
    )

    def _has_local_host_name(self) -> bool:
        names = self.headers.get_all("Host", [])
        return names in ([name] for name in _list_own_hosts(self.server.port))

    def _has_token(self) -> bool:
        # In constant time: how long it takes must not tell how much of a guess is right.
        return hmac.compare_digest(self.path.encode(), f"/{self.server.token}/".encode())

    def _send_page(self, page: RenderedPage) -> None:
        if self.headers.get("If-None-Match") == page.etag:
            self.send_response(HTTPStatus.NOT_MODIFIED)
            self._send_common_headers(page.etag)
            self.end_headers()
            return
        self.send_response(HTTPStatus.OK)
        self._send_common_headers(page.etag)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(page.body)))
        self.end_headers()
        self.wfile.write(page.body)

    def _send_common_headers(self, etag: str = "") -> None:
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if etag:
            self.send_header("ETag", etag)

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        body = f"{text}\n".encode()
        self.send_response(status)
        self._send_common_headers()
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET")
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        # What a refused request has sent besides is not read.
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing: a line for each refresh tells nobody anything, and has the token."""


def _list_own_hosts(port: int) -> list[str]:
    """What a browser of this machine writes into the Host header."""
    names = (LOOPBACK, "localhost")
    hosts = [f"{name}:{port}" for name in names]
    # Browsers leave out the port that http has by itself.
    return [*hosts, *names] if port == http.client.HTTP_PORT else hosts
