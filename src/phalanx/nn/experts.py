"""A mixture of experts in place of a block's feed-forward: a router, and matrices that see the tokens sent to them.

Shape suffixes: B batch, T sequence, D model width, N tokens, K experts per token, E experts, R rows: (token, expert).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from phalanx.job.shape import ModelShape
from phalanx.nn.feed_forward import ACTIVATIONS, FeedForward
from phalanx.nn.grouped import GroupedLinear
from phalanx.nn.routing import Balance, Router

Rows = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Dispatch(Protocol):
    """The seam that expert parallelism swaps: brings rows to their experts and back."""

    def __call__(self, x_RD: torch.Tensor, counts_E: torch.Tensor, experts: Rows) -> torch.Tensor:
        """x_RD: rows sorted by expert, counts_E of each. Returns what `experts(rows, counts)` makes of each row, in
        the same order."""


def dispatch_here(x_RD: torch.Tensor, counts_E: torch.Tensor, experts: Rows) -> torch.Tensor:
    """All experts are on this rank."""
    return experts(x_RD, counts_E)


class Experts(nn.Module):
    """Feed-forwards of the experts that a rank holds, as one product each: gate and up [E, F, D], down [E, D, F]."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        count, width = shape.num_experts, shape.expert_ffn_dim
        self.activation = ACTIVATIONS[shape.activation]
        self.gate = GroupedLinear(count, shape.dim, width) if shape.is_gated else None
        self.up = GroupedLinear(count, shape.dim, width)
        self.down = GroupedLinear(count, width, shape.dim)

    def forward(self, x_RD: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        if self.gate is None:
            return self.down(self.activation(self.up(x_RD, counts_E)), counts_E)
        return self.down(self.activation(self.gate(x_RD, counts_E)) * self.up(x_RD, counts_E), counts_E)


class MixtureOfExperts(nn.Module):
    """Each token visits `experts_per_token` experts, and those that all share. What it puts out under tensor
    parallelism are parts of a sum: no matrix inside adds up over ranks."""

    def __init__(self, shape: ModelShape, balance: Balance) -> None:
        super().__init__()
        self.router = Router(shape, balance)
        self.experts = Experts(shape)
        shared = replace(shape, ffn_dim=shape.num_shared_experts * shape.expert_ffn_dim)
        self.shared = FeedForward(shared) if shape.num_shared_experts else None
        self.dispatch: Dispatch = dispatch_here

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        routing = self.router(x_BTD)
        x_ND, per_token = x_BTD.flatten(0, 1), self.router.per_token
        expert_R = routing.experts_BTK.flatten()
        weight_R = routing.weights_BTK.flatten()
        token_R = torch.arange(len(x_ND), device=x_BTD.device).repeat_interleave(per_token)
        if routing.kept_BTK is not None:
            kept = routing.kept_BTK.flatten().nonzero().squeeze(1)
            expert_R, weight_R, token_R = expert_R[kept], weight_R[kept], token_R[kept]
        order = expert_R.argsort(stable=True)
        token_R = token_R[order]
        counts_E = torch.zeros(self.router.num_experts, dtype=torch.int64, device=x_BTD.device)
        counts_E.scatter_add_(0, expert_R, torch.ones_like(expert_R))
        out_RD = self.dispatch(x_ND.index_select(0, token_R), counts_E, self.experts)
        out_ND: torch.Tensor = _WeightedSum.apply(out_RD, weight_R[order], token_R, len(x_ND))
        out_BTD = out_ND.view_as(x_BTD)
        return out_BTD if self.shared is None else out_BTD + self.shared(x_BTD)


class _WeightedSum(torch.autograd.Function):
    """Rows times their weights, added up by token. As one function, because index_add would keep the weighted rows."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, row_RD: torch.Tensor, weight_R: torch.Tensor, token_R: torch.Tensor, num_tokens: int
    ) -> torch.Tensor:
        ctx.save_for_backward(row_RD, weight_R, token_R)
        out_ND = row_RD.new_zeros(num_tokens, row_RD.shape[1])
        return out_ND.index_add_(0, token_R, row_RD * weight_R[:, None].to(row_RD.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: torch.Tensor) -> Any:  # type: ignore[override]
        row_RD, weight_R, token_R = ctx.saved_tensors
        grad_RD = grad_ND.index_select(0, token_R)
        of_weight = (grad_RD * row_RD).sum(-1).to(weight_R.dtype)
        return grad_RD * weight_R[:, None].to(grad_RD.dtype), of_weight, None, None
