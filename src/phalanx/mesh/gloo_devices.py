"""All gloo groups of a process go through one device.

A device of gloo has a thread that looks for messages, and wakes 100 times a second where there are
none. torch makes one for each group: a rank of a few axes has five, and a process that goes through
many layouts hundreds, which then take a good part of its cores.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import os
from typing import Any

from torch.distributed import ProcessGroupGloo

# As many for each device as torch starts: they run collectives, and sleep in between.
_THREADS_PER_DEVICE = 2
_devices_by_place: dict[tuple[int, str], list[Any]] = {}


@functools.cache
def share_gloo_devices_between_groups() -> None:
    """Have gloo groups that are opened from now on share the devices of this process."""
    init = ProcessGroupGloo.__init__

    def init_with_shared_devices(
        self: Any, store: Any, rank: int, size: int, *rest: Any, **named: Any
    ) -> None:
        timeout = named.get("timeout", rest[0] if rest else None)
        # Whoever gives options of their own has chosen the devices.
        if not isinstance(timeout, datetime.timedelta) or len(rest) + len(named) != 1:
            init(self, store, rank, size, *rest, **named)
            return
        options = ProcessGroupGloo._Options()
        options._devices = _find_devices()
        options._threads = _THREADS_PER_DEVICE * len(options._devices)
        options._timeout = timeout
        init(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = init_with_shared_devices  # type: ignore[method-assign]


def _find_devices() -> list[Any]:
    """A device for each interface of GLOO_SOCKET_IFNAME, else the one that gloo chooses: those that
    torch would make."""
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    # By process: a fork has no thread that would serve the devices of its parent.
    place = os.getpid(), interfaces
    if place not in _devices_by_place:
        if interfaces:
            devices = [
                ProcessGroupGloo.create_device(interface=name) for name in interfaces.split(",")
            ]
        else:
            devices = [ProcessGroupGloo.create_default_device()]
        for device in devices:
            # For ever: to end one waits for its thread, which a fork does not have.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(device))
        _devices_by_place[place] = devices
    return _devices_by_place[place]
