"""The process that has imported torch and forks servers of ranks: `python -m
phalanx.launch.template LINK LIFE PRESENCE`.

A server forks ranks, reaps and reports; if it dies, its ranks die with it. This process imports and
forks, and does nothing else: another server is a fork of it, in milliseconds instead of the seconds
that the import of torch takes. It shares its pages with the server and its ranks. If it dies itself
the server and its ranks go on, and only the next server comes from another template.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeAlias, assert_never

from phalanx.core.errors import EnvironmentProblem
from phalanx.core.files import open_regular_file_for_append
from phalanx.core.logs import redact_standard_streams
from phalanx.core.secrets import Redactor
from phalanx.core.stop_signals import STOP_SIGNALS, ignore_stop_signals
from phalanx.launch.cuda_state import is_cuda_driver_initialized
from phalanx.launch.lifeline import die_when_pipes_close
from phalanx.launch.messages import (
    SERVER_TO_SUPERVISOR_CODEC,
    SUPERVISOR_TO_SERVER_CODEC,
    SUPERVISOR_TO_TEMPLATE_CODEC,
    TEMPLATE_TO_SUPERVISOR_CODEC,
    ForkFailed,
    ForkServer,
    ImportAhead,
    PreloadBeginsCuda,
    PreloadFailed,
    PreloadFinished,
    PreloadModules,
    ServerExited,
    ServerForked,
    TemplateOrder,
    TemplateReport,
)
from phalanx.launch.paths import server_log_path
from phalanx.launch.reports import build_error_report
from phalanx.launch.server import RankServer
from phalanx.launch.wire import MessageChannel

TemplateLink: TypeAlias = MessageChannel[TemplateReport, TemplateOrder]
_MAX_MOVED_BYTES = 1 << 20


class ServerTemplate:
    """Imports, and forks servers, on behalf of the supervisor at the other end of `link`.

    `ignored` are the signals that were ignored when this process began.
    """

    def __init__(self, link: TemplateLink, supervisor_life: int, ignored: frozenset[int]) -> None:
        self._link, self._ignored = link, ignored
        self._supervisor_life = supervisor_life
        self._wakeup, self._wakeup_write = os.pipe()
        self._run_dir = Path()
        self._has_log = True
        self._failed: dict[str, Exception] = {}
        # The module whose import began to use CUDA, if one has.
        self._began_cuda: set[str] = set()

    def execute_orders_until_closed(self) -> int:
        """Do what the supervisor says until it closes the link."""
        for fd in (self._wakeup, self._wakeup_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore_signal)
        while not self._link.closed:
            sources: list[Any] = [self._link, self._wakeup]
            readable, _, _ = select.select(sources, [], [])
            if self._wakeup in readable:
                # Emptied before servers are reaped: one that ends after it wakes the next select.
                os.read(self._wakeup, 4096)
            self._reap_servers()
            if self._link in readable:
                for order in self._link.receive():
                    self._execute_order(order)
        return 0

    def _execute_order(self, order: TemplateOrder) -> None:
        match order:
            case ImportAhead():
                self._import_ahead(order)
            case PreloadModules():
                self._preload_modules(order)
            case ForkServer():
                self._fork_server()
            case _:
                assert_never(order)

    def _reap_servers(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._link.send(ServerExited(pid, os.waitstatus_to_exitcode(status)))

    def _fork_server(self) -> None:
        """Fork a server. It alone holds what came with the order: pipes end with it and its
        ranks."""
        link_fd, presence_fd = self._link.descriptors
        self._link.descriptors = []
        # What is buffered would be written by the server, too.
        sys.stdout.flush()
        sys.stderr.flush()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGCHLD})
        try:
            pid = os.fork()
            if pid == 0:
                self._run_as_server(link_fd, mask)
            report: TemplateReport = ServerForked(pid)
        except OSError as error:
            problem = EnvironmentProblem(
                "the ranks cannot be started", why=os.strerror(error.errno or 0)
            )
            report = ForkFailed(build_error_report(problem))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for fd in (link_fd, presence_fd):
                os.close(fd)
        self._link.send(report)

    def _run_as_server(self, link_fd: int, mask: set[int | signal.Signals]) -> NoReturn:
        code = 1
        try:
            # A group of its own: what kills it is not to kill the template.
            os.setpgid(0, 0)
            # The pipe is the template's: signals to the server must not wake it.
            signal.set_wakeup_fd(-1)
            self._link.close()
            for fd in (self._wakeup, self._wakeup_write):
                os.close(fd)
            die_when_pipes_close([self._supervisor_life], whole_group=True)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            link = MessageChannel(
                socket.socket(fileno=link_fd),
                SERVER_TO_SUPERVISOR_CODEC,
                SUPERVISOR_TO_SERVER_CODEC,
            )
            server = RankServer(link, self._supervisor_life, self._run_dir, self._ignored)
            code = server.execute_orders_until_closed()
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            # Never back into the template's loop.
            os._exit(code)

    def _import_ahead(self, order: ImportAhead) -> None:
        self._has_log = False
        _take_over_search_path(order.sys_path, order.python_path)
        for name in order.modules:
            try:
                self._import_or_raise(name)
            except Exception as error:
                # A second try would fail by what the first one left.
                self._failed[name] = error
                return
            if name in self._began_cuda:
                return

    def _import_or_raise(self, name: str) -> None:
        if name in self._failed:
            raise self._failed[name]
        _import_module(name)
        if not self._began_cuda and is_cuda_driver_initialized():
            self._began_cuda.add(name)

    def _preload_modules(self, order: PreloadModules) -> None:
        started = time.monotonic()
        self._run_dir = order.run_dir
        if not self._has_log:
            _move_output_to_log(server_log_path(order.run_dir))
            self._has_log = True
        _take_over_search_path(order.sys_path, order.python_path)
        for name in order.preload:
            try:
                self._import_or_raise(name)
            except BaseException as error:
                traceback.print_exception(error)
                self._link.send(PreloadFailed(build_error_report(error)))
                return
            if name in self._began_cuda:
                self._link.send(PreloadBeginsCuda(name))
                return
        # What is garbage now would be frozen with the rest.
        gc.collect()
        # collections in a rank would otherwise write to, and so copy, every page we share
        gc.freeze()
        gc.enable()
        self._link.send(PreloadFinished(time.monotonic() - started, _count_own_threads()))


def _take_over_search_path(sys_path: Sequence[str], python_path: str | None) -> None:
    sys.path[:] = sys_path
    os.environ.pop("PYTHONPATH", None)
    if python_path is not None:
        os.environ["PYTHONPATH"] = python_path


def _import_module(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name.partition(".")[0]:
            raise EnvironmentProblem(
                f"{name} cannot be imported", why=str(error), fix="install it"
            ) from None
        raise


def _move_output_to_log(log: Path) -> None:
    """Have standard output and error, a file without a name until now, go on in `log`."""
    sys.stdout.flush()
    sys.stderr.flush()
    # On a disk that takes nothing it stays where it is, and is lost.
    with contextlib.suppress(OSError), open_regular_file_for_append(log) as file:
        size = os.fstat(1).st_size
        file.write(os.pread(1, min(size, _MAX_MOVED_BYTES), 0))
        file.flush()
        for fd in (1, 2):
            os.dup2(file.fileno(), fd)


def _count_own_threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


def _ignore_signal(number: int, frame: FrameType | None) -> None:
    """The wake-up descriptor needs a Python handler to exist."""


def run_template(arguments: Sequence[str]) -> int:
    # Thousands of modules are imported, and collections among them find next to nothing.
    gc.disable()
    link_fd, life_fd, presence_fd = (int(argument) for argument in arguments)
    ignored = frozenset(
        int(number) for number in STOP_SIGNALS if signal.getsignal(number) is signal.SIG_IGN
    )
    ignore_stop_signals()
    for fd in (link_fd, life_fd, presence_fd):
        # Across exec: a rank's subprocesses hold none of them.
        os.set_inheritable(fd, False)
    die_when_pipes_close([life_fd], whole_group=True)
    # Both are the server's log, which lies in the run.
    redact_standard_streams(Redactor(os.environ))
    return ServerTemplate(
        MessageChannel(
            socket.socket(fileno=link_fd),
            TEMPLATE_TO_SUPERVISOR_CODEC,
            SUPERVISOR_TO_TEMPLATE_CODEC,
        ),
        life_fd,
        ignored,
    ).execute_orders_until_closed()


if __name__ == "__main__":
    sys.exit(run_template(sys.argv[1:]))
