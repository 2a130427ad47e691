"""Networks that lose what they are given, or deliver it late, made by the faults in a network of the
test's own: a connection of which nothing comes through is seen from outside."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from commands import environment, wait_until
from phalanx.launch.stuck_links import choose_cut_off_ranks, find_stuck_links
from phalanx.resilience.faults.jittery_link import LEAST_DELAY_S

# Two processes with a connection; at a line the first is cut off, and the second sends.
CONNECTED = """
import importlib, os, signal, socket, subprocess, sys

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
importlib.import_module("phalanx.resilience.faults." + sys.argv[1]).inject()
os.write(gone, b"1")
print(flush=True)
input()
os.kill(child, signal.SIGKILL)
"""

# Sends before the fault strikes and while it lasts, and looks at the device when it is over.
LOSSY = """
import socket, subprocess, threading, types
from phalanx.resilience.fault import FaultSite
from phalanx.resilience.faults.lossy_link import NUM_LOSSY_STEPS, inject

def count_repeated():
    names, values = [l.split() for l in open("/proc/net/snmp") if l.startswith("Tcp:")]
    return int(values[names.index("RetransSegs")])

def send(num_bytes):
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    sender = threading.Thread(target=lambda: (client.sendall(bytes(num_bytes)), client.close()))
    sender.start()
    num_received = 0
    while data := server.recv(1 << 16):
        num_received += len(data)
    sender.join()
    assert num_received == num_bytes
    return count_repeated()

def find_filters():
    shown = subprocess.run(["tc", "qdisc", "show", "dev", "lo"], capture_output=True, text=True)
    return shown.stdout.count("clsact")

subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
listener = socket.create_server(("127.0.0.1", 0))
state = types.SimpleNamespace(step=3)
whole = send(20_000_000)
inject(FaultSite(trainer=types.SimpleNamespace(state=state)))
lossy = send(20_000_000)
num_filters = find_filters()
state.step += NUM_LOSSY_STEPS
[thread] = [t for t in threading.enumerate() if t is not threading.main_thread()]
thread.join()
print(whole, lossy - whole, num_filters, find_filters())
"""

# A round trip before, during and after packets are late, and new connections in each. Of those that
# nothing delays the fastest: others may have the processor meanwhile.
LATE = """
import socket, subprocess, threading, time, types
from phalanx.resilience.fault import FaultSite
from phalanx.resilience.faults.jittery_link import NUM_LATE_STEPS, inject

def measure_round_trip():
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    began = time.monotonic()
    client.sendall(b"to")
    server.sendall(server.recv(2))
    assert client.recv(2) == b"to"
    return time.monotonic() - began

subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
listener = socket.create_server(("127.0.0.1", 0))
state = types.SimpleNamespace(step=3)
before = min(measure_round_trip() for _ in range(5))
inject(FaultSite(trainer=types.SimpleNamespace(state=state)))
during = measure_round_trip()
state.step += NUM_LATE_STEPS
[thread] = [t for t in threading.enumerate() if t is not threading.main_thread()]
thread.join()
print(before, during, min(measure_round_trip() for _ in range(5)))
"""


@pytest.fixture
def needs_network() -> None:
    if os.geteuid() or not all(map(shutil.which, ("unshare", "ip", "tc"))):
        pytest.skip("a network of its own takes root, unshare, ip and tc")


@pytest.mark.usefixtures("needs_network")
@pytest.mark.parametrize("fault", ["cut_link", "cut_one_way"])
def test_a_cut_connection_is_seen_from_outside(fault: str) -> None:
    process = subprocess.Popen(
        ["unshare", "--net", sys.executable, "-c", CONNECTED, fault],
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


@pytest.mark.usefixtures("needs_network")
def test_packets_are_lost_and_repeated_until_the_fault_is_over() -> None:
    command = ["unshare", "--net", sys.executable, "-c", LOSSY]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(), timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    before, during, *num_filters = map(int, done.stdout.split())
    assert before < during
    assert num_filters == [1, 0]


@pytest.mark.usefixtures("needs_network")
@pytest.mark.skipif(not os.access("/dev/net/tun", os.W_OK), reason="needs to write /dev/net/tun")
def test_packets_are_late_until_the_fault_is_over() -> None:
    command = ["unshare", "--net", sys.executable, "-c", LATE]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(), timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    before, during, after = map(float, done.stdout.split())
    assert during >= 2 * LEAST_DELAY_S
    assert before < during > after


def test_the_rank_with_most_stuck_links_is_cut_off() -> None:
    assert choose_cut_off_ranks(frozenset({(0, 2), (1, 2), (2, 3)})) == (2,)
    assert choose_cut_off_ranks(frozenset({(0, 1)})) == (0, 1)
    assert choose_cut_off_ranks(frozenset()) == ()
