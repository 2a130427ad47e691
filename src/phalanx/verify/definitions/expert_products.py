"""Products of tokens with their experts' matrices, beside one product for each expert: the kernel
that multiplies all at once in float32 is in no row of a small model."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from phalanx.job.schema import Job
from phalanx.mesh.grouped import multiply_rows_by_expert_weights
from phalanx.verify.definitions.check import make_difference
from phalanx.verify.row import Difference

JUDGED = "products of rows with the matrices of experts, and their gradients, in float32 and bf16"
# Some have none.
ROWS_OF_EXPERTS = (5, 0, 3, 1, 0, 8)
# A width whose rows are of whole 16 bytes, which the kernel needs, and one whose are not.
WIDTHS = ((16, 24), (18, 22))
TOLERANCE_OF_DTYPE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def find_wrong_products(job: Job) -> Iterator[Difference]:
    """The results that are not those of one product for each expert."""
    for dtype, tolerance in TOLERANCE_OF_DTYPE.items():
        for width, other in WIDTHS:
            generator = torch.Generator().manual_seed(0)
            shapes = {
                "rows": (sum(ROWS_OF_EXPERTS), width),
                "weight": (len(ROWS_OF_EXPERTS), other, width),
                "gradient": (sum(ROWS_OF_EXPERTS), other),
            }
            values = {
                name: torch.randn(shape, generator=generator).to(dtype)
                for name, shape in shapes.items()
            }
            results = _multiply(**values)
            expected = _multiply_by_definition(**values)
            for name, tensor in expected.items():
                error = float((results[name].double() - tensor).norm() / tensor.norm())
                if not error <= tolerance:
                    cause = (
                        f"of experts with {', '.join(map(str, ROWS_OF_EXPERTS))} rows, {width} by"
                        f" {other} wide, in {str(dtype).removeprefix('torch.')}: it is not what"
                        " one product for each expert gives"
                    )
                    yield make_difference("product with experts:", name, error, cause)
                    return


def _multiply(
    rows: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor
) -> dict[str, torch.Tensor]:
    rows, weight = rows.clone().requires_grad_(), weight.clone().requires_grad_()
    out = multiply_rows_by_expert_weights(rows, weight, torch.tensor(ROWS_OF_EXPERTS))
    out.backward(gradient)
    assert rows.grad is not None
    assert weight.grad is not None
    return {
        "the output": out.detach(),
        "the gradient of rows": rows.grad,
        "the gradient of weights": weight.grad,
    }


def _multiply_by_definition(
    rows: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor
) -> dict[str, torch.Tensor]:
    rows, weight, gradient = rows.double(), weight.double(), gradient.double()
    out, grad_rows = torch.zeros_like(gradient), torch.zeros_like(rows)
    grad_weight = torch.zeros_like(weight)
    first = 0
    for expert, count in enumerate(ROWS_OF_EXPERTS):
        part = slice(first, first + count)
        out[part] = rows[part] @ weight[expert].T
        grad_rows[part] = gradient[part] @ weight[expert]
        grad_weight[expert] = gradient[part].T @ rows[part]
        first += count
    return {
        "the output": out,
        "the gradient of rows": grad_rows,
        "the gradient of weights": grad_weight,
    }
