"""A profile for machines without one: how the parts of a step grow, on a core that was measured."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from phalanx.plan.profiles import PROCESSOR, FittedRate, MachineProfile, ProfileSection


@cache
def load_one_core_profile(num_cores: int) -> MachineProfile:
    """The profile of one_core.toml for a machine of `num_cores` such cores: rates of one rank with
    one thread, which a rank of more threads divides."""
    text = files("phalanx.plan.calibrated").joinpath("one_core.toml").read_text(encoding="utf-8")
    entries = tomllib.loads(text)["fit"]
    fits = [_parse_fitted_rate(entry) for entry in entries]
    # All were measured in processor seconds: collectives' are asked for by that name, too.
    fits += [
        _parse_fitted_rate(entry | {"mode": PROCESSOR}) for entry in entries if "mode" not in entry
    ]
    section = ProfileSection("", 0.0, False, 0, "processor", tuple(fits), ())
    return MachineProfile("cpu", "one core", num_cores, "", {"gemm": section})


def _parse_fitted_rate(entry: dict[str, Any]) -> FittedRate:
    return FittedRate(
        entry["kind"],
        entry.get("mode", ""),
        entry["dtype"],
        1,
        1,
        entry["values"],
        None,
        None,
        0,
    )
