"""Standard output may be closed, full or read by nobody; none of that takes a run with it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import TextIO

from phalanx.core.terminal import wrap_stream_in_filter


def open_closed_standard_streams() -> None:
    """Open /dev/null for standard streams that were closed at the start (`>&-`): no other file may
    take their numbers, and Python writes to them."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # It gets the lowest free number, which is `fd`.
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")


def redirect_stream_to_devnull(stream: TextIO) -> None:
    """Send what `stream` still holds, and whatever follows, nowhere: also at exit."""
    # A stream without a descriptor, as a notebook has.
    with contextlib.suppress(OSError, ValueError):
        fd = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        # Python flushes at exit: what its buffer still holds would be refused once more.
        os.dup2(nowhere, fd)
        os.close(nowhere)


def flush_standard_streams() -> None:
    """Write what standard output and error still hold; where that is refused it goes nowhere."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            redirect_stream_to_devnull(stream)


_is_silent: ContextVar[bool] = ContextVar("is_silent", default=False)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Leave out the notices of waiting while the body runs."""
    token = _is_silent.set(True)
    try:
        yield
    finally:
        _is_silent.reset(token)


def print_waiting_notice(line: str) -> None:
    """Print on standard error what is waited for, unless it is silent."""
    if not _is_silent.get():
        print(line, file=wrap_stream_in_filter(sys.stderr))


def say(*lines: str) -> None:
    """Print lines of a run that goes on even if nobody can read them.

    They are filtered: see `core.terminal`.
    """
    _print_lines(wrap_stream_in_filter(sys.stdout), lines)


def warn(*lines: str) -> None:
    """Print lines on standard error, filtered like those of `say`: what a command ends with does
    not hang on whether anybody can read why."""
    _print_lines(wrap_stream_in_filter(sys.stderr), lines)


def _print_lines(stream: TextIO, lines: Iterable[str]) -> None:
    try:
        for line in lines:
            print(line, file=stream)
        stream.flush()
    except OSError:
        redirect_stream_to_devnull(stream)
