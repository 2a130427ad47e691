"""A profile for machines without one: how the parts of a step grow, on a core that was measured."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from phalanx.plan.profiles import FittedRate, MachineProfile, ProfileSection


@cache
def load_one_core_profile() -> MachineProfile:
    """The profile of one_core.toml: rates of one rank with one thread, whatever machine this is."""
    text = files("phalanx.plan.calibrated").joinpath("one_core.toml").read_text(encoding="utf-8")
    fits = tuple(_parse_fitted_rate(entry) for entry in tomllib.loads(text)["fit"])
    section = ProfileSection("", 0.0, False, 0, "processor", fits, ())
    # As many devices as any run on one machine has ranks: none takes turns with another here.
    return MachineProfile("cpu", "one core", 1024, "", {"gemm": section})


def _parse_fitted_rate(entry: dict[str, Any]) -> FittedRate:
    return FittedRate(
        entry["kind"],
        entry.get("mode", ""),
        entry["dtype"],
        1024,
        1,
        entry["values"],
        None,
        None,
        0,
    )
