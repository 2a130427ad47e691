"""The rendezvous store of one attempt: a listening socket on loopback, and the process that serves
it.

Fresh for each attempt, so that no rank can read the addresses of a dead one; in a process of its
own, so that no rank's death takes it along: that of rank 0 is no different from another's. The
socket listens before the first rank exists: nobody waits, nobody retries.
"""

from __future__ import annotations

import importlib
import signal
import socket

from phalanx.core.stop_signals import ignore_stop_signals


def open_loopback_listener() -> socket.socket:
    """A listening socket on a free port of 127.0.0.1.

    Given none, torch would listen on every interface.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    # All ranks may connect at once: a short queue would refuse some.
    listener.listen(4096)
    return listener


def serve_rendezvous_store(listener: socket.socket) -> int:
    """Serve the store on `listener` until killed."""
    # The ranks need it while they save.
    ignore_stop_signals()
    port = listener.getsockname()[1]
    distributed = importlib.import_module("torch.distributed")
    store = distributed.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        # Detached: the descriptor is the store's to close.
        master_listen_fd=listener.detach(),
    )
    # The name is held: torch serves from threads of this object, until it is collected.
    while store is not None:
        signal.pause()
    return 0
