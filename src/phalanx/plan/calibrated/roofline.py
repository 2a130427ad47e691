"""A plan's forwards and backwards under a roof: products at the rate of large ones, everything else
at the rate of memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.core.errors import LayoutError
from phalanx.plan.calibrated.blocks import TENSORS_MOVED_BY_OPERATION
from phalanx.plan.calibrated.step import estimate_step_from_profile
from phalanx.plan.plan import Plan
from phalanx.plan.profiles import FittedRate, MachineProfile, ProfileSection

_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


@dataclass(frozen=True)
class Roofline:
    """Seconds of a step on one rank, at the least: of products and attention, and of what is read
    and written between them."""

    products_s: float
    between_s: float


def estimate_roofline(plan: Plan, flops_per_s: float, bytes_per_s: float) -> Roofline | None:
    """The forwards and backwards of one step of `plan` on a rank that reaches both rates; None for
    a pipeline, and where nobody knows the model's work."""
    if plan.layout.pp > 1 or plan.model_shape.work(plan.seq_len) is None:
        return None
    try:
        terms = estimate_step_from_profile(plan, _build_profile(plan, flops_per_s, bytes_per_s))
    except LayoutError:
        return None
    seconds = terms.terms
    products_s = seconds["ideal"] + seconds["matmul loss"] + seconds["attention"]
    return Roofline(products_s, seconds["elementwise"])


def _build_profile(plan: Plan, flops_per_s: float, bytes_per_s: float) -> MachineProfile:
    """A machine whose kernels cost nothing to call, and whose messages take no time."""
    products = {"overhead_s": 0.0, "flops_per_s": flops_per_s}
    products |= dict.fromkeys(("rows_half", "cols_half", "inner_half"), 0.0)
    fits = [_build_fit(plan, "matmul", "", products, dtype) for dtype in ("fp32", "bf16")]
    by_flops = {"overhead_s": 0.0, "per_s": flops_per_s}
    by_bytes = {"overhead_s": 0.0, "per_s": bytes_per_s}
    for mode in ("forward", "training"):
        fits.append(_build_fit(plan, "attention", mode, by_flops))
        for kind in (*TENSORS_MOVED_BY_OPERATION, "embedding", "cross_entropy"):
            fits.append(_build_fit(plan, kind, mode, by_bytes))
    fits += [_build_fit(plan, kind, "", by_bytes) for kind in ("copy", "adamw")]
    at_once = {"overhead_s": 0.0, "per_s": math.inf}
    fits += [_build_fit(plan, kind, "", at_once) for kind in _COLLECTIVES]
    section = ProfileSection("", 0.0, False, 0, "wall", tuple(fits), ())
    return MachineProfile(plan.device, "roofline", plan.world_size, "", {"gemm": section})


def _build_fit(
    plan: Plan, kind: str, mode: str, values: dict[str, float], dtype: str = "fp32"
) -> FittedRate:
    return FittedRate(kind, mode, dtype, plan.world_size, 1, values, None, None, 0)
