"""The network between the ranks is slow for some steps, and never cut: the run waits for it, and
nobody is to blame."""

from __future__ import annotations

import subprocess
import threading
import time

from phalanx.core.errors import EnvironmentProblem
from phalanx.resilience.expectation import NO_VERDICT, Expectation
from phalanx.resilience.fault import FaultSite
from phalanx.resilience.own_network import require_own_network

EXPECTATION = Expectation(
    verdict=NO_VERDICT,
    detected_s=None,
    trained_again_s=None,
    may_lose_steps=False,
    names_rank=False,
    phases=("data",),
    stage="own_network",
    # What ranks exchange through memory no network can hold up.
    overrides=("parallel.collectives=gloo",),
    settling_steps=12,
)
NUM_SLOW_STEPS = 6
# The gradients of the small job take a good part of a second.
RATE, BURST, LATENCY = "30mbit", "128kb", "400ms"


def inject(site: FaultSite) -> None:
    """Shape the loopback device of the run's own network to 30 Mbit/s, for six steps.

    Raises EnvironmentProblem in a network that the run shares with others.
    """
    require_own_network()
    shaped = ["tc", "qdisc", "add", "dev", "lo", "root", "tbf"]
    shaped += ["rate", RATE, "burst", BURST, "latency", LATENCY]
    done = subprocess.run(shaped, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EnvironmentProblem("the network cannot be shaped", why=done.stderr.strip())
    threading.Thread(target=_end_after_steps, args=(site,), daemon=True).start()


def _end_after_steps(site: FaultSite) -> None:
    assert site.trainer is not None, "the fault slow_link strikes a rank that trains"
    last = site.trainer.state.step + NUM_SLOW_STEPS
    while site.trainer.state.step < last:
        time.sleep(0.05)
    unshaped = ["tc", "qdisc", "delete", "dev", "lo", "root"]
    subprocess.run(unshaped, capture_output=True, check=False)
