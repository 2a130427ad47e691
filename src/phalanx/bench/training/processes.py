"""The processes of a comparison: a server that has imported torch, and the ranks of each contender,
which are forked from it. Torch-free."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.bench.training.contenders import Contender
from phalanx.bench.training.payload import (
    BUILT,
    DONE,
    END,
    FAILURE,
    GO,
    PREPARED,
    REFUSAL,
    TURN,
    MessageLines,
    RankSetting,
    RankTurn,
    Turn,
)
from phalanx.core.errors import EnvironmentProblem
from phalanx.job.module_probe import find_last_line
from phalanx.job.schema import Job
from phalanx.plan.plan import Plan

SERVER_MODULE = "phalanx.bench.training.server"
IMPORT_TIMEOUT_S = 300.0
BUILD_TIMEOUT_S = 600.0
LEAST_TURN_TIMEOUT_S = 120.0
# Between turns ranks are stopped: libraries have threads that look for something now and then, and
# would disturb those whose turn it is. The kernel ends them with us, also while they are stopped;
# on other systems than Linux it does not, and ranks only wait.
STOP_SIGNAL = signal.SIGSTOP if sys.platform == "linux" else 0
# How long a rank that was told to end may take.
END_TIMEOUT_S = 5.0


class ContenderFailedError(Exception):
    """A rank of a contender raised, ended or did not answer; the message says which and why."""


class ContenderServer:
    """The process that ranks are forked from. Ranks end with it, and it with us."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None

    def __enter__(self) -> ContenderServer:
        self._requests, child_end = socket.socketpair()
        with child_end, open(self._directory / "server.log", "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", SERVER_MODULE, str(child_end.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_build_server_environment(),
                pass_fds=(child_end.fileno(),),
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._requests is not None:
            self._requests.close()

    def wait_until_ready(self) -> None:
        """Return when the server has imported torch. Raises EnvironmentProblem."""
        self._read_answer(IMPORT_TIMEOUT_S)

    def fork_rank(self, log_path: Path) -> tuple[int, MessageLines]:
        """Fork a rank: its process, and the messages to and from it. Raises EnvironmentProblem."""
        assert self._requests is not None, "entered"
        parent_end, child_end = socket.socketpair()
        try:
            with child_end:
                socket.send_fds(self._requests, [str(log_path).encode()], [child_end.fileno()])
            return int(self._read_answer(IMPORT_TIMEOUT_S)), MessageLines(parent_end)
        except (OSError, ValueError):
            parent_end.close()
            raise self._build_error() from None

    def _read_answer(self, timeout_s: float) -> bytes:
        assert self._requests is not None, "entered"
        self._requests.settimeout(timeout_s)
        try:
            answer = self._requests.recv(64)
        except OSError:
            answer = b""
        if not answer:
            raise self._build_error()
        return answer

    def _build_error(self) -> EnvironmentProblem:
        words = find_last_line((self._directory / "server.log").read_text(errors="replace"))
        return EnvironmentProblem(
            "the process that starts ranks ended early", why=words or "it said nothing"
        )


@dataclass
class RankGroup:
    """The ranks of one contender, which live through their part of the comparison."""

    contender: Contender
    directory: Path
    _pids: list[int] = field(default_factory=list)
    _ranks: list[MessageLines] = field(default_factory=list)

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of the ranks, in rank order; none before `start` and after `close`."""
        return tuple(self._pids)

    def start(self, server: ContenderServer, job: Job, plan: Plan, num_ranks: int) -> None:
        """Start the ranks, and return when all have built their model. Raises
        ContenderFailedError."""
        self.directory.mkdir(parents=True)
        port = _find_free_port()
        for rank in range(num_ranks):
            pid, messages = server.fork_rank(self._log_path(rank))
            self._pids.append(pid)
            self._ranks.append(messages)
        for rank, messages in enumerate(self._ranks):
            setting = RankSetting(
                self.contender, job, plan, rank, num_ranks, port, self.directory / "run"
            )
            self._send(rank, messages, setting.to_json())
        self._receive_from_all(BUILT, BUILD_TIMEOUT_S)
        self._signal_ranks(STOP_SIGNAL)

    def take_turn(self, turn: Turn, *, expected_s: float) -> list[RankTurn]:
        """Let all ranks take the steps of `turn` at once; what each had of it, in rank order.

        Raises ContenderFailedError, also if they take far longer than `expected_s`.
        """
        timeout_s = max(LEAST_TURN_TIMEOUT_S, 30 * expected_s)
        self._signal_ranks(signal.SIGCONT)
        for rank, messages in enumerate(self._ranks):
            self._send(rank, messages, {TURN: turn.to_json()})
        self._receive_from_all(PREPARED, timeout_s)
        for rank, messages in enumerate(self._ranks):
            self._send(rank, messages, {GO: True})
        answers = self._receive_from_all(DONE, timeout_s)
        self._signal_ranks(STOP_SIGNAL)
        return [RankTurn.from_json(answer[DONE]) for answer in answers]

    def close(self) -> None:
        """End the ranks: by word, and those that do not hear by a signal."""
        self._signal_ranks(signal.SIGCONT)
        for messages in self._ranks:
            try:
                messages.send({END: True})
            except OSError:
                pass
        deadline = time.monotonic() + END_TIMEOUT_S
        for pid, messages in zip(self._pids, self._ranks, strict=True):
            messages.connection.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                while messages.receive() is not None:
                    pass
            except TimeoutError:
                # Its number is still its own: its end of the socket is open.
                os.kill(pid, signal.SIGKILL)
            messages.connection.close()
        self._pids, self._ranks = [], []

    def _signal_ranks(self, number: int) -> None:
        """Send a signal to the ranks that have not ended."""
        for pid in self._pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                # That it has ended shows on its socket.
                pass

    def _send(self, rank: int, messages: MessageLines, message: Mapping[str, Any]) -> None:
        try:
            messages.send(message)
        except OSError:
            raise ContenderFailedError(self._describe_end(rank, messages)) from None

    def _receive_from_all(self, key: str, timeout_s: float) -> list[dict[str, Any]]:
        """One message of each rank, which has `key`. Raises ContenderFailedError."""
        deadline = time.monotonic() + timeout_s
        answers = []
        for rank, messages in enumerate(self._ranks):
            messages.connection.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                answer = messages.receive()
            except TimeoutError:
                raise ContenderFailedError(
                    f"rank {rank} did not answer in {timeout_s:g} s"
                ) from None
            messages.connection.settimeout(None)
            if answer is None:
                raise ContenderFailedError(self._describe_end(rank, messages))
            if key not in answer:
                raise ContenderFailedError(_describe_refusal(rank, answer))
            answers.append(answer)
        return answers

    def _describe_end(self, rank: int, messages: MessageLines) -> str:
        try:
            words = find_last_line(self._log_path(rank).read_text(errors="replace"))
        except OSError:
            words = ""
        return f"rank {rank} ended early: {words or 'it said nothing'}"

    def _log_path(self, rank: int) -> Path:
        return self.directory / f"rank-{rank}.log"


def _describe_refusal(rank: int, answer: Mapping[str, Any]) -> str:
    if REFUSAL in answer:
        refusal = answer[REFUSAL]
        return f"rank {rank}: " + ": ".join(filter(None, (refusal["what"], refusal["why"])))
    return f"rank {rank}: {answer.get(FAILURE, 'it answered something else')}"


def _find_free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _build_server_environment() -> dict[str, str]:
    """Our own, with our search path for modules ("" in it is the current directory)."""
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return os.environ | {"PYTHONPATH": paths}
