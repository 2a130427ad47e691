"""How a rank that lost another one hears of the next attempt: one line of JSON in a pipe from the
server.

Its process, its imports and what it holds of the run's state go on; its process groups are new
ones.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from phalanx.core.typed_json import JsonObject
from phalanx.launch.wire import JsonLineCodec


@dataclass(frozen=True)
class NextAttempt:
    """The number of an attempt, the port of its rendezvous store, the payload of its ranks, and
    which of them the receiver is."""

    attempt: int
    master_port: int
    payload: JsonObject
    rank: int
    num_ranks: int


_NEXT_ATTEMPT_CODEC: JsonLineCodec[NextAttempt] = JsonLineCodec((NextAttempt,))


class OrderSender:
    """The server's end of the pipe to one rank."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def send(self, order: NextAttempt) -> None:
        """Send to a rank that waits; one that is gone by now is reaped like any other."""
        line = memoryview(_NEXT_ATTEMPT_CODEC.encode(order))
        try:
            while line:
                line = line[os.write(self._fd, line) :]
        except BrokenPipeError:
            pass

    def close(self) -> None:
        """Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class OrderReceiver:
    """The rank's end of the pipe from the server."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._partial = b""

    def wait(self) -> NextAttempt | None:
        """The next order; None once the server is gone, or user code has closed the pipe."""
        while b"\n" not in self._partial:
            try:
                part = os.read(self._fd, 1 << 16)
            except OSError:
                return None
            if not part:
                return None
            self._partial += part
        line, _, self._partial = self._partial.partition(b"\n")
        return _NEXT_ATTEMPT_CODEC.decode(line)

    def close(self) -> None:
        """Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def open_order_pipe() -> tuple[OrderSender, OrderReceiver]:
    """Both ends of a pipe from the server to a rank."""
    read_end, write_end = os.pipe()
    return OrderSender(write_end), OrderReceiver(read_end)
