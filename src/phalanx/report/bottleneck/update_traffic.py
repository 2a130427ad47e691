"""`UpdateTraffic`: what an update of the weights moves in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.report.formats import dict_or_empty, finite_or_zero, number_or_nan


@dataclass(frozen=True)
class UpdateTraffic:
    """Bytes of one update on a rank: those that it moves at the least, and different ones among
    them."""

    moved_bytes: float
    touched_bytes: float


# Of each parameter in fp32, by optimizer: bytes of state; bytes that an update moves, the norm of
# gradients with it; different bytes. adamw reads weight, gradient and two moments and writes three
# of them. sgd's three passes read and write the buffer, add the gradient to it, and it to weights.
_UPDATE_BYTES = {"adamw": (8.0, 32.0, 16.0), "sgd": (4.0, 36.0, 12.0)}


def count_update_traffic(plan: Mapping[str, Any], job: Mapping[str, Any]) -> UpdateTraffic | None:
    """The traffic of an update by the optimizer's state in the plan; None of an optimizer that is
    not phalanx's, and of one without state or on the host of a GPU."""
    kind = str(dict_or_empty(job.get("optim")).get("kind", ""))
    memory = dict_or_empty(dict_or_empty(plan.get("memory")).get("predicted_bytes"))
    state_bytes = finite_or_zero(number_or_nan(memory.get("optimizer")))
    if kind not in _UPDATE_BYTES or not state_bytes > 0:
        return None
    state, moved, touched = _UPDATE_BYTES[kind]
    return UpdateTraffic(moved / state * state_bytes, touched / state * state_bytes)
