"""Where a step's time and a rank's memory go, as rows: a terminal and a page draw the same ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# What each term of `StepTime` is called where it is drawn; a term without a name is shown as it is.
TERM_LABELS = {
    "ideal": "products at peak",
    "matmul loss": "matmul loss",
    "attention": "attention",
    "elementwise": "elementwise",
    "tp": "tensor parallel",
    "cp": "context parallel",
    "ep": "experts",
    "bubble": "pipeline bubble",
    "dp exposed": "data parallel",
    "optimizer": "optimizer",
    "offload": "offload",
    "launch": "kernel launches",
    "jitter": "jitter",
    "goodput": "failures, saves",
}
TERM_MEANINGS = {
    "ideal": "the model's matrix products at the device's peak",
    "matmul loss": "products below the peak: tiles, waves, clocks, and those computed again",
    "attention": "scores and their use, forward and backward",
    "elementwise": "norms, activation functions, sums: limited by the device's memory",
    "tp": "collectives of tensor parallelism that nothing hides",
    "cp": "keys and values on their way between ranks that share sequences",
    "ep": "tokens on their way to experts and back",
    "bubble": "ranks of the pipeline wait for each other, and for messages between stages",
    "dp exposed": "gradients and weights that travel beside no computation",
    "optimizer": "the update of the weights",
    "offload": "copies to and from host memory that nothing hides",
    "launch": "the device waits for the CPU to start kernels",
    "jitter": "the slowest of many devices and nodes",
    "goodput": "saving, failures, restarts and repeated steps, per step",
}
# The categories of memory that exist in each phase of a step, for plans that say what there is of
# each without saying when: those of older versions.
MEMORY_PHASES = {
    "between steps": ("parameters", "optimizer", "allocator", "compression"),
    "forward": (
        "parameters", "optimizer", "activations", "communication", "allocator", "compression",
    ),
    "backward": (
        "parameters", "gradients", "optimizer", "activations", "loss", "communication",
        "compression", "allocator",
    ),
    "update": ("parameters", "gradients", "optimizer", "staging", "allocator", "compression"),
}  # fmt: skip


@dataclass(frozen=True)
class WaterfallRow:
    """One term: it begins where those before it end. Times in seconds, `share` of the step."""

    term: str
    seconds: float
    start_s: float
    share: float

    @property
    def name(self) -> str:
        return TERM_LABELS.get(self.term, self.term)

    @property
    def meaning(self) -> str:
        return TERM_MEANINGS.get(self.term, "")

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self)) | {"name": self.name, "meaning": self.meaning}


def build_waterfall(
    terms_s: Mapping[str, float], goodput: float | None = None
) -> list[WaterfallRow]:
    """The terms of a step that take any time, in their order. `goodput` (0 to 1) adds what a step
    costs beyond itself in wall time; its share is of the step, too, so that shares can pass 1."""
    total_s = sum(terms_s.values())
    rows: list[WaterfallRow] = []
    if not total_s > 0 or not math.isfinite(total_s):
        return rows
    start_s = 0.0
    for term, seconds in terms_s.items():
        if seconds != 0:
            rows.append(WaterfallRow(term, seconds, start_s, seconds / total_s))
        start_s += seconds
    if goodput is not None and 0 < goodput < 1:
        lost_s = total_s * (1 / goodput - 1)
        rows.append(WaterfallRow("goodput", lost_s, start_s, lost_s / total_s))
    return rows


def list_memory_phases(
    categories: Mapping[str, float], phases: Mapping[str, Mapping[str, float]] | None = None
) -> dict[str, dict[str, float]]:
    """Bytes by category at the highest moment of each phase of a step: `phases` as the plan counted
    them (`plan.memory_phases`), without what is 0.

    Without `phases`, of the `categories` that a plan predicts those that exist in a phase; one that
    no phase names is there in all of them.
    """
    if phases:
        counted: dict[str, dict[str, float]] = {}
        for phase, parts in phases.items():
            counted[phase] = {category: size for category, size in parts.items() if size}
        return counted
    named = {name for names in MEMORY_PHASES.values() for name in names}
    guessed: dict[str, dict[str, float]] = {}
    for phase, names in MEMORY_PHASES.items():
        guessed[phase] = {}
        for category, size in categories.items():
            if size and (category in names or category not in named):
                guessed[phase][category] = size
    return guessed
