"""A mixture of experts, one expert after another: token-choice top-k (arXiv 1701.06538), shared
experts (DeepSeekMoE, arXiv 2401.06066), sigmoid scores, the bias by which experts are chosen and
the loss that balances each sequence (DeepSeek-V3, arXiv 2412.19437, section 2.1.2; arXiv
2408.15664), and a capacity (GShard, arXiv 2006.16668, section 2.2).

Shape suffixes: B batch, T sequence, D model width, E experts, K experts per token.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from phalanx.verify.plain.layers import Tensors, apply_activation, feed_forward
from phalanx.verify.plain.settings import PlainSettings


class ExpertOutput(NamedTuple):
    """output_BTD; balance: the auxiliary loss, summed over sequences, each times its tokens;
    counts_E: the tokens that chose each expert, dropped ones among them."""

    output_BTD: torch.Tensor
    balance: torch.Tensor
    counts_E: torch.Tensor


def apply_mixture_of_experts(
    settings: PlainSettings, parameters: Tensors, buffers: Tensors, name: str, x_BTD: torch.Tensor
) -> ExpertOutput:
    scores_BTE = compute_router_scores(settings, parameters[f"{name}.router.weight"], x_BTD)
    chosen_by = scores_BTE.detach()
    if settings.balance_bias > 0:
        chosen_by = chosen_by + buffers[f"{name}.router.bias"]
    best_BTK = chosen_by.topk(settings.experts_per_token, dim=-1).indices
    experts_E = torch.arange(settings.num_experts, device=x_BTD.device)
    chosen_BTE = (best_BTK[..., None] == experts_E).any(dim=2)

    weights_BTE = scores_BTE * chosen_BTE
    if settings.router_normalize:
        weights_BTE = weights_BTE / weights_BTE.sum(-1, keepdim=True)
    weights_BTE = weights_BTE * settings.router_scale * _is_within_capacity(settings, chosen_BTE)

    output_BTD = torch.zeros_like(x_BTD)
    for expert in range(settings.num_experts):
        made_BTD = _run_expert(settings, parameters, f"{name}.experts", expert, x_BTD)
        output_BTD = output_BTD + weights_BTE[..., expert, None].to(x_BTD.dtype) * made_BTD
    if settings.num_shared_experts > 0:
        output_BTD = output_BTD + feed_forward(settings, parameters, f"{name}.shared", x_BTD)
    balance = _compute_balance_loss(settings, scores_BTE, chosen_BTE)
    return ExpertOutput(output_BTD, balance, chosen_BTE.sum((0, 1)))


def update_router_bias(
    settings: PlainSettings, bias_E: torch.Tensor, counts_E: torch.Tensor
) -> torch.Tensor:
    """The bias after a step whose tokens chose experts `counts_E` times (arXiv 2408.15664,
    algorithm 1): more for those with less than the mean."""
    counts_E = counts_E.to(torch.float64)
    error_E = counts_E.mean() - counts_E
    return bias_E + settings.balance_bias * torch.sign(error_E).to(bias_E.dtype)


def weigh_chosen_experts(
    settings: PlainSettings, scores_BTE: torch.Tensor, chosen_BTK: torch.Tensor
) -> torch.Tensor:
    """[B, T, K]: the factors of the outputs of the experts `chosen_BTK`, each of which has room."""
    weights_BTK = torch.take_along_dim(scores_BTE, chosen_BTK, dim=-1)
    if settings.router_normalize:
        weights_BTK = weights_BTK / weights_BTK.sum(-1, keepdim=True)
    return weights_BTK * settings.router_scale


def compute_router_scores(
    settings: PlainSettings, weight: torch.Tensor, x_BTD: torch.Tensor
) -> torch.Tensor:
    """[B, T, E], in fp32 at least."""
    wide = torch.promote_types(x_BTD.dtype, torch.float32)
    logits_BTE = torch.einsum("btd,ed->bte", x_BTD.to(wide), weight.to(wide))
    if settings.router_scores == "sigmoid":
        return torch.sigmoid(logits_BTE)
    return torch.softmax(logits_BTE, dim=-1)


def _is_within_capacity(settings: PlainSettings, chosen_BTE: torch.Tensor) -> torch.Tensor:
    """[B, T, E], 1 or 0: an expert takes the first of a sequence's tokens that chose it, up to its
    even share times the capacity factor, and at least one."""
    if settings.expert_capacity == 0:
        return torch.ones_like(chosen_BTE)
    batch_size, num_tokens, num_experts = chosen_BTE.shape
    room = _compute_room(
        settings.expert_capacity, num_tokens, settings.experts_per_token, num_experts
    )
    has_room = torch.zeros_like(chosen_BTE)
    for row in range(batch_size):
        num_taken = [0] * num_experts
        for token in range(num_tokens):
            for expert in chosen_BTE[row, token].nonzero().flatten().tolist():
                has_room[row, token, expert] = num_taken[expert] < room
                num_taken[expert] += 1
    return has_room


def _compute_room(capacity: float, num_tokens: int, per_token: int, num_experts: int) -> int:
    """Tokens of a sequence that an expert takes."""
    # A product that is whole but for its last bits is that whole number.
    return max(1, math.ceil(capacity * num_tokens * per_token / num_experts - 1e-6))


def count_dropped_choices(chosen_BTK: torch.Tensor, num_experts: int, capacity: float) -> int:
    """How many of the choices `chosen_BTK`, numbers of experts, come after those that these have
    room for; with a capacity of 0 they have room for all."""
    if capacity == 0:
        return 0
    _, num_tokens, per_token = chosen_BTK.shape
    room = _compute_room(capacity, num_tokens, per_token, num_experts)
    counts_BE = [row.flatten().bincount(minlength=num_experts) for row in chosen_BTK]
    return sum(int((counts_E - room).clamp(min=0).sum()) for counts_E in counts_BE)


def _run_expert(
    settings: PlainSettings, parameters: Tensors, name: str, expert: int, x_BTD: torch.Tensor
) -> torch.Tensor:
    """The output that one expert would have for each token. Experts have no biases."""
    up = torch.einsum("btd,fd->btf", x_BTD, parameters[f"{name}.up.weight"][expert])
    inner = apply_activation(settings.activation, up)
    if settings.activation in ("swiglu", "geglu", "geglu_tanh"):
        gate = torch.einsum("btd,fd->btf", x_BTD, parameters[f"{name}.gate.weight"][expert])
        inner = apply_activation(settings.activation, gate) * up
    return torch.einsum("btf,df->btd", inner, parameters[f"{name}.down.weight"][expert])


def _compute_balance_loss(
    settings: PlainSettings, scores_BTE: torch.Tensor, chosen_BTE: torch.Tensor
) -> torch.Tensor:
    """Equations 17 to 20 of DeepSeek-V3, per sequence, times its tokens: losses are summed over
    tokens here, and averaged by who trains."""
    num_tokens = chosen_BTE.shape[1]
    spread = settings.num_experts / (settings.experts_per_token * num_tokens)
    f_BE = spread * chosen_BTE.sum(1).to(scores_BTE.dtype)
    p_BE = (scores_BTE / scores_BTE.sum(-1, keepdim=True)).mean(1)
    return settings.balance_loss * num_tokens * (f_BE * p_BE).sum()
