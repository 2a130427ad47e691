"""Work during which Python's garbage collector rests."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pausing_garbage_collection() -> Iterator[None]:
    """Inside, cycles of objects are not looked for, nor later in what is there at the end: for
    short work whose many objects stay or are the last of a process, as imports and a plan."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.freeze()  # else the first collection would go through all of it
            gc.enable()
