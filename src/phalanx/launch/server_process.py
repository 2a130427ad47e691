"""The supervisor's hold on the server process: start it, hear of its end, take it down with all
it forked."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from pathlib import Path
from typing import TypeAlias

from phalanx.core.files import (
    build_path_resource_error,
    open_regular_file,
    open_regular_file_for_append,
)
from phalanx.launch.messages import (
    SERVER_TO_SUPERVISOR_CODEC,
    SUPERVISOR_TO_SERVER_CODEC,
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
        log: Path,
        log_start: int,
    ) -> None:
        self._process = process
        self.link = link
        self._life = life
        self._presence = presence
        self._log, self._log_start = log, log_start

    @property
    def pid(self) -> int:
        return self._process.pid

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

    def describe_exit(self) -> str:
        """ "was killed by SIGKILL", "exited with code 1"; only after `kill`."""
        code = self._process.wait()
        if code < 0:
            return f"was killed by {format_signal_name(-code)}"
        return f"exited with code {code}"

    def read_end_of_server_log(self, num_lines: int = 20) -> str:
        """The end of what this server wrote to its log."""
        try:
            with open_regular_file(self._log) as file:
                # The log goes on over attempts: what was there before is of earlier servers.
                file.seek(self._log_start)
                text = file.read(1 << 20).decode("utf-8", "replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-num_lines:])


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
    our_end, server_end = socket.socketpair()
    life_read, life_write = os.pipe()
    presence_read, presence_write = os.pipe()
    inherited = (server_end.fileno(), life_read, presence_write)
    # -P: the folder we happen to stand in is not searched for modules; our own search path
    # follows by message.
    command = [sys.executable, "-P", "-m", "phalanx.launch.server", *map(str, inherited)]
    try:
        with log, server_end:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_build_server_environment(),
                pass_fds=inherited,
                start_new_session=True,
            )
            log_start = log.tell()
    finally:
        # Ours are closed: a pipe has an end only when nobody holds its other end any more.
        os.close(life_read)
        os.close(presence_write)
    return ServerProcess(
        process,
        MessageChannel(our_end, SUPERVISOR_TO_SERVER_CODEC, SERVER_TO_SUPERVISOR_CODEC),
        life_write,
        presence_read,
        log_path,
        log_start,
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
