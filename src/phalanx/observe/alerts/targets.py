"""The places that alerts are sent to: a webhook (HTTP POST of JSON) and a command (JSON on its
standard input)."""

from __future__ import annotations

import http.client
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

WEBHOOK_TIMEOUT_S = 10.0
COMMAND_TIMEOUT_S = 30.0
# Client errors that another try may mend; after the others it would be refused again.
_TRANSIENT_CLIENT_ERRORS = (408, 425, 429)


class AlertDeliveryError(Exception):
    """A message did not arrive. `is_final`: another try would fail in the same way."""

    def __init__(self, why: str, *, is_final: bool = False) -> None:
        super().__init__(why)
        self.why, self.is_final = why, is_final


class AlertTarget(Protocol):
    """A place that takes messages."""

    @property
    def name(self) -> str:
        """The name in lines for people; never with a secret in it."""
        ...

    def deliver(self, body: bytes) -> None:
        """Raises AlertDeliveryError."""
        ...


@dataclass(frozen=True)
class WebhookTarget:
    """POSTs the message to a URL. Its path may be a secret: only the host is ever said."""

    url: str

    @property
    def name(self) -> str:
        return f"webhook {urlsplit(self.url).hostname}"

    def deliver(self, body: bytes) -> None:
        headers = {"Content-Type": "application/json", "User-Agent": "phalanx"}
        request = urllib.request.Request(self.url, data=body, headers=headers, method="POST")
        try:
            with _OPENER.open(request, timeout=WEBHOOK_TIMEOUT_S) as answer:
                answer.read(1024)
        except urllib.error.HTTPError as error:
            is_final = 300 <= error.code < 500 and error.code not in _TRANSIENT_CLIENT_ERRORS
            raise AlertDeliveryError(f"it answers {error.code}", is_final=is_final) from None
        except urllib.error.URLError as error:
            raise AlertDeliveryError(f"no answer: {error.reason}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise AlertDeliveryError(f"no answer: {type(error).__name__}") from None


class _RefuseRedirects(urllib.request.HTTPRedirectHandler):
    """A redirected POST would become a GET without the message, at a place the user did not
    name."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_RefuseRedirects)


@dataclass(frozen=True)
class CommandTarget:
    """Runs a command for each message, which it gets on standard input. What it prints goes where
    this process prints: to RUN/logs/observer.log."""

    arguments: Sequence[str]

    @property
    def name(self) -> str:
        return f"command {os.path.basename(self.arguments[0])}"

    def deliver(self, body: bytes) -> None:
        try:
            # Without pipes for what it prints: a child that it leaves behind would hold their ends,
            # and be waited for.
            done = subprocess.run(
                list(self.arguments), input=body, timeout=COMMAND_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise AlertDeliveryError(f"it ran longer than {COMMAND_TIMEOUT_S:g} s") from None
        except OSError as error:
            raise AlertDeliveryError(f"cannot be run: {error.strerror}", is_final=True) from None
        if done.returncode != 0:
            raise AlertDeliveryError(
                f"it ended with exit code {done.returncode} (RUN/logs/observer.log has what it"
                " printed)"
            )
