"""Errors of what a run needs and does not own, a file server or a network: they may be over soon,
unlike what a program does wrong."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator

# What a file server, its client or a network says, and not a file, a name or a program.
_NETWORK_ERRNOS = (
    *(errno.ETIMEDOUT, errno.ENOTCONN, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED),
    *(errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN, errno.ENETRESET),
    *(errno.ESTALE, errno.ENODEV, errno.ENXIO),
    # Linux's alone.
    *([errno.EREMOTEIO] if hasattr(errno, "EREMOTEIO") else []),
)


def find_outage(error: BaseException, *, of_disk: bool = True) -> str:
    """The error of an outage that `error` is, or was raised from or while handling, in words that
    stay the same while the outage lasts; empty if there is none.

    `of_disk`: input and output errors count, too, as of a file server.
    """
    for link in _list_chain(error):
        if not isinstance(link, OSError):
            continue
        name = type(link).__name__
        if link.errno in _NETWORK_ERRNOS or (of_disk and link.errno == errno.EIO):
            assert link.errno is not None
            return f"{name}: {os.strerror(link.errno)}"
        # Some of these have no number.
        if isinstance(link, ConnectionError | TimeoutError | socket.gaierror):
            return name
    return ""


def _list_chain(error: BaseException) -> Iterator[BaseException]:
    """`error`, and what it was raised from or while handling; each once."""
    visited: list[BaseException] = []
    link: BaseException | None = error
    # User code can set `__cause__` to anything.
    while link is not None and link not in visited:
        visited.append(link)
        yield link
        link = link.__cause__ or link.__context__
