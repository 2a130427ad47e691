"""The process that ranks of a comparison are forked from: it has imported torch once for all.

`python -m phalanx.bench.training.server FD`: for each message with a socket that arrives on FD it
forks a rank, which speaks over that socket, and answers with its number. Ranks end with it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

import torch

# FSDP2 imports it: here once, instead of in every rank.
import torch._dynamo

from phalanx.bench.training.rank import run_rank_of_contender
from phalanx.core.parent import kill_this_process_with_parent


def main() -> int:
    """Fork ranks until the other end is closed. Returns the exit code."""
    kill_this_process_with_parent()
    # Nobody waits for ranks: that one has ended shows on its socket.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    requests = socket.socket(fileno=int(sys.argv[1]))
    requests.sendall(b"ready\n")
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, 4096, 1)
        if not message:
            return 0
        pid = os.fork()
        if pid == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            run_rank_of_contender(socket.socket(fileno=descriptors[0]), message.decode())
        os.close(descriptors[0])
        requests.sendall(f"{pid}\n".encode())


if __name__ == "__main__":
    sys.exit(main())
