"""Products of rows that are sorted by expert with the matrices of these experts, which are one
tensor.

Shape suffixes: E experts, R rows, I width in, O width out.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from phalanx.mesh.casts import cast_weight_through_cache
from phalanx.mesh.devices import is_on_cpu

# In rows, so that few sizes are compiled: see `_pad_with_zero_rows`.
GROUPED_KERNEL_ROW_MULTIPLE = 64
_CACHED_SIZES_ATTRIBUTE = "_phalanx_sizes"


def multiply_rows_by_expert_weights(
    x_RI: torch.Tensor, weight_EOI: torch.Tensor, counts_E: torch.Tensor
) -> torch.Tensor:
    """Rows of expert e times weight[e], in the autocast type if there is one.

    An expert without rows has gradient 0.
    """
    low = choose_product_dtype(x_RI)
    with torch.autocast(x_RI.device.type, enabled=False):
        out: torch.Tensor = _GroupedLinearFunction.apply(
            x_RI.to(low), cast_weight_through_cache(weight_EOI, low), counts_E
        )
    return out


def choose_product_dtype(x: torch.Tensor) -> torch.dtype:
    """The type in which products of `x` are computed."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype is not torch.float64:
        return torch.get_autocast_dtype(kind)
    return x.dtype


def read_rows_per_expert(counts_E: torch.Tensor, num_rows: int) -> list[int]:
    """The numbers of `counts_E`, which tell how many of `num_rows` rows each expert has."""
    return counts_E.tolist()  # type: ignore[no-any-return]


def split_rows_evenly_over_experts(num_rows: int, num_experts: int) -> list[int]:
    """Counts of rows of experts that are busy alike."""
    each, more = divmod(num_rows, num_experts)
    return [each + (expert < more) for expert in range(num_experts)]


def read_group_sizes_once(counts_E: torch.Tensor, num_rows: int) -> list[int]:
    """`counts_E`, of `num_rows` rows at most, for the host, which reads them once: a mixture's
    products and their gradients share them."""
    if torch.compiler.is_compiling():
        return counts_E.tolist()
    sizes: list[int] | None = getattr(counts_E, _CACHED_SIZES_ATTRIBUTE, None)
    if sizes is None:
        sizes = read_rows_per_expert(counts_E, num_rows)
        cache_group_sizes(counts_E, sizes)
    return sizes


def cache_group_sizes(counts_E: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """`counts_E`, whose numbers the host knows already: it then never waits for a GPU to learn
    them."""
    setattr(counts_E, _CACHED_SIZES_ATTRIBUTE, sizes)
    return counts_E


class _GroupedLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x_RI: torch.Tensor, weight_EOI: torch.Tensor, counts_E: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x_RI, weight_EOI, counts_E)
        return multiply_rows_by_expert_matrices(x_RI, weight_EOI.transpose(1, 2), counts_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RO: torch.Tensor) -> Any:  # type: ignore[override]
        x_RI, weight_EOI, counts_E = ctx.saved_tensors
        # `grouped_mm` refuses strides of 0, which the gradient of a sum has.
        grad_RO = grad_RO.contiguous()
        needs_x, needs_weight, _ = ctx.needs_input_grad
        grad_x = grad_weight = None
        if needs_x:
            grad_x = multiply_rows_by_expert_matrices(grad_RO, weight_EOI, counts_E)
        if needs_weight:
            grad_weight = compute_expert_weight_gradients(grad_RO, x_RI, counts_E)
        return grad_x, grad_weight, None


def multiply_rows_by_expert_matrices(
    x_RI: torch.Tensor, matrix_EIO: torch.Tensor, counts_E: torch.Tensor
) -> torch.Tensor:
    """[R, O]: rows of expert e times matrix[e]."""
    if _can_use_grouped_kernel(x_RI, matrix_EIO.shape[2]):
        return F.grouped_mm(x_RI, matrix_EIO, offs=_compute_group_end_rows(counts_E))
    products = []
    sizes = read_group_sizes_once(counts_E, len(x_RI))
    for part, matrix in zip(x_RI.split(sizes), matrix_EIO, strict=True):
        products.append((_pad_with_zero_rows(part) @ matrix)[: len(part)])
    return torch.cat(products)


def compute_expert_weight_gradients(
    a_RO: torch.Tensor, b_RI: torch.Tensor, counts_E: torch.Tensor
) -> torch.Tensor:
    """[E, O, I]: of each expert the product of its rows of a and b, summed over rows."""
    if _can_use_grouped_kernel(a_RO, b_RI.shape[1]):
        product = F.grouped_mm(a_RO.T, b_RI, offs=_compute_group_end_rows(counts_E))
        if not is_on_cpu(product):
            # On some GPUs the kernel writes nothing for a group without rows (pytorch #172439):
            # what was in memory stays.
            product.masked_fill_((counts_E == 0)[:, None, None], 0)
        return product
    sizes = read_group_sizes_once(counts_E, len(a_RO))
    return torch.stack(
        [
            _pad_with_zero_rows(a).T @ _pad_with_zero_rows(b)
            for a, b in zip(a_RO.split(sizes), b_RI.split(sizes), strict=True)
        ]
    )


def _pad_with_zero_rows(rows: torch.Tensor) -> torch.Tensor:
    """With rows of zeros at the end.

    In half precision a CPU compiles a product for each size that it meets and keeps it, half a MiB
    each: as many as there are numbers of tokens, if they are not rounded.
    """
    if not is_on_cpu(rows) or rows.dtype not in (torch.bfloat16, torch.float16):
        return rows
    return F.pad(rows, (0, 0, 0, -len(rows) % GROUPED_KERNEL_ROW_MULTIPLE))


def _compute_group_end_rows(counts_E: torch.Tensor) -> torch.Tensor:
    # The only type that grouped_mm takes them in.
    return counts_E.cumsum(0).to(torch.int32)


def _can_use_grouped_kernel(rows: torch.Tensor, other_width: int) -> bool:
    """torch's grouped product is of rows of whole 16 bytes, on CUDA in bf16, on the CPU in fp32;
    see also `_pad_with_zero_rows`."""
    num_rows, width = rows.shape
    item_bytes = rows.element_size()
    if not num_rows or width * item_bytes % 16 or other_width * item_bytes % 16:
        return False
    if is_on_cpu(rows):
        return rows.dtype is torch.float32
    return rows.dtype is torch.bfloat16
