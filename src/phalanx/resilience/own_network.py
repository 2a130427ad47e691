"""The network that a run has for itself, and what a fault may do to it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable

import psutil

from phalanx.core.errors import EnvironmentProblem
from phalanx.resilience import late_packets
from phalanx.resilience.fault import FaultSite

_BEFORE_LOCAL, _LOCAL = "10", "100"


def require_own_network() -> None:
    """Raises EnvironmentProblem unless the loopback device is the only one: what is done to it then
    is done to this run alone."""
    if set(psutil.net_if_addrs()) != {"lo"}:
        raise EnvironmentProblem(
            "this fault damages a network that the run has for itself, and it has none",
            fix="run it by phalanx drill",
        )


def drop_packets_of_connections(*, drops_received: bool) -> None:
    """Throw away all packets that this process sends over its connections from now on, and with
    `drops_received` those that come to it, too. Later connections work.

    Raises EnvironmentProblem in a network that the run shares with others.
    """
    require_own_network()
    # Rules about packets come before the delivery to this machine, which is the first rule of all.
    _add_rule("pref", _LOCAL, "lookup", "local")
    first_rule = ["ip", "rule", "delete", "pref", "0"]
    subprocess.run(first_rule, capture_output=True, check=False)
    for connection in psutil.Process().net_connections(kind="tcp4"):
        if connection.raddr:
            local_port, remote_port = str(connection.laddr.port), str(connection.raddr.port)
            _drop_packets(local_port, remote_port)
            if drops_received:
                _drop_packets(remote_port, local_port)


def run_tc(*words: str) -> None:
    """Change the traffic control of the run's own network.

    Raises EnvironmentProblem where the kernel refuses.
    """
    done = subprocess.run(["tc", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise EnvironmentProblem("the network cannot be shaped", why=done.stderr.strip())


def delete_qdisc_after_steps(site: FaultSite, num_steps: int, qdisc: str) -> None:
    """Make the loopback device as it was once the trainer has done `num_steps` more; returns at
    once."""
    delete = ["tc", "qdisc", "delete", "dev", "lo", qdisc]
    _call_after_steps(
        site, num_steps, lambda: subprocess.run(delete, capture_output=True, check=False)
    )


def delay_packets_for_steps(site: FaultSite, num_steps: int, least_s: float, most_s: float) -> None:
    """Deliver what goes over TCP later by `least_s` to `most_s`, until the trainer has done
    `num_steps` more; returns once packets are late.

    Raises EnvironmentProblem in a network that the run shares with others, and where the kernel
    refuses.
    """
    require_own_network()
    # A process of its own: a thread would take Python's lock from the rank. It ends with its input,
    # which is that of this process.
    late = subprocess.Popen(
        [sys.executable, "-m", late_packets.__name__, str(least_s), str(most_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert late.stdout is not None, "it was asked for"
    if not late.stdout.readline():
        _, why = late.communicate()
        raise EnvironmentProblem("packets cannot be delayed", why=why.strip())
    _call_after_steps(site, num_steps, late.communicate)


def _call_after_steps(site: FaultSite, num_steps: int, end: Callable[[], object]) -> None:
    trainer = site.trainer
    assert trainer is not None, "this fault strikes a rank that trains"
    last = trainer.state.step + num_steps

    def wait_and_end() -> None:
        while trainer.state.step < last:
            time.sleep(0.05)
        end()

    threading.Thread(target=wait_and_end, daemon=True).start()


def _drop_packets(source_port: str, target_port: str) -> None:
    ports = ("ipproto", "tcp", "sport", source_port, "dport", target_port)
    _add_rule("pref", _BEFORE_LOCAL, *ports, "blackhole")


def _add_rule(*words: str) -> None:
    done = subprocess.run(
        ["ip", "rule", "add", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise EnvironmentProblem("the network cannot be cut", why=done.stderr.strip())
