"""What can be asked of compressed gradients: nothing equals the reference, yet nothing may be lost.

Torch-free.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from phalanx.plan.workload import keeps_error
from phalanx.verify.row import Difference
from phalanx.verify.trace_facts import INITIAL, UPDATED, Trace, gradients_of

CAST_TOLERANCE = {"fp16": 2e-2, "bf16": 2e-1}
"""Rounding is 5e-4 and 4e-3 of each rank's gradient; their sum is smaller where they cancel, and is
rounded, too.

From the second step on weights differ by it, and a ReLU that turns elsewhere makes that many times
more.
"""


def is_lossy(compress: str) -> bool:
    """True where most of a gradient may stay behind; casts only round."""
    return keeps_error(compress)


def find_tolerance(compress: str, exact: float) -> float:
    """The tolerance of a layout with this compression; `exact` is that of uncompressed ones."""
    return max(exact, CAST_TOLERANCE.get(compress, 0.0))


def keep_comparable(trace: Trace, compress: str) -> Trace:
    """The part of a trace that such a layout can be held to.

    Adam divides what is rounded by its own size, so its update has no tolerance; and once something
    stayed behind, weights and all that follows are others.
    """
    if is_lossy(compress):
        kinds = {INITIAL, gradients_of(0)}
        sizes = {kind: sizes for kind, sizes in trace.sizes.items() if kind in kinds}
        return replace(trace, steps=trace.steps[:1], sizes=sizes, evaluation=None)
    return replace(
        trace, sizes={kind: sizes for kind, sizes in trace.sizes.items() if kind != UPDATED}
    )


def describe_compression(compress: str, tolerance: float) -> str:
    if is_lossy(compress):
        return (
            f"{compress} compression changes gradients by design: judged is that what the first"
            " step sends and what it keeps add up to the reference's gradient, and that ranks stay"
            " equal"
        )
    return (
        f"{compress} compression rounds gradients: judged at {tolerance:.0e}, without the"
        " optimizer's update"
    )


def find_unequal_ranks(
    observations: Sequence[Mapping[str, Any]], order: Sequence[str], step: int
) -> Difference | None:
    """The first tensor that the ranks, whole copies all, no longer hold alike.

    `digests`: name -> that of its bytes.
    """
    for name in order:
        digests = [observation["digests"].get(name, "") for observation in observations]
        # What most ranks hold is taken for right, and the others are named.
        usual, _ = Counter(digests).most_common(1)[0]
        ranks = tuple(rank for rank, digest in enumerate(digests) if digest != usual)
        if ranks:
            cause = (
                "the ranks hold different weights: what they make of what was sent is not the same"
            )
            return Difference("weight", name, step, math.inf, ranks[0], ranks, "whole", cause)
    return None
