"""phalanx with precision.compute = "fp8"."""

from __future__ import annotations

from gpu_check.cases import Case
from gpu_check.systems import phalanx_bf16
from gpu_check.training import Say


def measure(case: Case, say: Say) -> None:
    phalanx_bf16.measure(case, say, precision="fp8")
