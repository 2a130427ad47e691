"""`phalanx watch`: one page over HTTP for whoever has its address, and the same run in a terminal."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from browser import open_browser
from commands import DEADLINE_S
from phalanx.checkpoint.ownership.run_lock import LockHolder
from phalanx.cli import _app
from phalanx.cli.watch import describe_run_beside_page
from phalanx.core.errors import UsageError
from phalanx.launch.output_destination import record_output_destination
from phalanx.observe import events
from phalanx.observe.bus import Bus
from phalanx.report.live.live_page import LivePage
from phalanx.report.live.page_server import PageServer, open_page_server
from phalanx.report.page import CONTENT_SECURITY_POLICY, render_page
from phalanx.report.reduce import collect_run_facts
from phalanx.run.run_in_use import is_run_cut_off

LAYOUT = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "ep": 1}


class LiveRun:
    """A run of one rank that goes on as the test says, written by the real writers."""

    def __init__(self, directory: Path, total_steps: int = 100) -> None:
        self.directory = directory
        self._rank = Bus(rank=0, run_dir=directory)
        self._supervisor = Bus(rank=-1, run_dir=directory)
        self._rank.emit(events.RunStarted("a-run", "d", 1, 0, total_steps, "cpu", LAYOUT, "", 1.0))
        self._num_steps = 0

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._num_steps += 1
            phases_s = {"forward": 0.04, "backward": 0.05}
            self._rank.emit(
                events.StepFinished(
                    self._num_steps, 3.0 - 0.01 * self._num_steps, 64, 64, 1e-3, 1.0, 0.1, 640.0,
                    phases_s, 0.01, 2**28,
                )
            )  # fmt: skip

    def finish(self, status: str = "finished", code: int = 0) -> None:
        self._supervisor.emit(events.RunFinished(status, code, self._num_steps, 12.0))

    def close(self) -> None:
        self._rank.close()
        self._supervisor.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LiveRun]:
    live = LiveRun(tmp_path)
    yield live
    live.close()


@contextlib.contextmanager
def serving(run: LiveRun) -> Iterator[PageServer]:
    page = LivePage(run.directory, lambda: "1 of 1 rank here are alive.")
    with open_page_server(0, page.render) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def started(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """`phalanx ARGUMENTS` in a process that does not outlive the test, whatever fails."""
    command = [sys.executable, "-m", "phalanx", *arguments]
    with subprocess.Popen(command, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def ask(
    server: PageServer, path: str, *, method: str = "GET", host: str | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """One real request over a socket, its path as it stands."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_S)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        if host != "":
            connection.putheader("Host", host or f"127.0.0.1:{server.port}")
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def test_the_page_is_there_for_who_has_its_address(run: LiveRun) -> None:
    run.train(12)
    with serving(run) as server:
        status, headers, body = ask(server, f"/{server.token}/")
        assert status == 200
        assert b"12 / 100" in body
        assert b'id="live"' in body
        assert headers["Content-Type"] == "text/html; charset=utf-8"
        assert headers["Cache-Control"] == "no-store"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Content-Security-Policy"] == (
            f"{CONTENT_SECURITY_POLICY}; connect-src 'self'; frame-ancestors 'none'"
        )
        assert server.server_address[0] == "127.0.0.1"
        again, _, nothing = ask(server, f"/{server.token}/", If_None_Match=headers["ETag"])
        assert (again, nothing) == (304, b"")
        assert ask(server, f"/{server.token}/", host=f"localhost:{server.port}")[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "evil.example:{port}",
        "127.0.0.1",
        "127.0.0.1:1",
        "127.0.0.1.evil.example:{port}",
        "[::1]:{port}",
    ],
)
def test_another_host_name_is_refused(run: LiveRun, host: str) -> None:
    """A name that was rebound to 127.0.0.1 comes with the right token, and a wrong Host."""
    with serving(run) as server:
        status, _, body = ask(
            server, f"/{server.token}/", host=host.replace("{port}", str(server.port))
        )
        assert status == 403
        assert b"a-run" not in body


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", 200), ("localhost", 200), ("localhost:80", 200), ("evil.example", 403)],
)
def test_browsers_leave_out_the_port_of_http(
    run: LiveRun, host: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(run) as server:
        port = server.port
        monkeypatch.setattr(PageServer, "port", 80)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
        with contextlib.closing(connection):
            connection.request("GET", f"/{server.token}/", headers={"Host": host})
            assert connection.getresponse().status == expected


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "TRACE"])
def test_only_get_is_answered(run: LiveRun, method: str) -> None:
    with serving(run) as server:
        status, headers, body = ask(server, f"/{server.token}/", method=method)
        assert (status, headers["Allow"]) == (405, "GET")
        assert b"a-run" not in body


@pytest.mark.parametrize(
    "path",
    [
        "/", "/{token}", "/wrong/", "/{token}/../", "/{token}/job.json", "/{token}//etc/passwd",
        "/{token}/%2e%2e/%2e%2e/etc/passwd", "/../../etc/passwd", "/{token}/?x=1", "/favicon.ico",
        "http://127.0.0.1/{token}/", "/{short}/",
    ],
)  # fmt: skip
def test_no_other_path_is_there(run: LiveRun, path: str) -> None:
    with serving(run) as server:
        asked = path.replace("{token}", server.token).replace("{short}", server.token[:-1])
        status, _, body = ask(server, asked)
        assert (status, body) == (404, b"nothing is there\n")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        pytest.param(
            UsageError("a newer phalanx wrote this run", fix="update phalanx"),
            b"a newer phalanx wrote this run; update phalanx\n",
            id="of-a-newer-release",
        ),
        pytest.param(
            OverflowError("too large"), b"internal error: OverflowError('too large')\n", id="bug"
        ),
    ],
)
def test_what_cannot_be_read_is_said(run: LiveRun, error: Exception, said: bytes) -> None:
    """The server stays up, and the page says that it does not answer."""

    def refuse() -> str:
        raise error

    with open_page_server(0, LivePage(run.directory, refuse).render) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            status, _, body = ask(server, f"/{server.token}/")
        finally:
            server.shutdown()
            thread.join()
    assert (status, body) == (500, said)


def test_tokens_are_long_and_never_the_same(run: LiveRun) -> None:
    with serving(run) as first, serving(run) as second:
        assert first.token != second.token
        assert len(first.token) >= 32
        assert ask(first, f"/{second.token}/")[0] == 404


def test_a_port_that_is_taken_is_refused(run: LiveRun, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(run) as server:
        arguments = ["watch", str(run.directory), "--port", str(server.port)]
        assert _app.run_command_line(arguments) == 2
        assert f"port {server.port} cannot be opened" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("{nowhere}",), "no run is there"),
        (("{run}", "--port", "99999"), "--port"),
        (("{run}", "--port", "80", "--terminal"), "leave one out"),
    ],
)
def test_bad_input_is_one_line(
    run: LiveRun, arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"{run}": str(run.directory), "{nowhere}": str(run.directory / "nowhere")}
    assert _app.run_command_line(["watch", *(names.get(each, each) for each in arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert len(captured.err.splitlines()) == 1


def test_the_command_serves_until_it_is_interrupted(run: LiveRun) -> None:
    run.train(3)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started("watch", str(run.directory), **pipes) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        address = process.stdout.readline().split()[1]
        host, _, path = address.removeprefix("http://").partition("/")
        connection = http.client.HTTPConnection(host, timeout=DEADLINE_S)
        connection.request("GET", f"/{path}")
        assert connection.getresponse().status == 200
        connection.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 0
        assert process.stderr.read() == ""


def test_the_terminal_shows_a_run_that_was_started_elsewhere_to_its_end(run: LiveRun) -> None:
    """On a terminal of its own: the bar of the steps, then how the run ended."""
    run.train(40)
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    streams = {"stdout": theirs, "stderr": theirs, "stdin": theirs}
    with started("watch", str(run.directory), "--terminal", **streams, env=environment) as process:
        os.close(theirs)
        # The facts of a step stand below its bar: one read may end between the two.
        read_until(ours, b"40/100", b"loss 2.6")
        run.train(1)
        read_until(ours, b"41/100")
        run.finish("failed", 1)
        assert b"failed after step 41" in read_until(ours, b"exit code 1")
        assert process.wait(DEADLINE_S) == 0
    os.close(ours)


def read_until(descriptor: int, *words: bytes) -> bytes:
    """What a terminal shows until each of the words was there."""
    shown = b""
    while any(each not in shown for each in words):
        try:
            piece = os.read(descriptor, 1 << 16)
        except OSError:
            piece = b""
        assert piece, shown
        shown += piece
    return shown


def test_the_terminal_view_of_a_pipe_ends_with_an_interrupt(run: LiveRun) -> None:
    run.train(10)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started("watch", str(run.directory), "--terminal", **pipes) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "a-run: 1 rank on cpu, one rank, started in 1.0 s\n"
        assert process.stdout.readline().startswith("step 1/100  loss 2.99")
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 0
        assert process.stderr.read() == ""


def test_the_terminal_view_of_a_run_that_was_cut_off_ends(
    run: LiveRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """As its lock and the age of its files tell: the job is gone, and recorded no end."""
    run.train(10)
    (run.directory / "job.json").write_text("{}")
    with (run.directory / "events" / "rank-0000-attempt-00.jsonl").open("a") as file:
        file.write("spoilt\n")
    leave_lock_of_dead_job(run.directory)
    command = ["watch", str(run.directory), "--terminal"]
    assert _app.run_command_line(command) == 0
    shown, errors = capsys.readouterr()
    assert "step 10/100" in shown
    assert "1 line of the event files could not be read" in errors
    assert "cut off, it seems: its processes are gone and no end was recorded" in shown
    assert f"train --resume {run.directory} goes on with it" in shown


def test_a_run_that_a_launcher_may_start_again_is_not_cut_off(run: LiveRun) -> None:
    """Its files are of this minute, or nothing is known of its processes."""
    run.train(10)
    assert not is_run_cut_off(run.directory)
    leave_lock_of_dead_job(run.directory)
    assert is_run_cut_off(run.directory)
    run.train(1)
    assert not is_run_cut_off(run.directory)


def test_a_run_that_torchrun_started_is_not_cut_off_while_its_ranks_start_again(
    run: LiveRun,
) -> None:
    """They import torch and meet before they write anything."""
    run.train(10)
    record_output_destination(run.directory, 0, 0, "torchrun")
    leave_lock_of_dead_job(run.directory)
    assert not is_run_cut_off(run.directory)
    for path in (run.directory / "lock", *(run.directory / "events").iterdir()):
        os.utime(path, (time.time() - 700.0,) * 2)
    assert is_run_cut_off(run.directory)


def test_the_terminal_view_of_a_run_without_any_event_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A power cut may leave files of zeros."""
    (tmp_path / "events").mkdir()
    file = tmp_path / "events" / "rank-0000-attempt-00.jsonl"
    file.write_bytes(bytes(5000))
    os.utime(file, (1.0, 1.0))
    assert _app.run_command_line(["watch", str(tmp_path), "--terminal"]) == 0
    assert "cut off, it seems: its processes are gone" in capsys.readouterr().out


def leave_lock_of_dead_job(run_dir: Path) -> None:
    """The lock of a process that has ended, two minutes after the last event of its run."""
    with subprocess.Popen(["true"]) as process:
        pid = process.pid
    (run_dir / "lock").write_text(
        json.dumps(asdict(LockHolder(socket.gethostname(), pid, 1.0, "of-this-boot", 1.0)))
    )
    for path in (run_dir / "lock", *(run_dir / "events").iterdir()):
        os.utime(path, (time.time() - 120.0,) * 2)


# --- in a browser ---------------------------------------------------------------------------------


def test_a_browser_keeps_what_its_reader_does_while_the_page_is_updated(run: LiveRun) -> None:
    """The element with the focus stays the same element, its read-out stays, open tables stay
    open; nothing is asked of anybody but the server."""
    run.train(20)
    with open_browser() as browser, serving(run) as server:
        browser.open(server.url)
        browser.wait_for("document.querySelector('.updated').textContent.startsWith('Up to date')")
        browser.evaluate(
            "(() => { const plot = document.querySelector('#training .plot'); plot.mark = 'mine';"
            " plot.focus(); document.querySelector('#training details').open = true; })()"
        )
        browser.press("ArrowLeft")
        assert browser.evaluate(
            "document.querySelector('#training output').textContent"
        ).startswith("step 20:")
        run.train(5)
        browser.wait_for("document.querySelector('dl.keys').textContent.includes('25 / 100')")
        state = browser.evaluate(
            "[document.activeElement.mark, document.querySelector('#training details').open,"
            " document.querySelector('#training output').textContent,"
            " document.querySelector('#live').textContent]"
        )
        assert state[:2] == ["mine", True]
        assert state[2].startswith("step 20:")
        assert "1 of 1 rank here are alive." in state[3]
        # The keys now move through the new points.
        browser.press("ArrowRight")
        assert browser.evaluate(
            "document.querySelector('#training output').textContent"
        ).startswith("step 21:")
        run.finish()
        browser.wait_for("document.querySelector('#live').textContent.includes('has ended')")
        assert (
            browser.evaluate("document.querySelector('header .status').textContent") == "finished"
        )
        assert browser.problems == []
        assert {url.partition("#")[0] for url in browser.requests if url != "data:,"} == {
            server.url
        }


def test_of_a_run_that_has_ended_nobody_says_that_it_goes_on(run: LiveRun) -> None:
    run.train(40)
    assert describe_run_beside_page(run.directory) == "the run is not disturbed"
    run.finish("failed", 1)
    assert describe_run_beside_page(run.directory) == "the run failed after step 40"


def test_an_end_that_names_the_newest_saved_step_is_told_with_the_last_one_done(
    run: LiveRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """As earlier releases recorded it: nothing was saved by step 16."""
    run.train(16)
    run._supervisor.emit(events.RunFinished("failed", 7, 0, 12.0))
    assert describe_run_beside_page(run.directory) == "the run failed after step 16"
    assert _app.run_command_line(["watch", str(run.directory), "--terminal"]) == 0
    shown = capsys.readouterr().out
    assert shown.endswith(": failed after step 16, exit code 7\n")
    assert "before the first step" not in shown
    facts = collect_run_facts(run.directory)
    assert "failed after step 16" in str(render_page(facts))
    assert "before the first step" not in str(render_page(facts))
