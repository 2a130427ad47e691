"""The section [precision]."""

from __future__ import annotations

from typing import Literal

from phalanx.job.schema.base import Positive, PositiveFloat, Section


class Precision(Section):
    """The types of numbers."""

    compute: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "auto"
    """Type of matmuls and activations; auto: bf16 on GPUs of compute capability 8.0 and higher,
    else fp32.

    Weights, optimizer and gradient reduction stay fp32. fp16 scales the loss; fp8, for GPUs that
    have it, multiplies blocks' matrices in fp8 and does the rest in bf16 (docs/precision.md).
    """
    loss_scale: PositiveFloat | Literal["dynamic"] = "dynamic"
    """The factor that the loss is multiplied by before the backward with fp16; dynamic: halved
    when gradients overflow, doubled after loss_scale_growth_steps good steps."""
    loss_scale_initial: PositiveFloat = 65536.0
    """The first value of the dynamic scale."""
    loss_scale_growth_steps: Positive = 2000
    """Steps without an overflow after which the dynamic scale doubles."""
