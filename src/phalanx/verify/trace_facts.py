"""A trace without its tensors: losses, norms, the size of each tensor. Torch-free."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

GRADIENTS = "step-"
# Of a usual tensor: a gradient this small is zero but for rounding. A bias before BatchNorm and the
# key's bias in attention have a true gradient of zero.
ROUNDING_64, ROUNDING_32 = 1e-10, 1e-5

MOST_RELAXED = 1e-2  # mistakes are larger
# Two differ by twice what each lost, and ranks add up in another order.
ROUNDINGS = 4

INITIAL, FINAL = "initial", "final"
UPDATED = "updated"  # weights after the job's own optimizer; sizes are how far they moved
BUFFERS = "buffers"  # persistent ones, after the steps
TRACE = "trace.json"


def gradients_of(step: int) -> str:
    """The name of the tensors of a step, counted from 0."""
    return f"{GRADIENTS}{step}"


@dataclass(frozen=True)
class TraceStep:
    loss: float
    num_targets: int
    grad_norm: float
    max_norm: float | None


@dataclass(frozen=True)
class Trace:
    """`sizes`: set -> name -> norm of the tensor; `order`: parameters as a forward meets them.

    `narrows`, `mixes_rows`, `dropped`, `mixed_by` and `moved` are what verify/forward_probe.py saw
    of the module.
    """

    directory: Path
    dtype: str
    lr: float
    steps: tuple[TraceStep, ...]
    order: tuple[str, ...]
    sizes: Mapping[str, Mapping[str, float]]
    narrows: bool = False
    mixes_rows: bool = False
    dropped: tuple[str, ...] = ()
    rounding: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Set -> name -> how far the tensor in one process is from the same in float64, or of a module
    without one from the same with its weights rounded otherwise.

    Empty where nobody computed it.
    """
    mixed_by: str = ""
    """The part of the loss that lets rows see each other: "model", "objective", or nothing."""
    moved: tuple[str, ...] = ()
    """Buffers that a forward changes, kept in checkpoints or not."""
    evaluation: float | None = None
    """Loss of the last step's microbatches in evaluation mode, after the last step; None: it is
    not to be compared."""

    def tolerance(self, kind: str, name: str, usual: float) -> float:
        """The tolerance of a tensor: `usual`, or a few times what rounding alone has cost it in one
        process.

        Sums that cancel (the gradient of a norm of keys) lose digits in any order that ranks add
        them up in.
        """
        lost = self.rounding.get(kind, {}).get(name, 0.0)
        if not lost:
            return usual
        return max(usual, min(MOST_RELAXED, ROUNDINGS * lost / self.scale(kind, name)))

    def scale(self, kind: str, name: str) -> float:
        """The size that errors of the tensor are relative to: its own, or a thousandth of a usual
        one's if more.

        What is nothing but the rounding of larger numbers (the gradient of a bias before BatchNorm)
        has no digits of its own: its error is relative to a usual tensor's size.
        """
        usual = self._usual(kind)
        if self._is_rounding(kind, name):
            return usual
        return max(self.sizes[kind][name], 1e-3 * usual)

    def never_moved_by_more_than_rounding(self, name: str) -> bool:
        """True if the tensor's gradient is rounding in some step, and neither more nor exactly
        zero in any."""
        for step in range(len(self.steps)):
            kind = gradients_of(step)
            if self.sizes[kind][name] and not self._is_rounding(kind, name):
                return False
        return not self.has_no_gradient(name)

    def has_no_gradient(self, name: str) -> bool:
        """True if the tensor has no gradient in one process: it is frozen, or has no part in the
        loss."""
        return not any(self.sizes[gradients_of(step)][name] for step in range(len(self.steps)))

    def _usual(self, kind: str) -> float:
        sizes = self.sizes[kind]
        return math.sqrt(sum(size**2 for size in sizes.values()) / len(sizes))

    def _is_rounding(self, kind: str, name: str) -> bool:
        if not kind.startswith(GRADIENTS):
            return False
        share = ROUNDING_64
        if self.narrows or self.dtype == "float32":
            share = ROUNDING_32
        return 0 < self.sizes[kind][name] <= share * self._usual(kind)


def read_trace(directory: Path) -> Trace:
    body = json.loads((directory / TRACE).read_text())
    steps = tuple(TraceStep(**step) for step in body["steps"])
    order, narrows, mixes_rows = tuple(body["order"]), body["narrows"], body["mixes_rows"]
    return Trace(
        directory,
        body["dtype"],
        body["lr"],
        steps,
        order,
        body["sizes"],
        narrows,
        mixes_rows,
        tuple(body["dropped"]),
        body.get("rounding", {}),
        body["mixed_by"],
        tuple(body["moved"]),
        body["evaluation"],
    )
