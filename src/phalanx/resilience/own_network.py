"""Whether a run has a network of its own, which a fault may damage."""

from __future__ import annotations

import psutil

from phalanx.core.errors import EnvironmentProblem


def require_own_network() -> None:
    """Raises EnvironmentProblem unless the loopback device is the only one: what is done to it then
    is done to this run alone."""
    if set(psutil.net_if_addrs()) != {"lo"}:
        raise EnvironmentProblem(
            "this fault damages a network that the run has for itself, and it has none",
            fix="run it by phalanx drill",
        )
