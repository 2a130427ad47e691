"""The pulse of a rank: a thread that writes to the black box while the interpreter runs threads.

Code that holds Python's lock stops it, whatever else that code does; waiting for other ranks does
not.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from phalanx.core.black_box import BlackBox

PULSE_INTERVAL_S = 0.5


@contextlib.contextmanager
def writing_pulse(box: BlackBox) -> Iterator[None]:
    """Write the pulse to `box` twice a second during the body."""
    is_over = threading.Event()

    def write_until_over() -> None:
        while True:
            box.write_pulse()
            if is_over.wait(PULSE_INTERVAL_S):
                return

    # A daemon: what leaves the body without its end must not wait for it.
    thread = threading.Thread(target=write_until_over, name="pulse", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        box.end_pulse()
