"""Newline-terminated JSON over a socket pair: how supervisor and server talk."""

from __future__ import annotations

import json
import socket
from typing import Any

Message = dict[str, Any]


class Channel:
    """One end. `closed` becomes true when the other end is gone; sending to it is then a no-op."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._partial = b""
        self.closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        if self.closed:
            return
        try:
            self._socket.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        except OSError:
            self.closed = True

    def receive(self) -> list[Message]:
        """The messages completed by one read; blocks until something arrives or the other end closes."""
        try:
            data = self._socket.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self.closed = True
            return []
        *lines, self._partial = (self._partial + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self.closed = True
        self._socket.close()
