"""torch's attention kernels that say their log-sum-exp, so that attention can be computed in parts.

Shape suffixes: B batch, H query heads, T queries, S keys, E head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from phalanx.mesh.attend import CUDA_FLASH_DTYPES, MAX_CUDA_FLASH_HEAD_DIM


class AttentionKernel(Protocol):
    """Softmax attention of one block that also says its log-sum-exp [B, H, T], and its gradients
    when `out` and `lse` are those over all blocks.

    `mask`: [B or 1, 1, T, S], added to the scores. Heads of keys are those of queries, or with
    `can_kernel_use_fewer_key_heads` as many as there are.
    """

    takes_groups: bool

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


class CpuFlashAttentionKernel:
    """torch's flash attention for the CPU: fp64, fp32, bf16, fp16."""

    takes_groups = True

    def forward(self, q, k, v, mask, is_causal):  # type: ignore[no-untyped-def]
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = op(q, k, v, 0.0, is_causal, attn_mask=mask)
        return out, lse

    def backward(self, grad, q, k, v, out, lse, mask, is_causal):  # type: ignore[no-untyped-def]
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return op(grad, q, k, v, out, lse, 0.0, is_causal, attn_mask=mask)


class UnfusedAttentionKernel:
    """Matrix products and a softmax: any device and type; scores are whole in memory."""

    takes_groups = False

    def forward(self, q, k, v, mask, is_causal):  # type: ignore[no-untyped-def]
        scores = _compute_masked_scores(q, k, mask, is_causal)
        lse = scores.logsumexp(-1)
        return (scores - lse.unsqueeze(-1)).exp().to(v.dtype) @ v, lse

    def backward(self, grad, q, k, v, out, lse, mask, is_causal):  # type: ignore[no-untyped-def]
        weights = (_compute_masked_scores(q, k, mask, is_causal) - lse.unsqueeze(-1)).exp()
        # `out` is that over all blocks, and so these are sums over whole rows of the softmax.
        # The gradient of a row's scores is P * (dP - sum(P * dP)), and that sum is dO . O (arXiv
        # 2205.14135).
        row_sums = (grad.to(weights.dtype) * out.to(weights.dtype)).sum(-1, keepdim=True)
        grad_scores = weights * ((grad @ v.mT).to(weights.dtype) - row_sums) * q.shape[-1] ** -0.5
        grad_scores = grad_scores.to(q.dtype)
        return grad_scores @ k, grad_scores.mT @ q, weights.to(grad.dtype).mT @ grad


def _compute_masked_scores(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, is_causal: bool
) -> torch.Tensor:
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * q.shape[-1] ** -0.5
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    if mask is None:
        return scores
    return scores + mask


class CudaFlashAttentionKernel:
    """torch's flash attention for CUDA: bf16 and fp16, no mask but the causal one, heads of
    multiples of 8."""

    takes_groups = True

    def forward(self, q, k, v, mask, is_causal):  # type: ignore[no-untyped-def]
        op = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse, *_ = op(q, k, v, 0.0, is_causal)
        return out, lse

    def backward(self, grad, q, k, v, out, lse, mask, is_causal):  # type: ignore[no-untyped-def]
        op = torch.ops.aten._scaled_dot_product_flash_attention_backward
        # Seed and offset of a dropout that there is not.
        none = torch.zeros((), dtype=torch.int64)
        lengths = q.shape[2], k.shape[2]
        return op(
            grad, q, k, v, out, lse.contiguous(), None, None, *lengths, 0.0, is_causal, none, none
        )


class CudaMemoryEfficientAttentionKernel:
    """torch's memory-efficient attention for CUDA, which takes masks and says its log-sum-exp:
    fp32, bf16, fp16."""

    takes_groups = False

    def forward(self, q, k, v, mask, is_causal):  # type: ignore[no-untyped-def]
        op = torch.ops.aten._scaled_dot_product_efficient_attention
        # True: without it the kernel leaves the log-sum-exp empty.
        out, lse, _, _ = op(q, k, v, _expand_and_align_mask(mask, q, k), True, 0.0, is_causal)
        return out, lse[..., : q.shape[2]]

    def backward(self, grad, q, k, v, out, lse, mask, is_causal):  # type: ignore[no-untyped-def]
        op = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        # The forward's log-sum-exp has rows of multiples of 32, and the backward wants them so.
        # It fills them with infinity: exp(score - inf) = 0, so that they add nothing.
        padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
        # Seed and offset of a dropout that there is not.
        none = torch.zeros((), dtype=torch.int64)
        needs_grad = [True, True, True, False]
        grads = op(
            grad,
            q,
            k,
            v,
            _expand_and_align_mask(mask, q, k),
            out,
            padded,
            none,
            none,
            0.0,
            needs_grad,
            is_causal,
        )
        return grads[:3]


def _expand_and_align_mask(
    mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor
) -> torch.Tensor | None:
    """The mask for every head, in rows that begin at multiples of 8 elements, as the kernel
    wants them."""
    if mask is None:
        return None
    if k.shape[2] % 8:
        room = mask.new_zeros(*mask.shape[:-1], -(-k.shape[2] // 8) * 8)
        room[..., : k.shape[2]] = mask
        mask = room[..., : k.shape[2]]
    return mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


PLAIN, CPU_FLASH, CUDA_FLASH, CUDA_EFFICIENT = (
    UnfusedAttentionKernel(),
    CpuFlashAttentionKernel(),
    CudaFlashAttentionKernel(),
    CudaMemoryEfficientAttentionKernel(),
)


_is_unfused_alone = False


@contextmanager
def using_unfused_attention_alone() -> Iterator[None]:
    """Inside, blocks are computed by the kernel that fits any device, in all threads of this
    process: a machine judges what others than it would run, and keys are repeated for the queries
    that share them."""
    # A variable of the process and not of the context: backwards run in threads of autograd.
    global _is_unfused_alone
    before, _is_unfused_alone = _is_unfused_alone, True
    try:
        yield
    finally:
        _is_unfused_alone = before


def choose_attention_kernel(q: torch.Tensor, mask: torch.Tensor | None) -> AttentionKernel:
    """The kernel that computes a block of these queries. The one place that knows devices."""
    if _is_unfused_alone:
        return PLAIN
    width = q.shape[-1]
    table: tuple[tuple[bool, AttentionKernel], ...] = (
        (q.device.type == "cpu", CPU_FLASH),
        (q.device.type != "cuda" or q.dtype is torch.float64, PLAIN),
        (
            q.dtype in CUDA_FLASH_DTYPES
            and mask is None
            and width % 8 == 0
            and width <= MAX_CUDA_FLASH_HEAD_DIM,
            CUDA_FLASH,
        ),
        (width % 8 == 0, CUDA_EFFICIENT),
        (True, PLAIN),
    )
    return next(kernel for fits, kernel in table if fits)
