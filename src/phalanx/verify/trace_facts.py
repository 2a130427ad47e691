"""What is known of a trace without its tensors: losses, norms, the size of each tensor. Torch-free."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

INITIAL, FINAL = "initial", "final"
UPDATED = "updated"  # weights after the job's own optimizer; sizes are how far they moved
TRACE = "trace.json"


def gradients_of(step: int) -> str:
    """The name of the tensors of a step, counted from 0."""
    return f"step-{step}"


@dataclass(frozen=True)
class TraceStep:
    loss: float
    num_targets: int
    grad_norm: float
    max_norm: float | None


@dataclass(frozen=True)
class Trace:
    """`sizes`: set -> name -> norm of the tensor; `order`: names as a forward meets them."""

    directory: Path
    dtype: str
    lr: float
    steps: tuple[TraceStep, ...]
    order: tuple[str, ...]
    sizes: Mapping[str, Mapping[str, float]]

    def scale(self, kind: str, name: str) -> float:
        """What an error of the tensor is relative to: its own size, or a thousandth of a usual one's if that is more.

        A bias whose true gradient is zero has no other scale.
        """
        sizes = self.sizes[kind]
        whole = math.sqrt(sum(size**2 for size in sizes.values()))
        return max(sizes[name], 1e-3 * whole / len(sizes) ** 0.5)


def read_trace(directory: Path) -> Trace:
    body = json.loads((directory / TRACE).read_text())
    steps = tuple(TraceStep(**step) for step in body["steps"])
    return Trace(directory, body["dtype"], body["lr"], steps, tuple(body["order"]), body["sizes"])
