"""Ports of this machine's loopback for whoever listens a moment later."""

from __future__ import annotations

import contextlib
import random
import socket

# Below those that the kernel gives to connections, of which tests make thousands meanwhile.
_PORTS = range(20_000, 32_000)


def free_port() -> int:
    """A port that nobody listens on, drawn: other tests draw theirs at the same time."""
    draw = random.SystemRandom()
    while True:
        port = draw.choice(_PORTS)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
