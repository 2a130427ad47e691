"""Typed messages between processes, as newline-terminated JSON over a socket pair."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from phalanx.core.typed_json import TypedJsonError, from_json, to_json

Message = TypeVar("Message")
Sent = TypeVar("Sent")
Received = TypeVar("Received")
_CLASS_NAME_KEY = "type"
_MAX_DESCRIPTORS = 8


class JsonLineCodec(Generic[Message]):
    """Writes messages of the dataclasses `kinds` as lines of JSON that name their class, and
    reads them."""

    def __init__(self, kinds: Iterable[type[Message]]) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}

    def encode(self, message: Message) -> bytes:
        """One line, with its end. Raises TypeError for a message of another class."""
        name = type(message).__name__
        if self._kinds.get(name) is not type(message):
            raise TypeError(f"{name} is none of {', '.join(self._kinds)}")
        document = {_CLASS_NAME_KEY: name, **to_json(message)}
        return json.dumps(document, separators=(",", ":")).encode() + b"\n"

    def decode(self, line: bytes) -> Message:
        """The message of one line.

        Raises TypedJsonError for another class, or for fields that are not its own.
        """
        fields, name = json.loads(line), None
        if isinstance(fields, dict):
            name = fields.pop(_CLASS_NAME_KEY, None)
        if name not in self._kinds:
            raise TypedJsonError(f"{name!r} is none of {', '.join(self._kinds)}")
        return from_json(self._kinds[name], fields)


class MessageChannel(Generic[Sent, Received]):
    """One end of a socket pair.

    `closed` becomes true when the other end is gone; sending to it is then a no-op. `descriptors`
    are those that came with messages, and that nobody has taken.
    """

    def __init__(
        self, sock: socket.socket, sent: JsonLineCodec[Sent], received: JsonLineCodec[Received]
    ) -> None:
        self._socket = sock
        self._sent, self._received = sent, received
        self._partial = b""
        self.closed = False
        self.descriptors: list[int] = []

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Sent, descriptors: Sequence[int] = ()) -> None:
        """Send a message; the other end gets duplicates of `descriptors` with it."""
        if self.closed:
            return
        line = self._sent.encode(message)
        try:
            if descriptors:
                num_sent = socket.send_fds(self._socket, [line], list(descriptors))
                line = line[num_sent:]
            self._socket.sendall(line)
        except OSError:
            self.closed = True

    def receive(self) -> list[Received]:
        """The messages completed by one read; blocks until something arrives or the other end
        closes."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, 1 << 16, _MAX_DESCRIPTORS)
        except OSError:
            # A reset by the other end is its end, too.
            data, descriptors = b"", []
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        self.descriptors += descriptors
        if not data:
            self.closed = True
            return []
        # A message may come in several reads: its beginning waits for the rest.
        *lines, self._partial = (self._partial + data).split(b"\n")
        return [self._received.decode(line) for line in lines]

    def close(self) -> None:
        self.closed = True
        self._socket.close()
