"""The model of a published row, from the widths that it states; what it leaves out follows from
what the field usually does."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.job.limits import MAX_LAYERS, MAX_MODEL_SIZE
from phalanx.job.shapes.decoder import DecoderShape
from phalanx.plan.validation.row_values import (
    UNSTATED_PATTERN,
    UnusableRow,
    get_optional_count,
    get_optional_number,
    get_optional_positive_int,
    get_positive_int,
    get_text,
)

DEFAULT_VOCAB = 50304  # GPT-2's, padded: of rows that state none
# Latent attention of DeepSeek-V2 and -V3, and of the models made after them.
LATENT_ATTENTION_SIZES = {
    "kv_rank": 512,
    "rope_head_dim": 64,
    "head_dim": 192,
    "value_head_dim": 128,
}
LATENT_QUERY_RANK = 1536
EXPERT_WIDTHS = {"deepseek-?v2": 1536, "deepseek-?v3": 2048, "mixtral-8x7": 14336}
MODEL_SIZE_KEYS = ("hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "sliding_window")
EXPERT_SIZE_KEYS = ("experts", "num_experts", "top_k", "shared_experts", "moe_ffn", "head_dim")
WIDE_LATENT_DIM = 5120  # models this wide project queries through a latent, smaller ones at once


def build_row_shape(row: Mapping[str, Any]) -> DecoderShape:
    """The shape of a row's model. Raises UnusableRow where layers or widths are missing."""
    dim, num_layers = get_positive_int(row, "hidden"), get_positive_int(row, "layers")
    if num_layers > MAX_LAYERS:
        raise UnusableRow("absurd layers")
    moe = _get_expert_table(row)
    _require_possible_sizes(row, MODEL_SIZE_KEYS)
    _require_possible_sizes(moe, EXPERT_SIZE_KEYS)
    # Frameworks fill the vocabulary up, so that ranks of tp have equal and aligned parts.
    multiple = 128 * (get_optional_positive_int(row, "tp") or 1)
    vocab = -(-(get_optional_positive_int(row, "vocab") or DEFAULT_VOCAB) // multiple) * multiple
    head_dim = get_optional_positive_int(moe, "head_dim") or get_optional_positive_int(
        row, "head_dim"
    )
    heads, kv_heads = _parse_heads(row, dim, head_dim)
    ffn = (
        get_optional_positive_int(row, "ffn")
        or get_optional_positive_int(moe, "moe_ffn")
        or 4 * dim
    )
    keys: dict[str, Any] = {
        "num_layers": num_layers,
        "dim": dim,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim or max(1, dim // heads),
        "ffn_dim": ffn,
        "vocab_size": vocab,
    }
    is_gated = _is_mlp_gated(row, dim, ffn)
    keys["activation"] = "swiglu" if is_gated else "gelu"
    keys["norm"] = "rmsnorm" if is_gated else "layernorm"
    keys["positions"] = "rope" if is_gated else "learned"
    keys["bias"] = "none" if is_gated else "all"
    keys["qk_norm"] = bool(re.search(r"qwen[-_ ]?3", get_text(row, "model").lower()))
    keys["tie_embeddings"] = not is_gated
    keys |= _parse_experts(row, moe, num_layers)
    keys |= _parse_latent_attention(row, moe, dim)
    keys |= _parse_sliding_window(row)
    return DecoderShape(**keys)


def _require_possible_sizes(table: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Raise UnusableRow for a size that no job may ask for."""
    for key in keys:
        if (get_optional_number(table, key) or 0) > MAX_MODEL_SIZE:
            raise UnusableRow(f"absurd {key}")


def _get_expert_table(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a row says of its experts, {} for a dense model. Raises UnusableRow for what is no
    table."""
    moe = row.get("moe")
    if moe is None or moe is False:
        return {}
    if not isinstance(moe, Mapping):
        raise UnusableRow("absurd moe")
    return moe


def _parse_heads(row: Mapping[str, Any], dim: int, head_dim: int | None) -> tuple[int, int]:
    """Heads of queries, and of keys and values. Raises UnusableRow for numbers that no model can
    have."""
    heads = get_optional_positive_int(row, "heads")
    if heads and not head_dim and dim % heads:
        raise UnusableRow("heads do not divide hidden")
    heads = heads or max(1, dim // 128)
    kv_heads = get_optional_positive_int(row, "kv_heads") or heads
    if heads % kv_heads:
        raise UnusableRow("kv_heads do not divide heads")
    return heads, kv_heads


def count_mtp_layers(row: Mapping[str, Any]) -> int:
    """Layers beside the model's own that predict tokens further ahead (MTP), 0 or 1: DeepSeek-V3
    is trained with one, unless the row says otherwise."""
    text = f"{get_text(row, 'note')} {get_text(row, 'variant')}".lower()
    if re.search(r"w/o mtp|without mtp|no mtp", text):
        return 0
    return int(bool(re.search(r"deepseek[-_ ]?v3", get_text(row, "model").lower())))


def _is_mlp_gated(row: Mapping[str, Any], dim: int, ffn: int) -> bool:
    mlp, name = get_text(row, "mlp").lower(), get_text(row, "model").lower()
    if "glu" in mlp or "moe" in mlp:
        return True
    if "gelu" in mlp or "relu" in mlp:
        return False
    if mlp and not UNSTATED_PATTERN.search(mlp):
        raise UnusableRow("unknown mlp")
    if re.search(r"llama|qwen|mistral|mixtral|deepseek|gemma|internlm|moonlight", name):
        return True
    return ffn != 4 * dim


def _parse_experts(
    row: Mapping[str, Any], moe: Mapping[str, Any], num_layers: int
) -> dict[str, Any]:
    num_experts = get_optional_count(moe, "experts") or get_optional_count(moe, "num_experts")
    top_k = get_optional_count(moe, "top_k")
    shared = get_optional_count(moe, "shared_experts") or 0
    num_dense_layers = get_optional_count(moe, "first_dense_layers") or 0
    if not num_experts:
        # Some rows have it in words: "moe160top6+2shared,mla".
        match = re.search(r"moe(\d+)top(\d+)(?:\+(\d+)shared)?", get_text(row, "mlp").lower())
        if not match:
            if top_k:
                raise UnusableRow("experts of unknown number")
            return {}
        num_experts, top_k = int(match[1]), int(match[2])
        shared = int(match[3] or 0)
        if max(num_experts, shared) > MAX_MODEL_SIZE:
            raise UnusableRow("absurd mlp")
    if not top_k:
        raise UnusableRow("experts without a number that a token visits")
    if top_k > num_experts:
        raise UnusableRow("more experts for a token than there are")
    if num_dense_layers > num_layers:
        raise UnusableRow("more dense layers than layers")
    width = get_optional_positive_int(moe, "moe_ffn") or get_optional_positive_int(row, "ffn")
    if width is None:
        width = _find_expert_width(get_text(row, "model"))
    return {
        "num_experts": num_experts,
        "experts_per_token": top_k,
        "expert_ffn_dim": width,
        "num_shared_experts": shared,
        "num_dense_layers": num_dense_layers,
        "router_scores": "softmax",
    }


def _find_expert_width(model: str) -> int:
    """The width of one expert in a published model that rows only name. Raises UnusableRow for
    others."""
    name = model.lower().replace("_", "-")
    for pattern, width in EXPERT_WIDTHS.items():
        if re.search(pattern, name):
            return width
    raise UnusableRow("experts of unknown width")


def _parse_latent_attention(
    row: Mapping[str, Any], moe: Mapping[str, Any], dim: int
) -> dict[str, Any]:
    words = f"{get_text(moe, 'attn')} {get_text(row, 'attn')} {get_text(row, 'mlp')}".lower()
    if "mla" not in words:
        return {}
    heads = get_optional_positive_int(row, "heads") or max(1, dim // 128)
    query_rank = LATENT_QUERY_RANK if dim >= WIDE_LATENT_DIM else 0
    return {**LATENT_ATTENTION_SIZES, "query_rank": query_rank, "num_kv_heads": heads}


def _parse_sliding_window(row: Mapping[str, Any]) -> dict[str, Any]:
    if re.search(r"gpt[-_ ]?oss", get_text(row, "model").lower()):
        return {"sliding_window": 128, "global_every": 2}
    window = get_optional_count(row, "sliding_window")
    return {"sliding_window": window} if window else {}
