"""Which experts a token visits: token-choice top-k, with what keeps experts busy alike.

All that is counted is counted per sequence or over the whole batch of a step, never per microbatch
or rank: the layout does not change it. Shape suffixes: B batch, T sequence, D model width, E
experts, K experts per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from phalanx.job.shapes.decoder import DecoderShape


class Routing(NamedTuple):
    """experts_BTK: numbers of the experts; weights_BTK: what their outputs are multiplied by;
    kept_BTK: False where an expert was full, None where none can be."""

    experts_BTK: torch.Tensor
    weights_BTK: torch.Tensor
    kept_BTK: torch.Tensor | None


class SequenceCounts(Protocol):
    """The counts that a rank needs of those tokens of its sequences that other ranks hold."""

    def total(self, counts_BE: torch.Tensor) -> torch.Tensor:
        """The counts of whole sequences, from those of this rank's tokens."""

    def earlier(self, chosen_BTE: torch.Tensor) -> torch.Tensor:
        """The number, for each token and expert, of earlier tokens of the whole sequence that chose
        it; `chosen_BTE` is 0 or 1."""

    def length(self, num_tokens: int) -> int:
        """The length of the whole sequences of which this rank has `num_tokens` each."""


class ExpertChooser(Protocol):
    """The seam at which experts are chosen."""

    def __call__(self, scores_BTE: torch.Tensor, per_token: int) -> torch.Tensor:
        """Scores with the bias, without a gradient -> [B, T, K], numbers of experts."""


def choose_top_experts(scores_BTE: torch.Tensor, per_token: int) -> torch.Tensor:
    return scores_BTE.topk(per_token, dim=-1).indices


class WholeSequenceCounts:
    """A rank has all tokens of its sequences."""

    def total(self, counts_BE: torch.Tensor) -> torch.Tensor:
        return counts_BE

    def earlier(self, chosen_BTE: torch.Tensor) -> torch.Tensor:
        return chosen_BTE.cumsum(1) - chosen_BTE

    def length(self, num_tokens: int) -> int:
        return num_tokens


# A balance loss is a gradient, and not a number that travels: it is linear in the shares of the
# scores once choices are counted, so each router adds its part in its own backward, and needs only
# this weight from outside. The objective's backward runs first and tells it, so a bare loop is
# right without knowing. Stages of a pipeline hand on one tensor: there `forward_backward` tells it
# beforehand. A loop that does neither is an error.
@dataclass
class ExpertBalance:
    """Shared by the routers of a model: the weight that their balance loss has in the gradients
    of a step."""

    scale: torch.Tensor | float | None = None
    """d(what backward is called on) / d(loss_sum).

    Set before gradients reach the blocks: by the objective, or by who knows it beforehand.
    """

    def get_gradient_scale(self) -> torch.Tensor | float:
        if self.scale is None:
            raise RuntimeError(
                "the balance loss has no weight: wrap the objective's loss_sum in"
                " outputs.balance.with_loss"
            )
        return self.scale

    def with_loss(self, loss_sum: torch.Tensor) -> torch.Tensor:
        """`loss_sum` as it is; its backward tells the routers the gradient that it gets."""
        if not loss_sum.requires_grad:
            return loss_sum
        recorded: torch.Tensor = _RecordLossGradient.apply(loss_sum, self)
        return recorded


@dataclass
class RouterLoad:
    """The load of one router's experts since `take`: counted in the backward, once however
    often a block is computed, and not at all in an evaluation."""

    counts_E: torch.Tensor | None = None
    dropped: torch.Tensor | None = None

    def add(self, counts_E: torch.Tensor, dropped: torch.Tensor) -> None:
        if self.counts_E is not None and self.dropped is not None:
            counts_E, dropped = self.counts_E + counts_E, self.dropped + dropped
        self.counts_E, self.dropped = counts_E, dropped

    def take(self, num_experts: int, device: torch.device) -> torch.Tensor:
        """[E + 1], fp64: tokens that chose each expert, and how many choices were dropped."""
        counts, dropped = self.counts_E, self.dropped
        self.counts_E = self.dropped = None
        if counts is None or dropped is None:
            return torch.zeros(num_experts + 1, dtype=torch.float64, device=device)
        return torch.cat((counts, dropped[None])).to(torch.float64)


class Router(nn.Module):
    """Scores of all experts for each token, and the best K of them.

    Scores are softmax over experts, or sigmoid (DeepSeek-V3, arXiv 2412.19437). With `balance_bias`
    a bias that no gradient changes is added where experts are chosen, and not to what their outputs
    are multiplied by; after each step it falls for experts that got more than their share of the
    step's tokens, and rises for others (arXiv 2408.15664). With `balance_loss` gradients are those
    of the loss plus, for each sequence s of T tokens, balance_loss * T * sum over e of f_e * P_e:
    f_e is E / (K T) times the tokens that chose e, P_e the mean over tokens of e's share of the
    scores (arXiv 2412.19437, 2.1.2). Targets that are masked change nothing of it.
    """

    def __init__(self, shape: DecoderShape, balance: ExpertBalance) -> None:
        super().__init__()
        self.num_experts, self.per_token = shape.num_experts, shape.experts_per_token
        self.scores, self.normalize, self.scale = (
            shape.router_scores,
            shape.router_normalize,
            shape.router_scale,
        )
        self.capacity_factor, self.loss_weight, self.bias_rate = (
            shape.expert_capacity,
            shape.balance_loss,
            shape.balance_bias,
        )
        self.weight = nn.Parameter(torch.empty(shape.num_experts, shape.dim))
        self.bias: torch.Tensor | None
        # Alike on all ranks without being sent: each moves the bias by the same counts.
        self.buffers_are_alike = True
        self.register_buffer("bias", torch.zeros(shape.num_experts) if shape.balance_bias else None)
        self.balance, self.load = balance, RouterLoad()
        self.sequences: SequenceCounts = WholeSequenceCounts()
        self.choose: ExpertChooser = choose_top_experts
        # Ranks that route the same tokens alike, and whose gradients are added up.
        self.num_alike = 1

    def forward(self, x_BTD: torch.Tensor) -> Routing:
        """Scores are computed in fp32 at least, whatever the type of the rest."""
        wide = torch.promote_types(x_BTD.dtype, torch.float32)
        # Autocast would compute the scores in the narrow type again.
        with torch.autocast(x_BTD.device.type, enabled=False):
            logits_BTE = F.linear(x_BTD.to(wide), self.weight.to(wide))
            if self.scores == "softmax":
                scores_BTE = logits_BTE.softmax(-1)
            else:
                scores_BTE = logits_BTE.sigmoid()
            # The bias decides who is chosen, and not how much it counts.
            chosen_by = scores_BTE.detach()
            if self.bias is not None:
                chosen_by = chosen_by + self.bias
            experts_BTK = self.choose(chosen_by, self.per_token)
            chosen_BTE = torch.zeros_like(scores_BTE, dtype=torch.int64).scatter_(
                -1, experts_BTK, 1
            )
            kept_BTK = self._mark_choices_within_capacity(chosen_BTE, experts_BTK)
            if torch.is_grad_enabled() and scores_BTE.requires_grad:
                scores_BTE = self._add_balance_loss_gradient(scores_BTE, chosen_BTE, kept_BTK)
            weights_BTK = scores_BTE.gather(-1, experts_BTK)
            if self.normalize:
                weights_BTK = weights_BTK / weights_BTK.sum(-1, keepdim=True)
            return Routing(experts_BTK, weights_BTK * self.scale, kept_BTK)

    @torch.no_grad()
    def move_bias(self, counts_E: torch.Tensor) -> None:
        """After a step in which `counts_E` tokens chose each expert, over all ranks."""
        if self.bias is not None:
            self.bias += self.bias_rate * torch.sign(counts_E.mean() - counts_E).to(self.bias.dtype)

    def _mark_choices_within_capacity(
        self, chosen_BTE: torch.Tensor, experts_BTK: torch.Tensor
    ) -> torch.Tensor | None:
        """True for the first tokens of each sequence that chose an expert, up to its capacity; None
        without a capacity."""
        if not self.capacity_factor:
            return None
        room = compute_expert_capacity(
            self.sequences.length(chosen_BTE.shape[1]),
            self.per_token,
            self.num_experts,
            self.capacity_factor,
        )
        return (self.sequences.earlier(chosen_BTE) < room).gather(-1, experts_BTK)

    def _add_balance_loss_gradient(
        self, scores_BTE: torch.Tensor, chosen_BTE: torch.Tensor, kept_BTK: torch.Tensor | None
    ) -> torch.Tensor:
        dropped = chosen_BTE.new_zeros(())
        if kept_BTK is not None:
            dropped = (~kept_BTK).sum()
        counts_BE, weights_BE = chosen_BTE.sum(1), None
        if self.loss_weight:
            length = self.sequences.length(chosen_BTE.shape[1])
            counts = self.sequences.total(counts_BE).to(scores_BTE.dtype)
            # The derivative by one token's share: balance_loss * T * f_e / T, for P_e is a mean
            # over T tokens.
            weights_BE = counts * (
                self.loss_weight / self.num_alike * self.num_experts / (self.per_token * length)
            )
        shares_BTE = scores_BTE
        # Of a softmax they add up to 1 already.
        if self.scores != "softmax":
            shares_BTE = scores_BTE / scores_BTE.sum(-1, keepdim=True)
        balanced: torch.Tensor = _AddBalanceGradient.apply(
            scores_BTE, shares_BTE, weights_BE, counts_BE.sum(0), dropped, self
        )
        return balanced


def compute_expert_capacity(
    num_tokens: int, per_token: int, num_experts: int, factor: float
) -> int:
    """Tokens of one sequence that an expert takes: `factor` times its even share, at least 1."""
    # Rounded first: a product that is whole but for its last bits is not one more.
    return max(1, math.ceil(round(factor * num_tokens * per_token / num_experts, 6)))


class _RecordLossGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss_sum: torch.Tensor, balance: ExpertBalance) -> torch.Tensor:  # type: ignore[override]
        ctx.balance = balance
        # A copy of one number, and not a view: FSDP hooks no views.
        return loss_sum.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.balance.scale = grad
        return grad, None


class _AddBalanceGradient(torch.autograd.Function):
    """Scores as they are.

    Their backward adds the gradient of the balance loss to that of the shares, and counts.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        scores_BTE: torch.Tensor,
        shares_BTE: torch.Tensor,
        weights_BE: torch.Tensor | None,
        counts_E: torch.Tensor,
        dropped: torch.Tensor,
        router: Router,
    ) -> torch.Tensor:
        ctx.save_for_backward(weights_BE, counts_E, dropped)
        ctx.router, ctx.shape = router, shares_BTE.shape
        return scores_BTE.view_as(scores_BTE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTE: torch.Tensor) -> Any:  # type: ignore[override]
        weights_BE, counts_E, dropped = ctx.saved_tensors
        ctx.router.load.add(counts_E, dropped)
        if weights_BE is None:
            return grad_BTE, None, None, None, None, None
        scale = ctx.router.balance.get_gradient_scale()
        return (
            grad_BTE,
            (weights_BE[:, None] * scale).to(grad_BTE.dtype).expand(ctx.shape),
            None,
            None,
            None,
            None,
        )
