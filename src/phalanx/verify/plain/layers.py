"""Linear layers, norms and feed-forwards, read by name from a mapping of tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from phalanx.verify.plain.settings import BlockSettings

Tensors = Mapping[str, torch.Tensor]


def apply_linear(
    parameters: Tensors, name: str, x: torch.Tensor, *, bias: bool = False
) -> torch.Tensor:
    y = torch.einsum("...i,oi->...o", x, parameters[f"{name}.weight"])
    if bias:
        y = y + parameters[f"{name}.bias"]
    return y


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False
) -> torch.Tensor:
    """Zhang and Sennrich, arXiv 1910.07467; Gemma stores weights less one."""
    if plus_one:
        weight = 1 + weight
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """Ba et al., arXiv 1607.06450; the variance is that of all features, divided by their
    number."""
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return centred / torch.sqrt(variance + eps) * weight + bias


def residual_stream_norm(
    settings: BlockSettings, parameters: Tensors, name: str, x: torch.Tensor
) -> torch.Tensor:
    """A norm of the residual stream, of the settings' kind."""
    weight = parameters[f"{name}.weight"]
    if settings.norm == "layernorm":
        return layer_norm(x, weight, parameters[f"{name}.bias"], settings.norm_eps)
    return rms_norm(x, weight, settings.norm_eps, plus_one=settings.norm_plus_one)


def apply_activation(kind: str, x: torch.Tensor) -> torch.Tensor:
    """SiLU (arXiv 1702.03118); GELU, exact or with the tanh of arXiv 1606.08415, section 2."""
    if kind == "swiglu":
        return x * torch.sigmoid(x)
    if kind.endswith("_tanh"):
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
        return 0.5 * x * (1 + torch.tanh(inner))
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def feed_forward(
    settings: BlockSettings, parameters: Tensors, name: str, x: torch.Tensor
) -> torch.Tensor:
    """Two matrices, or with a gate three (Shazeer, "GLU variants", arXiv 2002.05202)."""
    bias = settings.bias == "all"
    up = apply_linear(parameters, f"{name}.up", x, bias=bias)
    if settings.activation in ("swiglu", "geglu", "geglu_tanh"):
        gate = apply_linear(parameters, f"{name}.gate", x, bias=bias)
        inner = apply_activation(settings.activation, gate) * up
    else:
        inner = apply_activation(settings.activation, up)
    return apply_linear(parameters, f"{name}.down", inner, bias=bias)
