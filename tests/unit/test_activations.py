"""What the plan says of activations, held to what autograd saves; and that the count itself is right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from phalanx.job.shape import ModelShape
from phalanx.nn.models.decoder import Decoder
from phalanx.nn.models.vit import VisionTransformer, example_batch
from phalanx.nn.objective import causal_cross_entropy, classification_cross_entropy
from phalanx.parallel.saved import SavedBytes
from phalanx.plan.memory import Workload, activation_bytes

BASE = ModelShape(3, 64, 4, 4, 16, 160, 97, True)
LEARNED = {"positions": "learned", "max_positions": 64}
GPT2 = {"norm": "layernorm", "activation": "gelu_tanh", "bias": "all", **LEARNED}
GEMMA3 = {"activation": "geglu_tanh", "qk_norm": True, "post_norms": True, "num_kv_heads": 1, "sliding_window": 16}
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "gqa": {"num_kv_heads": 2},
    "deep": {"num_layers": 6},
    "wide": {"dim": 128, "head_dim": 32, "ffn_dim": 352},
    "wide heads": {"head_dim": 32},
    "layernorm": {"norm": "layernorm"},
    "gelu": {"activation": "gelu"},
    "biases": {"bias": "all"},
    "qk_norm": {"qk_norm": True, "num_kv_heads": 2},
    "learned": LEARNED,
    "window": {"sliding_window": 16},
    "gpt2": GPT2,
    "gemma3": {**GEMMA3, "global_every": 3, "norm_plus_one": True, "scale_embeddings": True},
    "yarn": {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_len": 32},
}


def filled(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    return model


@pytest.mark.parametrize("documents", [False, True], ids=["packed", "documents"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_prediction_is_what_autograd_keeps(changes: dict[str, Any], precision: str, documents: bool) -> None:
    shape = replace(BASE, **changes)
    model, batch, length = filled(Decoder(shape)), 48, 64
    tokens = torch.randint(0, 97, (batch, length))
    ids = (torch.arange(length) > 20).long().expand(batch, -1) if documents else None
    saved = SavedBytes()
    with saved.counting(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        causal_cross_entropy(1024)(model(tokens, document_ids=ids), {"targets": tokens})
    work = Workload(batch, length, precision, "none", 1024, document_masks=documents)
    # In bf16 autocast also keeps cast weights, which the plan counts as communication.
    assert saved.num_bytes == pytest.approx(activation_bytes(shape, work), rel=0.003 if precision == "fp32" else 0.02)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("pooling", ["class_token", "mean"])
def test_prediction_for_a_vision_transformer(pooling: Any, precision: str) -> None:
    changes = {"norm": "layernorm", "activation": "gelu", "bias": "all", "ffn_dim": 256, "vocab_size": 0}
    images = {"image_size": 32, "patch_size": 4, "num_channels": 3, "num_classes": 10}
    shape = replace(BASE, kind="vit", tie_embeddings=False, pooling=pooling, **changes, **images)
    model, batch = filled(VisionTransformer(shape)), example_batch(shape, 32, 0, seed=0)
    saved = SavedBytes()
    with saved.counting(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        classification_cross_entropy(model(batch["images"]), batch)
    work = Workload(32, shape.tokens_of(0), precision, "none", 1024)
    assert saved.num_bytes == pytest.approx(activation_bytes(shape, work), rel=0.003 if precision == "fp32" else 0.03)


def test_recompute_keeps_the_inputs_of_blocks_and_one_block() -> None:
    work = Workload(4, 64, "fp32", "none", 1024)
    boundary = 4 * 64 * BASE.dim * 4
    few, many = (activation_bytes(replace(BASE, num_layers=n), replace(work, recompute="full")) for n in (4, 9))
    assert many - few == 5 * boundary
    assert activation_bytes(
        replace(BASE, num_layers=1), replace(work, recompute="full")
    ) == boundary + activation_bytes(replace(BASE, num_layers=1), work)


def test_experts_cost_what_a_token_visits() -> None:
    """Beside a dense block of their whole width: the router's numbers, and of each expert input and output."""
    work = Workload(1, 64, "fp32", "none", 1024)
    experts = {"num_experts": 8, "experts_per_token": 2, "expert_ffn_dim": 80}
    dense, sparse = activation_bytes(BASE, work), activation_bytes(replace(BASE, **experts), work)
    assert sparse - dense == 64 * 3 * (2 * 4 * 8 + 2 * 2 * 64 * 4)


def test_a_storage_is_counted_once_and_weights_not_at_all() -> None:
    layer = nn.Linear(8, 8, bias=False)
    x = torch.randn(16, 8)
    saved = SavedBytes()
    with saved.counting():
        (layer(x) * layer(x).sigmoid()).sum()
    one = 16 * 8 * 4
    assert saved.num_bytes == 3 * one  # x for both layers, the first output, and the sigmoid for itself and the product
