"""Lifelines: a process holds the read end of a pipe and dies with the process that holds the write
end.

The end of a pipe is used rather than the parent-death signal, because that one follows the *thread*
that forked, is lost on exec of a set-uid program and reaches only direct children. On Linux the
kernel itself delivers SIGKILL when the last write end closes (F_SETSIG + O_ASYNC), so it works
while the process is stopped or holds the interpreter lock. Elsewhere a daemon thread watches the
pipe, and a process that is stopped outlives its supervisor.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
import threading
from collections.abc import Sequence


def die_when_pipes_close(read_ends: Sequence[int], *, whole_group: bool) -> list[int]:
    """Die by SIGKILL when the write end of any pipe closes; with `whole_group`, the process group
    does.

    Returns the descriptors to keep open. The read ends themselves stay open, for children that arm
    their own.
    """
    owner = os.getpid()
    # The kernel takes a negative owner for a process group.
    if whole_group:
        owner = -os.getpgid(0)
    if sys.platform == "linux":
        armed = [_request_kill_by_kernel_on_close(fd, owner) for fd in read_ends]
    else:
        armed = list(read_ends)
        # A daemon: it must not keep a process alive whose work is done.
        threading.Thread(
            target=_kill_when_pipe_closes, args=(armed, owner), name="phalanx-lifeline", daemon=True
        ).start()
    # A pipe that closed before we armed sends no signal any more.
    if _is_any_pipe_closed(read_ends, timeout_ms=0):
        os._exit(1)
    return armed


def _request_kill_by_kernel_on_close(read_end: int, owner: int) -> int:
    """Open the pipe anew and ask for SIGKILL on its end.

    Anew, because owner and signal belong to the open file description, which forked processes
    share.
    """
    fd = os.open(f"/proc/self/fd/{read_end}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    # Owner and signal first: with O_ASYNC alone the kernel would send SIGIO.
    fcntl.fcntl(fd, fcntl.F_SETOWN, owner)
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    return fd


def _kill_when_pipe_closes(read_ends: Sequence[int], owner: int) -> None:
    while not _is_any_pipe_closed(read_ends, timeout_ms=1000):
        pass
    if owner < 0:
        os.killpg(-owner, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _is_any_pipe_closed(read_ends: Sequence[int], *, timeout_ms: int) -> bool:
    poll = select.poll()
    for fd in read_ends:
        # No events asked for: poll reports POLLHUP in any case.
        poll.register(fd, 0)
    return bool(poll.poll(timeout_ms))
