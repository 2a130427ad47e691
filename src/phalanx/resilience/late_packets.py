"""A network device that delivers packets late, in a network that a run has for itself: all that
goes over TCP there passes through it, for as long as this process runs.

`python -m phalanx.resilience.late_packets LEAST MOST` (seconds) writes a line once the device is
there, and ends when its input does. With it ends the device, and packets go the usual way.
"""

from __future__ import annotations

import collections
import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

DEVICE: Final = "late0"
# What nothing else in the run's own network uses.
_TABLE: Final = "77"
# Of linux/if_tun.h: TUNSETIFF, and packets of IP without a header of the device.
_SET_DEVICE, _IP_PACKETS, _WITHOUT_HEADER = 0x400454CA, 0x0001, 0x1000
_LARGEST_PACKET: Final = 65535
_SECONDS_OF_ONE_DELAY: Final = 0.1


def main() -> None:
    """Delay packets by LEAST to MOST seconds, another delay each tenth of a second."""
    least_s, most_s = map(float, sys.argv[1:])
    device = _make_device()
    _route_tcp_through_device()
    print("packets are late", flush=True)
    _deliver_late(device, least_s, most_s)


def _make_device() -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    name = struct.pack("16sH22x", DEVICE.encode(), _IP_PACKETS | _WITHOUT_HEADER)
    fcntl.ioctl(device, _SET_DEVICE, name)
    return device


def _route_tcp_through_device() -> None:
    # What comes in from a device with an address of this machine, the kernel drops by default.
    for which in ("all", DEVICE):
        settings = Path("/proc/sys/net/ipv4/conf", which)
        for key, value in (("accept_local", "1"), ("route_localnet", "1"), ("rp_filter", "0")):
            (settings / key).write_text(value)
    _run_ip("link", "set", DEVICE, "mtu", str(_LARGEST_PACKET), "up")
    _run_ip(*("route", "add", "default", "dev", DEVICE, "src", "127.0.0.1", "table", _TABLE))
    # The rule that delivers to this machine is the first: that for what is sent goes before it.
    _run_ip("rule", "add", "pref", "100", "lookup", "local")
    _run_ip("rule", "delete", "pref", "0")
    _run_ip(*("rule", "add", "pref", "20", "iif", "lo", "ipproto", "tcp", "lookup", _TABLE))


def _run_ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)


def _deliver_late(device: int, least_s: float, most_s: float) -> None:
    """Hold each packet back, in the order in which they come, until standard input ends."""
    held: collections.deque[tuple[float, bytes]] = collections.deque()
    delay_s = drawn_at = due = 0.0
    while True:
        wait_s = max(0.0, held[0][0] - time.monotonic()) if held else None
        readable, _, _ = select.select([device, sys.stdin], [], [], wait_s)
        if sys.stdin in readable:
            return
        now = time.monotonic()
        if now - drawn_at > _SECONDS_OF_ONE_DELAY:
            delay_s, drawn_at = random.uniform(least_s, most_s), now
        if device in readable:
            # A later packet does not overtake: TCP would take that for a loss.
            due = max(due, now + delay_s)
            held.append((due, os.read(device, _LARGEST_PACKET)))
        while held and held[0][0] <= now:
            os.write(device, held.popleft()[1])


if __name__ == "__main__":
    main()
