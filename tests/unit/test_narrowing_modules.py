"""Modules that round to a type of fewer digits by themselves: which type that is, and by what they are judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from phalanx.verify.bands import describe_error_bands
from phalanx.verify.forward_probe import probe_forward
from phalanx.verify.trace_facts import (
    MAX_RELAXED_TOLERANCE,
    Trace,
    TraceStep,
    name_gradients_set,
    name_weights_set,
)

Forward = Callable[[nn.Linear, torch.Tensor], torch.Tensor]


def compute_all_alike(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(x)


def compute_in_bfloat16(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    assert linear.bias is not None
    parts = (x, linear.weight, linear.bias)
    return F.linear(*(part.bfloat16() for part in parts)).to(x.dtype)


def compute_under_autocast(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return linear(x).to(x.dtype)


def round_to_float16_once(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(x.float().half().to(x.dtype))


def round_to_float32(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(x.float().to(x.dtype))


class Module(nn.Module):
    def __init__(self, forward: Forward, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear, self.compute = nn.Linear(4, 3, dtype=dtype), forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(self.linear, x)


class MeanLoss:
    def compute_outputs(self, module: nn.Module, batch: Mapping[str, torch.Tensor]) -> Any:
        return module(batch["inputs"])

    def __call__(
        self, module: nn.Module, batch: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.compute_outputs(module, batch).square().sum(), torch.tensor(
            len(batch["inputs"])
        )


@pytest.mark.parametrize(
    ("forward", "in_float64", "in_float32"),
    [
        (compute_all_alike, "", ""),
        (round_to_float32, "float32", ""),
        (compute_in_bfloat16, "bfloat16", "bfloat16"),
        # Autocast leaves float64 alone.
        (compute_under_autocast, "", "bfloat16"),
        (round_to_float16_once, "float16", "float16"),
    ],
)
def test_the_type_that_a_module_rounds_to_is_seen(
    forward: Forward, in_float64: str, in_float32: str
) -> None:
    for dtype, narrows in ((torch.float64, in_float64), (torch.float32, in_float32)):
        torch.manual_seed(0)
        batch = {"inputs": torch.randn(4, 4, dtype=dtype)}
        probed = probe_forward(lambda dtype=dtype: Module(forward, dtype), MeanLoss(), batch, 1)
        assert probed.narrows == narrows


GRADIENTS, WEIGHTS = name_gradients_set(0), name_weights_set(0)
TRACE = Trace(
    Path("."),
    "float64",
    0.1,
    (TraceStep(3.0, 10, 2.0, None),),
    ("a", "b"),
    {GRADIENTS: {"a": 2.0, "b": 1.0}, WEIGHTS: {"a": 0.02, "b": 0.01}},
    norms={WEIGHTS: {"a": 2.0, "b": 1.0}},
    rounding={GRADIENTS: {"a": 0.02, "b": 0.002}},
    strays={"grad_norm": 0.003},
)


def test_a_module_that_rounds_is_judged_by_bands_in_wide_types_too() -> None:
    for dtype in ("float64", "float32"):
        trace = replace(TRACE, dtype=dtype, narrows="bfloat16")
        assert trace.bands() == pytest.approx({"a": 4 * 0.01, "b": 4 * 0.002})
        assert trace.tolerance(GRADIENTS, "a", 1e-5) == pytest.approx(0.04)
        assert trace.scalar_tolerance("grad_norm", 1e-5) == pytest.approx(0.012)
        # From equal gradients, which nobody rounds.
        assert trace.tolerance(WEIGHTS, "a", 1e-10) == 1e-10
        assert describe_error_bands(trace).startswith("bf16: gradients may be off by 0.8 % to 4 %")


def test_the_type_with_fewer_digits_is_the_one_that_counts() -> None:
    rounds_to = {
        (dtype, narrows): replace(TRACE, dtype=dtype, narrows=narrows).rounding_dtype
        for dtype in ("float64", "bfloat16", "float16")
        for narrows in ("", "float32", "bfloat16", "float16")
    }
    assert {key for key, name in rounds_to.items() if not name} == {
        ("float64", ""),
        ("float64", "float32"),
    }
    assert rounds_to["float16", "bfloat16"] == rounds_to["bfloat16", "float16"] == "bfloat16"
    assert rounds_to["float64", "float16"] == rounds_to["float16", "float32"] == "float16"


def test_a_sum_that_cancels_is_judged_by_the_most_that_rounding_moved_it_in_any_step() -> None:
    """One that has four elements hardly moves in some steps, by chance."""
    second = name_gradients_set(1)
    sizes = {GRADIENTS: {"a": 2.0, "b": 1.0}, second: {"a": 2.0, "b": 1.0}}
    rounding = {GRADIENTS: {"a": 0.0, "b": 0.0}, second: {"a": 2e-5, "b": 0.0}}
    trace = replace(TRACE, narrows="float32", sizes=sizes, rounding=rounding)
    for kind in (GRADIENTS, second):
        assert trace.tolerance(kind, "a", 1e-5) == pytest.approx(16 * 1e-5)
        assert trace.tolerance(kind, "b", 1e-5) == 1e-5
    lost = {GRADIENTS: {"a": 0.2}, second: {"a": 0.2}}
    assert replace(trace, rounding=lost).tolerance(second, "a", 1e-5) == MAX_RELAXED_TOLERANCE
