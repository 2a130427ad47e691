"""The supervisor's hold on the template and on the server that it forked: start them, hear of their
ends, take them down with all they forked."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeAlias

from phalanx.core.disk_errors import build_path_resource_error
from phalanx.core.files import open_regular_file, open_regular_file_for_append
from phalanx.core.open_files import raise_open_file_limit
from phalanx.launch.external import read_external_launch
from phalanx.launch.messages import (
    SERVER_TO_SUPERVISOR_CODEC,
    SUPERVISOR_TO_SERVER_CODEC,
    SUPERVISOR_TO_TEMPLATE_CODEC,
    TEMPLATE_TO_SUPERVISOR_CODEC,
    ForkFailed,
    ForkServer,
    ImportAhead,
    ServerExited,
    ServerForked,
    ServerOrder,
    ServerReport,
    TemplateOrder,
    TemplateReport,
)
from phalanx.launch.paths import server_log_path
from phalanx.launch.processor_lack import LOOK_INTERVAL_S, ProcessorLack
from phalanx.launch.rank_env import (
    SERVER_CHOSE_THREADS_VARIABLE,
    THREAD_VARIABLES,
    build_expandable_segments_variables,
)
from phalanx.launch.reports import ErrorReport
from phalanx.launch.signals import format_signal_name
from phalanx.launch.wire import MessageChannel

_MAX_READ_BYTES = 1 << 20
# For the template to fork a server, or to tell how one ended, which take it milliseconds.
_TEMPLATE_ANSWER_TIMEOUT_S = 3.0
# Time in which it has no processor does not count, up to this by the clock.
_MAX_ANSWER_TIMEOUT_S = 30.0
TemplateLink: TypeAlias = MessageChannel[TemplateOrder, TemplateReport]
ServerLink: TypeAlias = MessageChannel[ServerOrder, ServerReport]


class TemplateProcess:
    """A running template. `link` carries messages.

    Only we hold the write end of the life pipe: when we die, however, the kernel kills the
    template, the server and its ranks. All of them hold the write end of the presence pipe: when it
    ends, none of them is left.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        link: TemplateLink,
        life: int,
        presence: int,
    ) -> None:
        self._process = process
        self.link = link
        self._life = life
        self._presence = presence
        self._log, self._log_start = Path(os.devnull), 0
        self._early_output = -1
        self._exit_codes: dict[int, int] = {}
        self._newest_server_pid = 0
        self.fork_failure: ErrorReport | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self.link.closed or self._process.poll() is not None

    def read_log_from(self, log: Path, start: int) -> None:
        """Take what follows on byte `start` of `log` for what this process and its servers
        write."""
        self._log, self._log_start = log, start

    def read_early_output_from(self, descriptor: int) -> None:
        """Take the file for what this process writes until it has a log; it is closed with this
        object."""
        self._early_output = descriptor
        weakref.finalize(self, os.close, descriptor)

    def fork_server(self) -> ServerProcess | None:
        """A server that is ready to fork ranks; None if this process is gone, does not answer, or
        cannot fork: then `fork_failure` says why."""
        our_end, server_end = socket.socketpair()
        presence_read, presence_write = os.pipe()
        with server_end:
            self.link.send(ForkServer(), (server_end.fileno(), presence_write))
        # A pipe has an end only when nobody holds its other end any more.
        os.close(presence_write)
        link = MessageChannel(our_end, SUPERVISOR_TO_SERVER_CODEC, SERVER_TO_SUPERVISOR_CODEC)
        before, self.fork_failure = self._newest_server_pid, None
        self._read_reports_until(
            lambda: self._newest_server_pid != before or self.fork_failure is not None
        )
        if self._newest_server_pid == before:
            link.close()
            os.close(presence_read)
            return None
        return ServerProcess(self, self._newest_server_pid, link, presence_read)

    def find_exit_code_of_server(self, pid: int) -> int | None:
        """Wait until a server that has ended is reaped; its exit code. None if this process is
        gone, too, and nobody knows it; one that does not answer is killed, for it would not fork
        either."""
        self._read_reports_until(lambda: pid in self._exit_codes)
        if pid not in self._exit_codes:
            self.kill()
        return self._exit_codes.get(pid)

    def _read_reports_until(self, is_there: Callable[[], bool]) -> None:
        began_s = time.monotonic()
        lack = ProcessorLack([self.pid], began_s)
        while not is_there() and not self.link.closed:
            # Before each deadline, also the last: this process may have had no processor, either.
            lack.look([self.pid], time.monotonic())
            may_take_s = min(_TEMPLATE_ANSWER_TIMEOUT_S + lack.total_s, _MAX_ANSWER_TIMEOUT_S)
            remaining_s = max(0.0, began_s + may_take_s - time.monotonic())
            if not select.select([self.link], [], [], min(remaining_s, LOOK_INTERVAL_S))[0]:
                if not remaining_s:
                    return
                continue
            for report in self.link.receive():
                match report:
                    case ServerForked(pid):
                        self._newest_server_pid = pid
                    case ServerExited(pid, code):
                        self._exit_codes[pid] = code
                    case ForkFailed(error):
                        self.fork_failure = error

    def kill(self, timeout_s: float = 2.0) -> int:
        """SIGKILL this process, whose end kills what it forked, and wait for all of them.

        Returns its exit code. Safe to call twice, and the way to learn how a process ended that
        closed its link.
        """
        if self._life >= 0:
            if not self.link.closed:
                self._process.kill()
            self.link.close()
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
            # The kernel kills all that hold the pipe, and the presence pipe ends with the last.
            os.close(self._life)
            self._life = -1
            # Readable at its end: the last process that held the write end is gone.
            select.select([self._presence], [], [], timeout_s)
            os.close(self._presence)
        return self._process.wait()

    def _read_early_output(self) -> bytes:
        """What was written before there was a log, where it ended before it could move that."""
        if self._early_output < 0:
            return b""
        return os.pread(self._early_output, _MAX_READ_BYTES, 0)

    def describe_exit(self) -> str:
        """ "was killed by SIGKILL", "exited with code 1"; only after `kill`."""
        return _describe_exit_code(self._process.wait())

    def read_end_of_server_log(self, num_lines: int = 20) -> str:
        """The end of what was written to the log, or before there was one."""
        content = b""
        # The log goes on over attempts: what was there before is of earlier servers.
        with contextlib.suppress(OSError), open_regular_file(self._log) as file:
            file.seek(self._log_start)
            content = file.read(_MAX_READ_BYTES)
        content = content or self._read_early_output()
        return "\n".join(content.decode("utf-8", "replace").splitlines()[-num_lines:])


class ServerProcess:
    """A server that `template` forked. `link` carries messages.

    The server and its ranks hold the write end of the presence pipe: when it ends, none of them is
    left.
    """

    def __init__(
        self, template: TemplateProcess, pid: int, link: ServerLink, presence: int
    ) -> None:
        self.link, self.pid = link, pid
        self._template, self._presence = template, presence
        self._exit_code: int | None = None

    def kill(self, timeout_s: float = 2.0) -> None:
        """SIGKILL the server, whose end kills what it forked, and wait for all of them, and until
        the server is reaped.

        Safe to call twice, and the way to learn how a server ended that closed its link.
        """
        if self._presence < 0:
            return
        if not self.link.closed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.link.close()
        # Readable at its end: the last process that held the write end is gone.
        is_over = bool(select.select([self._presence], [], [], timeout_s)[0])
        os.close(self._presence)
        self._presence = -1
        if not is_over:
            # All that is left holds its life pipe, too.
            self._template.kill(timeout_s)
        self._exit_code = self._template.find_exit_code_of_server(self.pid)

    def continue_if_stopped(self) -> None:
        """SIGCONT: a server that someone stopped would hear no order."""
        if not self.link.closed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)

    def describe_exit(self) -> str:
        """ "was killed by SIGKILL", "exited with code 1"; only after `kill`."""
        if self._exit_code is None:
            return "ended or was killed, and the process that forked it cannot tell which"
        return _describe_exit_code(self._exit_code)


def _describe_exit_code(code: int) -> str:
    """ "was killed by SIGKILL" for -9, "exited with code 1" for 1."""
    if code < 0:
        return f"was killed by {format_signal_name(-code)}"
    return f"exited with code {code}"


@dataclass(frozen=True)
class _TemplateAhead:
    """A template that was started before its run was known, and its environment."""

    template: TemplateProcess
    environment: dict[str, str]


_ahead: _TemplateAhead | None = None


def start_server_ahead(module: str) -> None:
    """Start a template that imports torch and `module`, of phalanx, while this process finds out
    what to run; the next `start_template` takes it. It ends with this process.

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
            template = _spawn_template(output, environment)
            template.read_early_output_from(os.dup(output.fileno()))
    except OSError:
        # Without one the run starts its own, and says what is wrong.
        return
    _ahead = _TemplateAhead(template, environment)
    search_path = tuple(sys.path), os.environ.get("PYTHONPATH")
    template.link.send(ImportAhead(("torch", "torch._dynamo", module), *search_path))
    atexit.register(end_server_ahead)


def _take_template_ahead() -> TemplateProcess | None:
    """The template that was started ahead, if it is as one that is started now would be."""
    global _ahead
    if _ahead is None:
        return None
    if _ahead.template.has_ended or _ahead.environment != _build_server_environment():
        end_server_ahead()
        return None
    template, _ahead = _ahead.template, None
    return template


def end_server_ahead() -> None:
    """End the template that was started ahead, if nothing took it."""
    global _ahead
    if _ahead is not None:
        _ahead.template.kill()
        _ahead = None


def start_template(run_dir: Path) -> TemplateProcess:
    """Start a template in a session of its own, which Ctrl-C at the terminal does not reach.

    Raises ResourceError if its log cannot be written.
    """
    log_path = server_log_path(run_dir)
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log = open_regular_file_for_append(log_path)
    except OSError as error:
        raise build_path_resource_error(error, "opening the server's log", log_path) from None
    with log:
        template = _take_template_ahead() or _spawn_template(log, _build_server_environment())
        template.read_log_from(log_path, log.tell())
    return template


def _spawn_template(output: IO[bytes], environment: dict[str, str]) -> TemplateProcess:
    # What it forks, the server and the ranks, inherit the limit.
    raise_open_file_limit()
    our_end, template_end = socket.socketpair()
    life_read, life_write = os.pipe()
    presence_read, presence_write = os.pipe()
    inherited = (template_end.fileno(), life_read, presence_write)
    # -P: the folder we happen to stand in is not searched for modules; our own search path
    # follows by message.
    command = [sys.executable, "-P", "-m", "phalanx.launch.template", *map(str, inherited)]
    try:
        with template_end:
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
    return TemplateProcess(
        process,
        MessageChannel(our_end, SUPERVISOR_TO_TEMPLATE_CODEC, TEMPLATE_TO_SUPERVISOR_CODEC),
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
