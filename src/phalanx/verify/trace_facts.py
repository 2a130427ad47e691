"""A trace without its tensors: losses, norms, the size of each tensor. Torch-free."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.verify.number_types import (
    EPSILON_OF_DTYPE,
    FP8,
    find_rounding_dtype,
    parameter_dtype_of_row,
)

GRADIENT_KIND_PREFIX = "step-"
TOLERANCE_OF_DTYPE = {"float64": 1e-10, "float32": 1e-5}
# Of a usual tensor: a gradient this small is zero but for rounding. A bias before BatchNorm and the
# key's bias in attention have a true gradient of zero.
ROUNDING_64, ROUNDING_32 = 1e-10, 1e-5

MAX_RELAXED_TOLERANCE = 1e-2  # mistakes are larger
# A tensor whose band is wider is not judged in a narrow type: rounding alone makes another of it.
MAX_JUDGED_BAND = 0.5
# Two differ by twice what each lost, and ranks add up in another order.
ALLOWED_ROUNDINGS = 4
# Of float32, whose rounding one nudge measures and not several: a sum that cancels is moved by it
# by chance more or less (of Qwen3-Next's gates by a seventh of what a layout moves them).
ALLOWED_FLOAT32_ROUNDINGS = 16
# Of fp8, whose references round everything anew in each step: the largest of them is near the most.
ALLOWED_FP8_ROUNDINGS = 2

INITIAL_KIND = "initial"  # as the job's initialization makes them
# What the first step begins with: those that are constant at first, made random.
BEGIN_KIND = "begin"
WEIGHT_KIND_PREFIX = "weights-"  # sizes are how far they moved since the beginning
BUFFER_KIND_PREFIX = "buffers-"  # persistent ones
TRACE_FILE_NAME = "trace.json"
# An update rounds each element a few times, relative to the weight and not to how far it moves.
UPDATE_ROUNDINGS = 8
# What may be narrow besides a reduction of ranks.
SUM_OVER_MICROBATCHES = "the sum over microbatches"


def name_gradients_set(step: int) -> str:
    """The name of the gradients of a step, counted from 0."""
    return f"{GRADIENT_KIND_PREFIX}{step}"


def name_weights_set(step: int) -> str:
    """The name of the weights after the update of a step, counted from 0."""
    return f"{WEIGHT_KIND_PREFIX}{step}"


def name_buffers_set(step: int) -> str:
    """The name of the persistent buffers after a step, counted from 0."""
    return f"{BUFFER_KIND_PREFIX}{step}"


@dataclass(frozen=True)
class TraceStep:
    loss: float
    num_targets: int
    grad_norm: float
    max_norm: float | None
    special: str = ""
    """What no usual step has, of its targets; "" for a usual step."""


@dataclass(frozen=True)
class InitialFault:
    """A parameter whose initial values are not distributed as declared: by how much, relative to
    the declared width, and in which way."""

    name: str
    error: float
    words: str


@dataclass(frozen=True)
class ArithmeticFault:
    """A parameter whose part of a forward has fewer digits in a narrow type than its definition:
    how far its result is from that of the definition, relative, from the same inputs."""

    name: str
    error: float


@dataclass(frozen=True)
class AdapterFacts:
    """A comparison of phalanx's form of a Hugging Face model with its own class, `architecture`.

    `what`: "output", or "gradient" of the parameter `name`, where it differs by `error`, relative;
    "mode" where `error` parts, `name` the first, are built in evaluation mode, and in training mode
    by its own class; "number" where an attribute `name` of a part is another one, "shape" where a
    parameter has another one; "" where nothing differs. `unjudged`: why nothing was compared.
    """

    architecture: str
    what: str = ""
    name: str = ""
    error: float = 0.0
    unjudged: str = ""


@dataclass(frozen=True)
class Trace:
    """`sizes`: set -> name -> norm of the tensor, of weights that of their movement; `order`:
    parameters as a forward meets them. `lr`: the learning rate of every update. `leader`: the
    directory of the trace whose gradients are applied in each step, by this one and by each layout
    that is compared with it. `randomized`: names of the parameters that are constant at first.

    `narrows`, `mixes_rows`, `dropped`, `mixed_by` and `moved` are what verify/forward_probe.py saw
    of the module.
    """

    directory: Path
    dtype: str
    lr: float
    steps: tuple[TraceStep, ...]
    order: tuple[str, ...]
    sizes: Mapping[str, Mapping[str, float]]
    norms: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Set of weights -> name -> norm of the tensor itself."""
    leader: Path | None = None
    randomized: tuple[str, ...] = ()
    loads: tuple[Mapping[str, tuple[int, ...]], ...] = ()
    """For each step: router -> how many tokens chose each expert, and how many choices were
    dropped for want of room."""
    narrows: str = ""
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
    strays: Mapping[str, float] = field(default_factory=dict)
    """Of a narrow type: "loss", "grad_norm" and "evaluation" -> how far, relative to itself, it is
    from the same with weights rounded otherwise; the most of all steps."""
    evaluation: float | None = None
    """Loss of the last step's microbatches in evaluation mode, after the last step; None: it is
    not to be compared."""
    num_evaluated: int = 0
    """Targets of that evaluation."""

    initial_faults: tuple[InitialFault, ...] | None = None
    """Parameters that are not drawn as declared; None where no distribution is declared."""

    arithmetic_faults: tuple[ArithmeticFault, ...] | None = None
    """What a narrow type computes in fewer digits than defined; None where nothing was looked
    at."""

    lossy_gradients: tuple[ArithmeticFault, ...] | None = None
    """Gradients of phalanx's own model that a narrow type has further from a wide one than rounding
    explains, the worst first; None where nothing was looked at."""

    adapter: AdapterFacts | None = None
    """Of a Hugging Face model alone."""

    @property
    def has_buffers(self) -> bool:
        """True if the module has persistent buffers."""
        return name_buffers_set(0) in self.sizes

    @property
    def num_steps(self) -> int:
        return len(self.steps)

    def describe_first_special_step(self, step: int) -> str:
        """What of its targets the step has that no step before it has; "" for nothing, and for a
        step that none is before."""
        special = self.steps[step].special
        if step == 0 or special in [before.special for before in self.steps[:step]]:
            return ""
        return special

    @property
    def rounding_dtype(self) -> str:
        """The narrow type whose rounding is measured and allowed: that of the row, or what the
        module rounds to by itself; "" for none."""
        return find_rounding_dtype(self.dtype, self.narrows)

    @property
    def applied_from(self) -> Path:
        """The directory of the trace whose gradients are applied."""
        return self.leader or self.directory

    def tolerance(self, kind: str, name: str, usual: float) -> float:
        """The tolerance of a tensor: `usual`, or a few times what rounding alone has cost it in one
        process.

        Sums that cancel (the gradient of a norm of keys) lose digits in any order that ranks add
        them up in.
        """
        if self.rounding_dtype:
            return self._error_band(kind, name, usual)
        if name not in self.rounding.get(kind, {}):
            return usual
        lost = max(self._list_lost_shares(kind, name))
        return max(usual, min(MAX_RELAXED_TOLERANCE, ALLOWED_FLOAT32_ROUNDINGS * lost))

    def scalar_tolerance(self, attribute: str, usual: float) -> float:
        """The tolerance of "loss", "grad_norm" or "evaluation": `usual`, or where rounding to a
        narrow type is measured a few times what that costs it."""
        if not self.rounding_dtype:
            return usual
        return max(
            ALLOWED_ROUNDINGS * self.strays.get(attribute, 0.0),
            EPSILON_OF_DTYPE[self.rounding_dtype] / 16,
        )

    @property
    def allowed_roundings(self) -> int:
        """Gradients of a narrow type may be off by so many times what rounding changes."""
        return ALLOWED_FP8_ROUNDINGS if self.dtype == FP8 else ALLOWED_ROUNDINGS

    def bands(self) -> dict[str, float]:
        """Tolerances of a narrow type: gradient -> how far it may be off, relative to its size;
        infinite where rounding alone changes it by more than half."""
        if not self.rounding_dtype:
            return {}
        kind = name_gradients_set(0)
        return {name: self._error_band(kind, name, 0.0) for name in self.sizes[kind]}

    def _error_band(self, kind: str, name: str, usual: float) -> float:
        lost = self._list_lost_shares(kind, name)
        # Weights and updates: from equal gradients, in float32.
        if not lost:
            return usual
        least = EPSILON_OF_DTYPE[self.rounding_dtype] / 2
        band = max(self.allowed_roundings * max(lost), least, usual)
        if band > MAX_JUDGED_BAND:
            return math.inf
        return band

    def _list_lost_shares(self, kind: str, name: str) -> list[float]:
        """How far rounding moves a tensor relative to its size, in each step: one with few elements
        may hardly move in some of them, by chance."""
        prefix = kind.rpartition("-")[0]
        return [
            lost[name] / (self.scale(other, name) or 1.0)
            for other, lost in self.rounding.items()
            if other.rpartition("-")[0] == prefix and name in lost
        ]

    def norm(self, kind: str, name: str) -> float:
        """The norm of the tensor itself, of weights, too."""
        return self.norms.get(kind, self.sizes[kind])[name]

    def scale(self, kind: str, name: str) -> float:
        """The size that errors of the tensor are relative to: its own, or a thousandth of a usual
        one's if more. Of weights how far they moved, or what an update rounds of them, if more.

        What is nothing but the rounding of larger numbers (the gradient of a bias before BatchNorm)
        has no digits of its own: its error is relative to a usual tensor's size.
        """
        if kind.startswith(WEIGHT_KIND_PREFIX):
            stored = parameter_dtype_of_row(self.dtype)
            rounding = UPDATE_ROUNDINGS * EPSILON_OF_DTYPE[stored] / TOLERANCE_OF_DTYPE[stored]
            return max(self.sizes[kind][name], rounding * self.norm(kind, name))
        usual = self._compute_root_mean_square_norm(kind)
        if self._is_mere_rounding(kind, name):
            return usual
        return max(self.sizes[kind][name], 1e-3 * usual)

    def has_no_gradient(self, name: str) -> bool:
        """True if the tensor has no gradient in one process: it is frozen, or has no part in the
        loss."""
        return not any(
            self.sizes[name_gradients_set(step)][name] for step in range(len(self.steps))
        )

    def _compute_root_mean_square_norm(self, kind: str) -> float:
        sizes = self.sizes[kind]
        return math.sqrt(sum(size**2 for size in sizes.values()) / len(sizes))

    def _is_mere_rounding(self, kind: str, name: str) -> bool:
        if not kind.startswith(GRADIENT_KIND_PREFIX):
            return False
        share = ROUNDING_64
        if self.narrows or self.dtype != "float64":
            share = ROUNDING_32
        return 0 < self.sizes[kind][name] <= share * self._compute_root_mean_square_norm(kind)


def read_trace(directory: Path) -> Trace:
    body = json.loads((directory / TRACE_FILE_NAME).read_text())
    return Trace(
        directory,
        body["dtype"],
        body["lr"],
        tuple(TraceStep(**step) for step in body["steps"]),
        tuple(body["order"]),
        body["sizes"],
        norms=body["norms"],
        leader=None if body["leader"] is None else Path(body["leader"]),
        randomized=tuple(body["randomized"]),
        loads=tuple(_parse_expert_loads(loads) for loads in body["loads"]),
        narrows=body["narrows"],
        mixes_rows=body["mixes_rows"],
        dropped=tuple(body["dropped"]),
        rounding=body["rounding"],
        strays=body["strays"],
        mixed_by=body["mixed_by"],
        moved=tuple(body["moved"]),
        evaluation=body["evaluation"],
        num_evaluated=body["num_evaluated"],
        initial_faults=_read_initial_faults(body["initial_faults"]),
        arithmetic_faults=_read_arithmetic_faults(body["arithmetic_faults"]),
        lossy_gradients=_read_arithmetic_faults(body["lossy_gradients"]),
        adapter=None if body["adapter"] is None else AdapterFacts(**body["adapter"]),
    )


def _read_initial_faults(body: list[dict[str, Any]] | None) -> tuple[InitialFault, ...] | None:
    if body is None:
        return None
    return tuple(InitialFault(**fault) for fault in body)


def _read_arithmetic_faults(
    body: list[dict[str, Any]] | None,
) -> tuple[ArithmeticFault, ...] | None:
    if body is None:
        return None
    return tuple(ArithmeticFault(**fault) for fault in body)


def _parse_expert_loads(body: Mapping[str, list[int]]) -> dict[str, tuple[int, ...]]:
    return {router: tuple(counts) for router, counts in body.items()}
