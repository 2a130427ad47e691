"""Goodput, cost and energy of a layout: what failures and saves leave of the time, in dollars and
kilowatt-hours. The figures that it assumes stand in economics.toml with their sources."""

from __future__ import annotations

import math
import tomllib
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from phalanx.plan.cluster import Cluster

GB = 1e9
HOUR_S = 3600.0


@dataclass(frozen=True)
class Assumption:
    """One figure of the table, with its bounds and its source."""

    name: str
    value: float
    low: float
    high: float
    moves: str
    source: str


@cache
def list_assumptions() -> dict[str, Assumption]:
    """Every assumption, by name."""
    text = files("phalanx.plan.search").joinpath("economics.toml").read_text(encoding="utf-8")
    return {name: Assumption(name, **entry) for name, entry in tomllib.loads(text).items()}


def get_assumption_value(name: str) -> float:
    """The value of an assumption."""
    return list_assumptions()[name].value


MIN_GOODPUT = 1e-6
"""Below it a job never ends: a step takes a million times its time."""


@dataclass(frozen=True)
class Goodput:
    """The part of wall time (0 to 1) in which new steps are made, and what it follows from."""

    value: float
    mtbf_hours: float
    save_stall_s: float
    recovery_s: float
    save_every_s: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def estimate_goodput(
    cluster: Cluster, state_bytes_per_rank: float, *, mtbf_hours: float | None, is_spot: bool
) -> Goodput:
    """The goodput of a job over all devices of `cluster` that saves as often as costs least.

    Young 1974 and Daly 2006 (doi 10.1016/j.future.2004.11.016): with an exponential time between
    failures M, saves that stop training for d seconds are best sqrt(2 d M) apart.
    """
    rate = get_assumption_value("failures_per_gpu_hour") * cluster.num_devices
    if mtbf_hours is not None:
        rate = 1 / mtbf_hours
    if is_spot:
        # What a job says of failures is of machines that nobody takes away.
        rate += get_assumption_value("spot_losses_per_node_hour") * cluster.num_nodes
    mtbf_hours = 1 / rate
    mtbf_s = mtbf_hours * HOUR_S
    stall_s = state_bytes_per_rank / (get_assumption_value("host_copy_gb_s") * GB)
    per_node = cluster.devices_per_node or cluster.num_devices
    loaded_s = (
        state_bytes_per_rank * per_node / (get_assumption_value("storage_gb_s_per_node") * GB)
    )
    recovery_s = get_assumption_value("restart_s") + loaded_s
    every_s = _choose_checkpoint_interval_s(stall_s, mtbf_s)
    # Daly's exact expected time: repeated work and restarts compound where failures are frequent.
    expected_s = (
        mtbf_s
        * math.exp(min(700.0, recovery_s / mtbf_s))
        * math.expm1(min(700.0, (every_s + stall_s) / mtbf_s))
    )
    return Goodput(every_s / expected_s, mtbf_hours, stall_s, recovery_s, every_s)


def _choose_checkpoint_interval_s(stall_s: float, mtbf_s: float) -> float:
    """Daly's interval between two saves."""
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = stall_s / (2 * mtbf_s)
    first = math.sqrt(2 * stall_s * mtbf_s)
    return max(1.0, first * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s)


@dataclass(frozen=True)
class RunningCost:
    """Dollars and energy for a billion tokens (or samples, where they are no tokens), and for the
    job's steps. None where no price, or no power, is known."""

    hours_per_billion_tokens: float
    dollars_per_billion_tokens: float | None
    spot_dollars_per_billion_tokens: float | None
    kwh_per_billion_tokens: float | None
    job_hours: float
    job_dollars: float | None
    spot_job_dollars: float | None
    price_note: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def estimate_cost(
    cluster: Cluster,
    *,
    tokens_per_s: float,
    job_tokens: float,
    goodput: float,
    spot_goodput: float,
) -> RunningCost:
    """The cost of a billion tokens, and of the job, on `cluster`.

    It makes `tokens_per_s` while it steps. Machines on which it never ends have no price.
    """
    hours = 1e9 / (tokens_per_s * goodput) / HOUR_S
    spot_hours, spot_price = math.inf, None
    if spot_goodput >= MIN_GOODPUT:
        spot_hours, spot_price = hours * goodput / spot_goodput, cluster.spot_price_per_hour
    share = job_tokens / 1e9
    dollars = _multiply_or_none(cluster.price_per_hour, cluster.num_nodes * hours)
    spot_dollars = _multiply_or_none(spot_price, cluster.num_nodes * spot_hours)
    kwh = None
    if cluster.watts:
        watts = (cluster.watts + get_assumption_value("host_watts_per_gpu")) * cluster.num_devices
        kwh = watts / 1e3 * hours * get_assumption_value("power_usage_effectiveness")
    return RunningCost(
        hours,
        dollars,
        spot_dollars,
        kwh,
        hours * share,
        _multiply_or_none(dollars, share),
        _multiply_or_none(spot_dollars, share),
        cluster.price_note,
    )


def _multiply_or_none(price: float | None, amount: float) -> float | None:
    if price is None:
        return None
    return price * amount
