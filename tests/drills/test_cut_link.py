"""A connection of which nothing comes through is seen from outside, between the processes that it
connects, in a network that the test makes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from commands import environment, wait_until
from phalanx.launch.stuck_links import choose_cut_off_ranks, find_stuck_links

# Two processes with a connection; at a line the first is cut off, and the second sends.
CONNECTED = """
import os, signal, socket, subprocess
from phalanx.resilience.faults.cut_link import inject

subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
listener = socket.create_server(("127.0.0.1", 0))
go, gone = os.pipe()
child = os.fork()
if child == 0:
    peer = socket.create_connection(listener.getsockname())
    peer.sendall(b"comes through")
    os.read(go, 1)
    peer.sendall(b"does not")
    signal.pause()
connection, _ = listener.accept()
connection.recv(100)
print(os.getpid(), child, flush=True)
input()
inject()
os.write(gone, b"1")
print(flush=True)
input()
os.kill(child, signal.SIGKILL)
"""


def test_a_cut_connection_is_seen_from_outside() -> None:
    if os.geteuid() or not (shutil.which("unshare") and shutil.which("ip")):
        pytest.skip("a network of its own takes root, unshare and ip")
    process = subprocess.Popen(
        ["unshare", "--net", sys.executable, "-c", CONNECTED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        assert find_stuck_links(pids) == set()
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        wait_until(lambda: find_stuck_links(pids) == {(0, 1)})
    finally:
        process.communicate(b"\n")


def test_the_rank_with_most_stuck_links_is_cut_off() -> None:
    assert choose_cut_off_ranks(frozenset({(0, 2), (1, 2), (2, 3)})) == (2,)
    assert choose_cut_off_ranks(frozenset({(0, 1)})) == (0, 1)
    assert choose_cut_off_ranks(frozenset()) == ()
