"""Kernels against references: how far each is from fp64, beside how far torch's own whole
operation is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

SLACK = 3.0  # times the error that torch's own operation has in the same type
LEAST = 1e-6  # of fp32 and wider, where both are exact but for the order of sums


def compare(
    ours: Mapping[str, torch.Tensor],
    own: Mapping[str, torch.Tensor],
    exact: Mapping[str, torch.Tensor],
) -> dict[str, Any]:
    """Of each tensor ||found - exact|| / ||exact|| of ours and of torch's own, and whether ours
    is as near."""
    errors = {
        name: [_error(found[name], wanted) for found in (ours, own)]
        for name, wanted in exact.items()
    }
    limits = {name: SLACK * theirs + LEAST for name, (_, theirs) in errors.items()}
    worst = max(errors, key=lambda name: errors[name][0] / limits[name])
    return {
        "errors": errors,
        "worst": worst,
        "error": errors[worst][0],
        "limit": limits[worst],
        "agrees": all(errors[name][0] <= limits[name] for name in errors),
    }


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Infinite for NaN: a comparison with NaN would hold nothing."""
    error = ((found.double() - exact).norm() / exact.norm()).item()
    return error if error == error else float("inf")
