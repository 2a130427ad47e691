"""How a rank tells of its own end: one line of JSON in a pipe to the server, which no full disk can
keep back.

An exit code proves nothing: code that is not ours can call `os._exit(0)`. A rank has done its work
only if it says so. Events that a disk refuses go the same way, so that whoever watches sees them.
"""

from __future__ import annotations

import os
import select
import threading
from dataclasses import dataclass

from phalanx.core.errors import ExitCode
from phalanx.launch.reports import ErrorReport
from phalanx.launch.wire import JsonLineCodec

# A pipe with room takes so much at once, or nothing.
MAX_ATOMIC_WRITE_BYTES = select.PIPE_BUF
STOPPED_EXIT_CODES = (ExitCode.PREEMPTED, ExitCode.INTERRUPTED)


@dataclass(frozen=True)
class EndRecord:
    """A rank's own record of its end: the code that its entry returned, and the report of its
    error if it failed."""

    code: int
    report: ErrorReport | None = None

    @property
    def is_agreed_stop(self) -> bool:
        """True if the ranks agreed to stop before the last step, because a signal had asked for
        it."""
        return self.report is None and self.code in STOPPED_EXIT_CODES

    @property
    def has_failed(self) -> bool:
        return self.report is not None or self.code not in (ExitCode.OK, *STOPPED_EXIT_CODES)


@dataclass(frozen=True)
class RefusedEvent:
    """The line of an event that the disk did not take."""

    line: str


@dataclass(frozen=True)
class WaitingForAttempt:
    """A rank that lost another one in `attempt` waits for the next one, with the state after
    `held_step` in memory; -1: it holds none."""

    attempt: int
    held_step: int


_END_RECORD_CODEC: JsonLineCodec[EndRecord | RefusedEvent | WaitingForAttempt] = JsonLineCodec(
    (EndRecord, RefusedEvent, WaitingForAttempt)
)


class EndWriter:
    """The rank's end of the pipe `fd`.

    The first record is the one that counts; later ones are not sent.
    """

    def __init__(self, fd: int) -> None:
        self._fd, self._pid, self._pipe = fd, os.getpid(), _stat_device_and_inode(fd)
        self._lock = threading.Lock()
        self.record: EndRecord | None = None

    @property
    def is_rank_process(self) -> bool:
        """False in a process that the rank forked, which must not speak for it."""
        return os.getpid() == self._pid

    def write_end_record(self, record: EndRecord) -> None:
        """Never raises: a server that is gone has taken the rank along."""
        if self.record is not None or not self.is_rank_process:
            return
        self.record = record
        self._write_line(_END_RECORD_CODEC.encode(record))

    def write_waiting(self, attempt: int, held_step: int) -> None:
        """Say that this rank has left `attempt` and waits for the next one, whose end will be
        another record."""
        self.record = None
        self._write_line(_END_RECORD_CODEC.encode(WaitingForAttempt(attempt, held_step)))

    def _write_line(self, encoded: bytes) -> None:
        line = memoryview(encoded)
        # Whole lines: a thread may send an event at the same moment.
        with self._lock:
            try:
                while line and self._is_pipe_still_open():
                    # A write that a signal interrupts may take only a part.
                    line = line[os.write(self._fd, line) :]
            except OSError:
                pass

    def forward_refused_event(self, event_line: str) -> bool:
        """Send an event that the disk refused.

        False where it cannot be sent at once: training does not wait for it.
        """
        line = _END_RECORD_CODEC.encode(RefusedEvent(event_line))
        # A longer line might go in part, and then wait for room.
        if (
            not self.is_rank_process
            or len(line) > MAX_ATOMIC_WRITE_BYTES
            or not self._lock.acquire(blocking=False)
        ):
            return False
        try:
            has_room = self._is_pipe_still_open() and bool(select.select([], [self._fd], [], 0)[1])
            return has_room and os.write(self._fd, line) == len(line)
        except (OSError, ValueError):
            # ValueError: a descriptor beyond what select takes (FD_SETSIZE).
            return False
        finally:
            self._lock.release()

    def _is_pipe_still_open(self) -> bool:
        """False once user code has closed all descriptors it found.

        Raises OSError if nothing took its place.
        """
        return _stat_device_and_inode(self._fd) == self._pipe


class EndReader:
    """The server's end of a rank's pipe; to be selected for reading."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._data = b""
        self._events: list[str] = []
        self._waiting: WaitingForAttempt | None = None
        self._has_record = False
        self.is_open = True

    def fileno(self) -> int:
        return self._fd

    def read_complete_record(self) -> EndRecord | None:
        """The record, once, when it is complete. Never blocks."""
        while self.is_open:
            try:
                # 64 KiB: all that a pipe of Linux holds by default.
                part = os.read(self._fd, 1 << 16)
            except BlockingIOError:
                break
            self._data += part
            if not part:
                self.close()
        # What follows the last newline is the beginning of a line, or empty.
        *lines, self._data = self._data.split(b"\n")
        record: EndRecord | None = None
        for message in map(_END_RECORD_CODEC.decode, lines):
            if isinstance(message, RefusedEvent):
                self._events.append(message.line)
            elif isinstance(message, WaitingForAttempt):
                self._waiting = message
            elif not self._has_record:
                self._has_record, record = True, message
        return record

    def take_event_lines(self) -> list[str]:
        """The lines of events that came before or beside the record, each once."""
        events, self._events = self._events, []
        return events

    def take_waiting(self) -> WaitingForAttempt | None:
        """Take what the rank said when it began to wait for the next attempt; None if that was
        taken before. Its next record is that of the next attempt."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._has_record = False
        return waiting

    def close(self) -> None:
        """Safe to call twice."""
        if self.is_open:
            self.is_open = False
            os.close(self._fd)


def open_end_pipe() -> tuple[EndReader, int]:
    """A reader, and the descriptor for the EndWriter that the rank makes of it."""
    read_end, write_end = os.pipe()
    return EndReader(read_end), write_end


def _stat_device_and_inode(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
