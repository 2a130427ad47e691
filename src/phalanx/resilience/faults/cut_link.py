"""The network of one rank is cut: its connections stand, and nothing comes through any more."""

from __future__ import annotations

import subprocess

import psutil

from phalanx.core.errors import EnvironmentProblem
from phalanx.resilience.expectation import HANG_DETECTION, HANG_RECOVERY_S, Expectation
from phalanx.resilience.own_network import require_own_network

EXPECTATION = Expectation(
    verdict="link cut",
    detected_s=HANG_DETECTION,
    trained_again_s=HANG_RECOVERY_S,
    is_named_by_majority=True,
    stage="own_network",
    # What ranks exchange through memory no network can hold up.
    overrides=("parallel.collectives=gloo",),
)
_BEFORE_LOCAL, _LOCAL = "10", "100"


def inject() -> None:
    """Throw away all packets of this process's connections, in both directions.

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
            for source, target in ((local_port, remote_port), (remote_port, local_port)):
                ports = ("ipproto", "tcp", "sport", source, "dport", target)
                _add_rule("pref", _BEFORE_LOCAL, *ports, "blackhole")


def _add_rule(*words: str) -> None:
    done = subprocess.run(
        ["ip", "rule", "add", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise EnvironmentProblem("the network cannot be cut", why=done.stderr.strip())
