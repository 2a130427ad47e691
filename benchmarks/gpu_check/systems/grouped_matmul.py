"""Products of experts' matrices (phalanx.mesh.grouped, torch's grouped kernel) against a loop
over the experts."""

from __future__ import annotations

import torch

from gpu_check.cases import Case
from gpu_check.parity import compare
from gpu_check.training import Say
from phalanx.mesh.grouped import _can_use_grouped_kernel
from phalanx.nn.grouped import GroupedLinear


def measure(case: Case, say: Say) -> None:
    """In bf16 and fp32: torch has a kernel for the first on CUDA, for the second on a CPU, and
    the rest is a loop."""
    width = case.expert_width
    rows = {}
    for dtype in (torch.bfloat16, torch.float32):
        for name, counts in (
            ("even", [width] * 8),
            ("uneven, two experts without rows", [0, 3, 5 * width, 17, 0, width, 1, 2 * width]),
        ):
            layer, x, grad = _given(case, counts, dtype)
            kind = "torch's grouped kernel" if _can_use_grouped_kernel(x, 2 * width) else "a loop"
            exact = _by_loop(layer.weight, x, grad, counts, torch.float64)
            own = _by_loop(layer.weight, x, grad, counts, dtype)
            key = f"{str(dtype).removeprefix('torch.')}, {name} ({kind})"
            rows[key] = compare(_by_groups(layer, x, grad, counts), own, exact)
            say({"parity": rows, "agrees": all(row["agrees"] for row in rows.values())})
            dirty_memory(layer.weight)
            rows[f"{key}, in dirty memory"] = compare(
                _by_groups(layer, x, grad, counts), own, exact
            )
            say({"parity": rows, "agrees": all(row["agrees"] for row in rows.values())})


def dirty_memory(like: torch.Tensor) -> None:
    """Leave NaN in what the next tensors of this size are made of: what a kernel does not write is
    seen then.

    Fresh memory is zero, and hides it.
    """
    blocks = [torch.full_like(like, torch.nan) for _ in range(4)]
    del blocks


def _given(
    case: Case, counts: list[int], dtype: torch.dtype
) -> tuple[GroupedLinear, torch.Tensor, torch.Tensor]:
    """The layer, its rows [R, I], and the gradient of what it puts out [R, O]."""
    width, generator = case.expert_width, torch.Generator().manual_seed(2)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(case.device, dtype)

    layer = GroupedLinear(len(counts), width, 2 * width).to(case.device, dtype)
    with torch.no_grad():
        layer.weight.copy_(random(*layer.weight.shape))
    return layer, random(sum(counts), width), random(sum(counts), 2 * width)


def _by_groups(
    layer: GroupedLinear, x: torch.Tensor, grad: torch.Tensor, counts: list[int]
) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    layer.weight.grad = None
    out = layer(x, torch.tensor(counts, device=x.device))
    out.backward(grad)
    return _found(out, x, layer.weight)


def _by_loop(
    weight: torch.Tensor, x: torch.Tensor, grad: torch.Tensor, counts: list[int], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    weight, x = (tensor.detach().to(dtype).requires_grad_() for tensor in (weight, x.clone()))
    out = torch.cat([part @ matrix.T for part, matrix in zip(x.split(counts), weight, strict=True)])
    out.backward(grad.to(dtype))
    return _found(out, x, weight)


def _found(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    assert x.grad is not None
    assert weight.grad is not None
    return {"out": out.detach(), "grad rows": x.grad, "grad matrices": weight.grad}
