"""What the plan says of activations, held to what autograd saves; and that the count itself is right."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from phalanx.job.shape import ModelShape
from phalanx.nn.models.decoder import Decoder
from phalanx.nn.objective import causal_cross_entropy
from phalanx.parallel.saved import SavedBytes
from phalanx.plan.memory import Workload, activation_bytes


def decoder(**changes: int) -> tuple[ModelShape, Decoder]:
    sizes = {"num_layers": 3, "dim": 64, "num_heads": 4, "num_kv_heads": 4, "head_dim": 16, "ffn_dim": 160}
    shape = ModelShape(**{**sizes, **changes}, vocab_size=97, tie_embeddings=True)
    model = Decoder(shape)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    return shape, model


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"num_kv_heads": 2}, {"num_layers": 6}, {"dim": 128, "head_dim": 32, "ffn_dim": 352}],
    ids=["base", "gqa", "deep", "wide"],
)
def test_prediction_is_what_autograd_keeps(changes: dict[str, int], precision: str) -> None:
    shape, model = decoder(**changes)
    batch, length = 48, 64
    tokens = torch.randint(0, 97, (batch, length))
    saved = SavedBytes()
    with saved.counting(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        causal_cross_entropy(1024)(model(tokens), {"targets": tokens})
    work = Workload(batch, length, precision, "none", 1024)
    assert saved.num_bytes == pytest.approx(activation_bytes(shape, work), rel=0.06)


def test_a_storage_is_counted_once_and_weights_not_at_all() -> None:
    layer = nn.Linear(8, 8, bias=False)
    x = torch.randn(16, 8)
    saved = SavedBytes()
    with saved.counting():
        (layer(x) * layer(x).sigmoid()).sum()
    one = 16 * 8 * 4
    assert saved.num_bytes == 3 * one  # x for both layers, the first output, and the sigmoid for itself and the product
