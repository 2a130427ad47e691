"""The groups that seconds of a step are charged to, and which of them count as training."""

from __future__ import annotations

import math
from collections.abc import Mapping

# What the page charges seconds to: the phases of `phalanx.core.phases`, the rare ones taken
# together.
TIME_GROUPS = (
    "data",
    "forward",
    "backward",
    "collective",
    "pipeline",
    "optimizer",
    "checkpoint",
    "evaluate",
    "startup",
    "other",
    "unaccounted",
)
UNPRODUCTIVE_GROUPS = ("data", "checkpoint", "evaluate")
"""What a step's seconds are spent on beside training it."""

_GROUP_OF_PHASE = {
    "host_to_device": "data",
    "ckpt_prepare": "checkpoint",
    "ckpt_stage": "checkpoint",
    "ckpt_write": "checkpoint",
    "before_commit": "checkpoint",
    "after_commit": "checkpoint",
    "ckpt_load": "startup",
}


def get_time_group_of_phase(phase: str) -> str:
    """The group of `TIME_GROUPS` a phase is shown in; phases of a later release are "other"."""
    # No phase may take the name of what is left over by all of them.
    if phase == "unaccounted":
        return "other"
    name = _GROUP_OF_PHASE.get(phase, phase)
    if name not in TIME_GROUPS:
        return "other"
    return name


def sum_productive_s(step_s: float, phases_s: Mapping[str, float]) -> float:
    """The seconds of a step in which it was trained: goodput is their share of the wall time."""
    unproductive_s = sum(
        seconds
        for phase, seconds in phases_s.items()
        if math.isfinite(seconds) and get_time_group_of_phase(phase) in UNPRODUCTIVE_GROUPS
    )
    return max(step_s - unproductive_s, 0.0)
