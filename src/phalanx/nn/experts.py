"""A mixture of experts in place of a block's feed-forward: a router, and matrices that see the
tokens sent to them.

Shape suffixes: B batch, T sequence, D model width, N tokens, K experts per token, E experts, R
rows: (token, expert).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from phalanx.job.shapes.decoder import DecoderShape
from phalanx.mesh.grouped import read_group_sizes_once
from phalanx.nn.feed_forward import ACTIVATION_FUNCTIONS, FeedForward
from phalanx.nn.grouped import GroupedLinear
from phalanx.nn.routing import ExpertBalance, Router

Rows = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Dispatch(Protocol):
    """The seam that expert parallelism swaps: brings rows to their experts and back."""

    def __call__(self, x_RD: torch.Tensor, counts_E: torch.Tensor, experts: Rows) -> torch.Tensor:
        """x_RD: rows sorted by expert, counts_E of each.

        Returns what `experts(rows, counts)` makes of each row, in the same order.
        """


def dispatch_without_communication(
    x_RD: torch.Tensor, counts_E: torch.Tensor, experts: Rows
) -> torch.Tensor:
    """All experts are on this rank."""
    return experts(x_RD, counts_E)


# One tensor per matrix: one grouped product in place of many, one cut along the first dimension for
# ep, another along features for tp, and FSDP over what is left. Checkpoints hold the same names at
# any ep.
class Experts(nn.Module):
    """Feed-forwards of the experts that a rank holds, as one product each: gate and up [E, F,
    D], down [E, D, F]."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        count, width = shape.num_experts, shape.expert_ffn_dim
        self.activation = ACTIVATION_FUNCTIONS[shape.activation]
        self.gate = GroupedLinear(count, shape.dim, width) if shape.is_gated else None
        self.up = GroupedLinear(count, shape.dim, width)
        self.down = GroupedLinear(count, width, shape.dim)

    def forward(self, x_RD: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        if self.gate is None:
            return self.down(self.activation(self.up(x_RD, counts_E)), counts_E)
        return self.down(
            self.activation(self.gate(x_RD, counts_E)) * self.up(x_RD, counts_E), counts_E
        )


class MixtureOfExperts(nn.Module):
    """Each token visits `experts_per_token` experts, and those that all share.

    What it puts out under tensor parallelism are parts of a sum: no matrix inside adds up over
    ranks.
    """

    def __init__(self, shape: DecoderShape, balance: ExpertBalance) -> None:
        super().__init__()
        self.router = Router(shape, balance)
        self.experts = Experts(shape)
        shared = replace(shape, ffn_dim=shape.num_shared_experts * shape.expert_ffn_dim)
        self.shared = FeedForward(shared) if shape.num_shared_experts else None
        self.dispatch: Dispatch = dispatch_without_communication

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        routing = self.router(x_BTD)
        x_ND, num_experts = x_BTD.flatten(0, 1), self.router.num_experts
        expert_R = routing.experts_BTK.flatten()
        drops = routing.kept_BTK is not None
        # What an expert has no room for stands behind all rows.
        if routing.kept_BTK is not None:
            expert_R = expert_R.where(routing.kept_BTK.flatten(), num_experts)
        # Stable, so that an expert's rows are in the tokens' order on every device.
        order = expert_R.argsort(stable=True)
        # One count more for the dropped choices, which no expert sees.
        counts_E = torch.zeros(num_experts + drops, dtype=torch.int64, device=x_BTD.device)
        counts_E = counts_E.scatter_add_(0, expert_R, torch.ones_like(expert_R))[:num_experts]
        num_rows = len(order)
        if drops:
            num_rows = sum(read_group_sizes_once(counts_E, num_rows))
        rows = _TokenRowIndices.build_from_order(order, num_rows, len(x_ND))
        weight_R = routing.weights_BTK.flatten()[rows.order]
        out_RD = self.dispatch(
            _GatherTokenRows.apply(x_ND, rows.token_R, rows.row_KN), counts_E, self.experts
        )
        out_ND: torch.Tensor = _WeightedSumByToken.apply(out_RD, weight_R, rows.order, rows.row_KN)
        out_BTD = out_ND.view_as(x_BTD)
        if self.shared is None:
            return out_BTD
        return out_BTD + self.shared(x_BTD)


class _TokenRowIndices(NamedTuple):
    """The rows of each token, and the token of each row.

    order: [R], the choice, of all N x K, that each row is of; token_R: its token; row_KN: of each
    token its rows, ascending, R or more where one was dropped.
    """

    order: torch.Tensor
    token_R: torch.Tensor
    row_KN: torch.Tensor

    @classmethod
    def build_from_order(
        cls, order: torch.Tensor, num_rows: int, num_tokens: int
    ) -> _TokenRowIndices:
        """`order`: the choices, of which the first `num_rows` have a row."""
        per_token = len(order) // max(1, num_tokens)
        row = torch.empty_like(order).scatter_(
            0, order, torch.arange(len(order), device=order.device)
        )
        # By choice first: `_sum_rows_by_token` adds one row of each token at a time.
        row_KN = row.view(num_tokens, per_token).sort(dim=1).values.T.contiguous()
        order = order[:num_rows]
        return cls(order, order.div(per_token, rounding_mode="floor"), row_KN)


def _sum_rows_by_token(
    row_RD: torch.Tensor, row_KN: torch.Tensor, weight_R: torch.Tensor | None = None
) -> torch.Tensor:
    """[N, D]: the rows of each token, times their weights if there are any, one after another in
    their order: where threads of a device add to one place, as in index_add, the order and so the
    sum would be another each time."""
    num_rows, is_full = len(row_RD), len(row_RD) < row_KN.numel()
    # In half precision the sum is rounded once, and not after each row.
    wide = torch.promote_types(row_RD.dtype, torch.float32)
    out_ND = row_RD.new_zeros(row_KN.shape[1], row_RD.shape[1], dtype=wide)
    if num_rows == 0:
        return out_ND.to(row_RD.dtype)
    for row_N in row_KN:
        at = row_N
        # Where a choice was dropped any row is taken, and then nothing of it.
        if is_full:
            at = row_N.clamp(max=num_rows - 1)
        part_ND = row_RD.index_select(0, at)
        if weight_R is not None:
            part_ND = part_ND.mul_(weight_R.index_select(0, at)[:, None].to(part_ND.dtype))
        if is_full:
            part_ND = part_ND.masked_fill_((row_N >= num_rows)[:, None], 0)
        out_ND += part_ND
    return out_ND.to(row_RD.dtype)


class _GatherTokenRows(torch.autograd.Function):
    """Tokens [N, D] -> rows [R, D]."""

    @staticmethod
    def forward(
        ctx: Any, x_ND: torch.Tensor, token_R: torch.Tensor, row_KN: torch.Tensor
    ) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(row_KN)
        return x_ND.index_select(0, token_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: torch.Tensor) -> Any:  # type: ignore[override]
        (row_KN,) = ctx.saved_tensors
        return _sum_rows_by_token(grad_RD, row_KN), None, None


class _WeightedSumByToken(torch.autograd.Function):
    """Rows times their weights, added up by token.

    As one function, because autograd would keep the weighted rows.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        row_RD: torch.Tensor,
        weight_R: torch.Tensor,
        order: torch.Tensor,
        row_KN: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(row_RD, weight_R, order)
        ctx.per_token = len(row_KN)
        return _sum_rows_by_token(row_RD, row_KN, weight_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: torch.Tensor) -> Any:  # type: ignore[override]
        row_RD, weight_R, order = ctx.saved_tensors
        # Choice c is one of token c // K.
        grad_RD = grad_ND.index_select(0, order.div(ctx.per_token, rounding_mode="floor"))
        of_weight = (grad_RD * row_RD).sum(-1).to(weight_R.dtype)
        return grad_RD * weight_R[:, None].to(grad_RD.dtype), of_weight, None, None
