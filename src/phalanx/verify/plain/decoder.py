"""A decoder, and its cross-entropy: pre-norm blocks as in GPT-2 (Radford et al. 2019) and Llama
(arXiv 2302.13971), with Gemma 3's norms after (arXiv 2503.19786) and experts where settings say so.

Shape suffixes: B batch, T sequence, D model width, V vocabulary, E experts.
"""

from __future__ import annotations

import math

import torch

from phalanx.verify.plain.attention import attention, make_visibility_mask
from phalanx.verify.plain.experts import apply_mixture_of_experts, update_router_bias
from phalanx.verify.plain.layers import Tensors, feed_forward, residual_stream_norm
from phalanx.verify.plain.rotary import compute_rotation_angles
from phalanx.verify.plain.settings import PlainSettings

# A target that counts for nothing: the default of torch's cross_entropy.
NO_TARGET = -100


def compute_plain_loss(
    settings: PlainSettings, parameters: Tensors, buffers: Tensors, batch: Tensors
) -> tuple[torch.Tensor, int]:
    """The cross-entropy summed over the batch's targets, and their number.

    batch: inputs, targets [B, T], and positions and document_ids [B, T] if it has them. Gradients
    are those of the sum and the routers' balance loss; the number is of the targets' losses alone,
    which is what training reports.
    """
    hidden_BTD, balance, _ = _run_decoder_blocks(settings, parameters, buffers, batch)
    head_VD = parameters["embed.weight" if settings.tie_embeddings else "head.weight"]
    logits_BTV = torch.einsum("btd,vd->btv", hidden_BTD, head_VD)
    wide = torch.promote_types(logits_BTV.dtype, torch.float32)
    log_probs_BTV = logits_BTV.to(wide).log_softmax(-1)
    has_target = batch["targets"] != NO_TARGET
    losses = -log_probs_BTV[has_target].gather(-1, batch["targets"][has_target][:, None])
    loss = losses.sum() + (balance - balance.detach())
    return loss, int(has_target.sum())


@torch.no_grad()
def compute_updated_router_biases(
    settings: PlainSettings, parameters: Tensors, buffers: Tensors, batch: Tensors
) -> dict[str, torch.Tensor]:
    """The routers' biases after a step on the whole of `batch`, by their names in `buffers`."""
    _, _, counts = _run_decoder_blocks(settings, parameters, buffers, batch)
    moved: dict[str, torch.Tensor] = {}
    if settings.balance_bias > 0:
        for block, counts_E in counts.items():
            name = f"{block}.moe.router.bias"
            moved[name] = update_router_bias(settings, buffers[name], counts_E)
    return moved


def _run_decoder_blocks(
    settings: PlainSettings, parameters: Tensors, buffers: Tensors, batch: Tensors
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Hidden states after the last norm, the balance loss, and by block what experts got."""
    inputs = batch["inputs"]
    positions = batch.get("positions")
    if positions is None:
        positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    x_BTD = _embed_tokens(settings, parameters, inputs, positions)
    balance, counts = x_BTD.new_zeros(()), {}
    for layer in range(settings.num_layers):
        block, is_local = f"blocks.{layer}", settings.is_local(layer)
        normed = residual_stream_norm(settings, parameters, f"{block}.attention_norm", x_BTD)
        angles = None
        if settings.positions == "rope":
            angles = compute_rotation_angles(settings, positions, x_BTD.dtype, is_local=is_local)
        window = settings.sliding_window if is_local else 0
        documents = batch.get("document_ids")
        visible = make_visibility_mask(inputs.shape[1], window, documents, inputs.device)
        name = f"{block}.attention"
        added = attention(settings, parameters, name, normed, angles, visible, is_local=is_local)
        x_BTD = x_BTD + _normalize_after_sublayer(
            settings, parameters, f"{block}.attention_post_norm", added
        )
        normed = residual_stream_norm(settings, parameters, f"{block}.ffn_norm", x_BTD)
        if settings.has_experts(layer):
            routed = apply_mixture_of_experts(settings, parameters, buffers, f"{block}.moe", normed)
            added, balance = routed.output_BTD, balance + routed.balance
            counts[block] = routed.counts_E
        else:
            added = feed_forward(settings, parameters, f"{block}.ffn", normed)
        x_BTD = x_BTD + _normalize_after_sublayer(
            settings, parameters, f"{block}.ffn_post_norm", added
        )
    return residual_stream_norm(settings, parameters, "norm", x_BTD), balance, counts


def _embed_tokens(
    settings: PlainSettings,
    parameters: Tensors,
    inputs: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    x_BTD = parameters["embed.weight"][inputs]
    if settings.scale_embeddings:
        x_BTD = x_BTD * math.sqrt(settings.dim)
    if settings.positions == "learned":
        x_BTD = x_BTD + parameters["embed_positions.weight"][positions]
    return x_BTD


def _normalize_after_sublayer(
    settings: PlainSettings, parameters: Tensors, name: str, x_BTD: torch.Tensor
) -> torch.Tensor:
    if not settings.post_norms:
        return x_BTD
    return residual_stream_norm(settings, parameters, name, x_BTD)
