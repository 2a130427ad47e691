"""Softmax attention (arXiv 1706.03762) with grouped queries (arXiv 2305.13245), a sliding
window (Mistral 7B, arXiv 2310.06825, section 2) and documents that do not see each other; and
multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Shape suffixes: B batch, T queries, S keys, D model width, H heads, K key/value heads, G query heads
that share a key, E head width, R the rotated features of it, V value width, P pairs.
"""

from __future__ import annotations

import math

import torch

from phalanx.verify.plain.layers import Tensors, apply_linear, rms_norm
from phalanx.verify.plain.rotary import compute_yarn_attention_factor, rotate_halves, rotate_pairs
from phalanx.verify.plain.settings import BlockSettings, PlainSettings

# Of the norms of latents, in DeepSeek's published code.
LATENT_EPS = 1e-6


def make_visibility_mask(
    num_tokens: int, window: int, document_ids_BT: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """[B or 1, T, S], True where token t attends to token s: not later than itself, in a window of
    `window` tokens that ends with itself, of the same document."""
    index = torch.arange(num_tokens, device=device)
    distance = index[:, None] - index[None, :]
    visible = distance >= 0
    if window > 0:
        visible = visible & (distance < window)
    visible = visible[None]
    if document_ids_BT is not None:
        visible = visible & (document_ids_BT[:, :, None] == document_ids_BT[:, None, :])
    return visible


def attention(
    settings: PlainSettings,
    parameters: Tensors,
    name: str,
    x_BTD: torch.Tensor,
    angles_BTP: torch.Tensor | None,
    visible_BTS: torch.Tensor,
    *,
    is_local: bool,
) -> torch.Tensor:
    """[B, T, D]; latent attention where keys and values have a rank."""
    if settings.kv_rank > 0:
        assert angles_BTP is not None, "latent attention has rotary positions"
        return _latent_attention(
            settings, parameters, name, x_BTD, angles_BTP, visible_BTS, is_local=is_local
        )
    warmth = compute_yarn_attention_factor(settings, is_local=is_local)
    return attention_of_heads(
        settings, parameters, name, x_BTD, visible_BTS, angles_BTP=angles_BTP, warmth=warmth
    )


def attention_of_heads(
    settings: BlockSettings,
    parameters: Tensors,
    name: str,
    x_BTD: torch.Tensor,
    visible_BTS: torch.Tensor,
    *,
    angles_BTP: torch.Tensor | None = None,
    warmth: float = 1.0,
) -> torch.Tensor:
    """[B, T, D]; with angles queries and keys are rotated, and multiplied by `warmth`."""
    into, width = settings.bias != "none", settings.head_dim
    q = apply_linear(parameters, f"{name}.q", x_BTD, bias=into).unflatten(-1, (-1, width))
    k = apply_linear(parameters, f"{name}.k", x_BTD, bias=into).unflatten(-1, (-1, width))
    v = apply_linear(parameters, f"{name}.v", x_BTD, bias=into).unflatten(-1, (-1, width))
    if settings.qk_norm:
        eps, plus_one = settings.norm_eps, settings.norm_plus_one
        q = rms_norm(q, parameters[f"{name}.q_norm.weight"], eps, plus_one=plus_one)
        k = rms_norm(k, parameters[f"{name}.k_norm.weight"], eps, plus_one=plus_one)
    if angles_BTP is not None:
        q = warmth * rotate_halves(q, angles_BTP)
        k = warmth * rotate_halves(k, angles_BTP)
    out_BTHV = _softmax_attention(q, k, v, visible_BTS)
    return apply_linear(parameters, f"{name}.o", out_BTHV.flatten(2), bias=settings.bias == "all")


def _softmax_attention(
    q_BTHE: torch.Tensor, k_BSKE: torch.Tensor, v_BSKV: torch.Tensor, visible_BTS: torch.Tensor
) -> torch.Tensor:
    """Query head h reads key head h // G."""
    num_kv_heads, width = k_BSKE.shape[2], q_BTHE.shape[3]
    q_BTKGE = q_BTHE.unflatten(2, (num_kv_heads, -1))
    scores = torch.einsum("btkge,bske->bkgts", q_BTKGE, k_BSKE) / math.sqrt(width)
    hidden = ~visible_BTS[:, None, None]
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("bkgts,bskv->btkgv", weights, v_BSKV).flatten(2, 3)


def _latent_attention(
    settings: PlainSettings,
    parameters: Tensors,
    name: str,
    x_BTD: torch.Tensor,
    angles_BTP: torch.Tensor,
    visible_BTS: torch.Tensor,
    *,
    is_local: bool,
) -> torch.Tensor:
    """Equations 9 to 19: per head a key made of the latent, and one rotated key for all heads.

    YaRN's temperature is on whole scores, as in the authors' code (`softmax_scale`).
    """
    rotated, plus_one = settings.rope_head_dim, settings.norm_plus_one
    plain, values = settings.head_dim - rotated, settings.value_head_dim
    if settings.query_rank > 0:
        query_latent = apply_linear(parameters, f"{name}.q_down", x_BTD)
        weight = parameters[f"{name}.q_norm.weight"]
        query_latent = rms_norm(query_latent, weight, LATENT_EPS, plus_one=plus_one)
        queries = apply_linear(parameters, f"{name}.q_up", query_latent)
    else:
        queries = apply_linear(parameters, f"{name}.q", x_BTD)
    queries = queries.unflatten(-1, (settings.num_heads, plain + rotated))
    q_plain, q_rotated = queries[..., :plain], queries[..., plain:]

    down = apply_linear(parameters, f"{name}.kv_down", x_BTD)
    latent, k_shared = down[..., : settings.kv_rank], down[..., settings.kv_rank :]
    latent = rms_norm(latent, parameters[f"{name}.kv_norm.weight"], LATENT_EPS, plus_one=plus_one)
    up = apply_linear(parameters, f"{name}.kv_up", latent)
    up = up.unflatten(-1, (settings.num_heads, plain + values))
    k_plain, v_BSHV = up[..., :plain], up[..., plain:]

    q_rotated = rotate_pairs(q_rotated, angles_BTP)
    k_rotated = rotate_pairs(k_shared[:, :, None], angles_BTP)[:, :, 0]
    scores = torch.einsum("bthe,bshe->bhts", q_plain, k_plain)
    scores = scores + torch.einsum("bthr,bsr->bhts", q_rotated, k_rotated)
    scale = compute_yarn_attention_factor(settings, is_local=is_local) ** 2 / math.sqrt(
        plain + rotated
    )
    weights = (scores * scale).masked_fill(~visible_BTS[:, None], -math.inf).softmax(-1)
    out_BTHV = torch.einsum("bhts,bshv->bthv", weights, v_BSHV)
    return apply_linear(parameters, f"{name}.o", out_BTHV.flatten(2))
