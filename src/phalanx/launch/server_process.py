"""The supervisor's hold on the server process: start it, hear of its end, take it down with all
it forked."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import socket
import subprocess
import sys
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeAlias

from phalanx.core.files import (
    build_path_resource_error,
    open_regular_file,
    open_regular_file_for_append,
)
from phalanx.core.open_files import raise_open_file_limit
from phalanx.launch.external import read_external_launch
from phalanx.launch.messages import (
    SERVER_TO_SUPERVISOR_CODEC,
    SUPERVISOR_TO_SERVER_CODEC,
    ImportAhead,
    ServerOrder,
    ServerReport,
)
from phalanx.launch.paths import server_log_path
from phalanx.launch.rank_env import (
    SERVER_CHOSE_THREADS_VARIABLE,
    THREAD_VARIABLES,
    build_expandable_segments_variables,
)
from phalanx.launch.signals import format_signal_name
from phalanx.launch.wire import MessageChannel

_MAX_READ_BYTES = 1 << 20
ServerLink: TypeAlias = MessageChannel[ServerOrder, ServerReport]


class ServerProcess:
    """A running server. `link` carries messages.

    Only we hold the write end of the life pipe: when we die, however, the kernel kills the server
    and its ranks. All of them hold the write end of the presence pipe: when it ends, none of them
    is left.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        link: ServerLink,
        life: int,
        presence: int,
    ) -> None:
        self._process = process
        self.link = link
        self._life = life
        self._presence = presence
        self._log, self._log_start = Path(os.devnull), 0
        self._early_output = -1

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self.link.closed or self._process.poll() is not None

    def read_log_from(self, log: Path, start: int) -> None:
        """Take what follows on byte `start` of `log` for what this server writes."""
        self._log, self._log_start = log, start

    def read_early_output_from(self, descriptor: int) -> None:
        """Take the file for what this server writes until it has a log; it is closed with this
        object."""
        self._early_output = descriptor
        weakref.finalize(self, os.close, descriptor)

    def kill(self, timeout_s: float = 2.0) -> int:
        """SIGKILL the server, whose end kills what it forked, and wait for all of them.

        Returns the exit code of the server. Safe to call twice, and the way to learn how a server
        ended that closed its link.
        """
        if self._life >= 0:
            if not self.link.closed:
                self._process.kill()
            self.link.close()
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
            # The kernel kills what the server forked, and the presence pipe ends with the last.
            os.close(self._life)
            self._life = -1
            # Readable at its end: the last process that held the write end is gone.
            select.select([self._presence], [], [], timeout_s)
            os.close(self._presence)
        return self._process.wait()

    def _read_early_output(self) -> bytes:
        """What the server wrote before it had a log, where it ended before it could move that."""
        if self._early_output < 0:
            return b""
        return os.pread(self._early_output, _MAX_READ_BYTES, 0)

    def describe_exit(self) -> str:
        """ "was killed by SIGKILL", "exited with code 1"; only after `kill`."""
        code = self._process.wait()
        if code < 0:
            return f"was killed by {format_signal_name(-code)}"
        return f"exited with code {code}"

    def read_end_of_server_log(self, num_lines: int = 20) -> str:
        """The end of what this server wrote to its log, or before it had one."""
        content = b""
        # The log goes on over attempts: what was there before is of earlier servers.
        with contextlib.suppress(OSError), open_regular_file(self._log) as file:
            file.seek(self._log_start)
            content = file.read(_MAX_READ_BYTES)
        content = content or self._read_early_output()
        return "\n".join(content.decode("utf-8", "replace").splitlines()[-num_lines:])


@dataclass(frozen=True)
class _ServerAhead:
    """A server that was started before its run was known, and its environment."""

    server: ServerProcess
    environment: dict[str, str]


_ahead: _ServerAhead | None = None


def start_server_ahead(module: str) -> None:
    """Start a server that imports torch and `module`, of phalanx, while this process finds out what
    to run; the next `start_server` takes it. It ends with this process.

    Not as a rank of another launcher, which starts none. Raises EnvironmentProblem as
    `read_external_launch` does.
    """
    global _ahead
    # A copy: asking writes what it finds into the environment.
    if _ahead is not None or read_external_launch(dict(os.environ)) is not None:
        return
    environment = _build_server_environment()
    try:
        # What it writes until it has a run, which no person sees before.
        with tempfile.TemporaryFile() as output:
            server = _spawn_server(output, environment)
            server.read_early_output_from(os.dup(output.fileno()))
    except OSError:
        # Without one the run starts its own, and says what is wrong.
        return
    _ahead = _ServerAhead(server, environment)
    search_path = tuple(sys.path), os.environ.get("PYTHONPATH")
    server.link.send(ImportAhead(("torch", "torch._dynamo", module), *search_path))
    atexit.register(end_server_ahead)


def _take_server_ahead() -> ServerProcess | None:
    """The server that was started ahead, if it is as one that is started now would be."""
    global _ahead
    if _ahead is None:
        return None
    if _ahead.server.has_ended or _ahead.environment != _build_server_environment():
        end_server_ahead()
        return None
    server, _ahead = _ahead.server, None
    return server


def end_server_ahead() -> None:
    """End the server that was started ahead, if nothing took it."""
    global _ahead
    if _ahead is not None:
        _ahead.server.kill()
        _ahead = None


def start_server(run_dir: Path) -> ServerProcess:
    """Start a server in a session of its own, which Ctrl-C at the terminal does not reach.

    Raises ResourceError if its log cannot be written.
    """
    log_path = server_log_path(run_dir)
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log = open_regular_file_for_append(log_path)
    except OSError as error:
        raise build_path_resource_error(error, "opening the server's log", log_path) from None
    with log:
        server = _take_server_ahead() or _spawn_server(log, _build_server_environment())
        server.read_log_from(log_path, log.tell())
    return server


def _spawn_server(output: IO[bytes], environment: dict[str, str]) -> ServerProcess:
    # What it forks, the ranks, inherit the limit.
    raise_open_file_limit()
    our_end, server_end = socket.socketpair()
    life_read, life_write = os.pipe()
    presence_read, presence_write = os.pipe()
    inherited = (server_end.fileno(), life_read, presence_write)
    # -P: the folder we happen to stand in is not searched for modules; our own search path
    # follows by message.
    command = [sys.executable, "-P", "-m", "phalanx.launch.server", *map(str, inherited)]
    try:
        with server_end:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                pass_fds=inherited,
                start_new_session=True,
            )
    finally:
        # Ours are closed: a pipe has an end only when nobody holds its other end any more.
        os.close(life_read)
        os.close(presence_write)
    return ServerProcess(
        process,
        MessageChannel(our_end, SUPERVISOR_TO_SERVER_CODEC, SERVER_TO_SUPERVISOR_CODEC),
        life_write,
        presence_read,
    )


def _build_server_environment() -> dict[str, str]:
    """Our environment, with one thread for each numerical library (unless set), and phalanx
    importable.

    Libraries ask torch for GPUs when they are imported. Torch then asks the driver, and no fork can
    use CUDA any more, unless it is told to ask NVML.
    """
    defaults = {**dict.fromkeys(THREAD_VARIABLES, "1"), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    # The user's own variables win.
    environment = defaults | build_expandable_segments_variables(os.environ) | dict(os.environ)
    if "OMP_NUM_THREADS" not in os.environ:
        # Ranks choose for themselves.
        environment[SERVER_CHOSE_THREADS_VARIABLE] = "1"
    home = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(
        [home, *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    return environment
