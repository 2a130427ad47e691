"""A real browser: Debian's chromium without a window, driven through a pipe."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_DEADLINE_S = 60.0
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_OPTIONS = (
    "--headless=new",
    # Tests run as root in containers, where chromium's own sandbox cannot be had.
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-pipe",
)
# It reads commands from descriptor 3 and answers on 4. Not by a shell: dash knows one-digit
# descriptors only.
_MOVE_PIPES = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_chromium() -> str | None:
    """The browser's program, if it is installed."""
    for name in _NAMES:
        path = shutil.which(name)
        if path is not None:
            return path
    return None


def require_chromium() -> str:
    """The browser's program; the test is skipped, with a reason, where there is none."""
    program = find_chromium()
    if program is None:
        pytest.skip("no chromium is installed (Debian: apt-get install chromium)")
    return program


class Browser:
    """One tab. Since the page was opened, `requests` are the addresses that it asked for, and
    `problems` what it complained of."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._rest = b""
        self._num_sent = 0
        self._session = ""
        self._events: list[dict[str, Any]] = []
        self.requests: list[str] = []
        self.problems: list[str] = []

    def begin(self) -> None:
        """Open the tab."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a page, and return once it has loaded."""
        scheme = "dark" if dark else "light"
        self._call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        for each in (self._events, self.requests, self.problems):
            each.clear()
        answer = self._call("Page.navigate", url=url)
        # Another fragment of the same page is no load.
        while "loaderId" in answer and not any(
            event["method"] == "Page.loadEventFired" for event in self._events
        ):
            self._take_message()

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; of a promise what it resolves to."""
        answer = self._call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Returns once a JavaScript condition holds of the document, which changes meanwhile."""
        self.evaluate(
            "new Promise((done) => { const look = () => { if (" + condition + ") {"
            " watcher.disconnect(); done(true); } };"
            " const watcher = new MutationObserver(look);"
            " watcher.observe(document, {subtree: true, childList: true, characterData: true,"
            " attributes: true}); look(); })"
        )

    def press(self, key: str) -> None:
        """Press a key by its name ("Tab", "ArrowLeft")."""
        codes = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39}
        for kind in ("keyDown", "keyUp"):
            self._call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=codes[key],
                text="\r" if key == "Enter" and kind == "keyDown" else "",
            )

    def take_screenshot(self, path: Path) -> Path:
        """Write the whole page as PNG."""
        answer = self._call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(answer["data"]))
        return path

    def end(self) -> None:
        """Close the browser."""
        with contextlib.suppress(OSError):
            self._send("Browser.close", {}, "")

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = self._send(method, parameters, self._session)
        while True:
            message = self._take_message()
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result

    def _send(self, method: str, parameters: dict[str, Any], session: str) -> int:
        self._num_sent += 1
        message: dict[str, Any] = {"id": self._num_sent, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        return self._num_sent

    def _take_message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], _DEADLINE_S)
            assert ready, f"the browser has said nothing for {_DEADLINE_S:g} s"
            piece = os.read(self._from, 1 << 20)
            assert piece, "the browser has ended"
            self._rest += piece
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self._take_event(message)
        return message

    def _take_event(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        method, parameters = event["method"], event["params"]
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(str(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(parameters["entry"]["text"])


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    """A browser with one empty tab, and a profile that goes with it."""
    program = require_chromium()
    their_in, our_out = os.pipe()
    our_in, their_out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                sys.executable, "-I", "-S", "-c", _MOVE_PIPES, str(their_in), str(their_out),
                program, *_OPTIONS, f"--user-data-dir={profile}", "about:blank",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(their_in, their_out),
        )  # fmt: skip
        os.close(their_in)
        os.close(their_out)
        browser = Browser(our_out, our_in)
        try:
            browser.begin()
            yield browser
        finally:
            browser.end()
            os.close(our_out)
            os.close(our_in)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
