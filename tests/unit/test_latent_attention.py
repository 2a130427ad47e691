"""Latent attention against its formulas (arXiv 2405.04434, equations 37 to 47), token by token
and head by head."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from models import fill
from models import shape as small
from phalanx.job.shapes.decoder import DecoderShape
from phalanx.nn.latent_attention import LATENT_NORM_EPS, LatentAttention
from phalanx.nn.rotary import make_rotary_table

TOKENS = 9
SHAPE = replace(small(num_kv_heads=4), kv_rank=10, head_dim=12, rope_head_dim=4, value_head_dim=6)
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 2, 2, 2]])
SHAPES = {
    "queries at once": SHAPE,
    "queries by rank": replace(SHAPE, query_rank=14),
    "values as wide as keys": replace(SHAPE, value_head_dim=12),
    "yarn": replace(
        SHAPE, rope_scaling="yarn", rope_factor=4.0, rope_original_len=8, rope_mscale=0.7
    ),
}


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + LATENT_NORM_EPS).sqrt() * weight


def turned(x: torch.Tensor, at: int, shape: DecoderShape) -> torch.Tensor:
    """Neighbours as complex numbers, times one of length 1."""
    plain = replace(shape, rope_mscale=0.0)
    cos, sin = make_rotary_table(torch.tensor([[at]]), plain, torch.float64).flatten(1)
    return torch.view_as_real(
        torch.view_as_complex(x.reshape(-1, 2)) * torch.complex(cos, sin)
    ).flatten()


def by_hand(
    module: LatentAttention, shape: DecoderShape, x_TD: torch.Tensor, ids_T: list[int], window: int
) -> torch.Tensor:
    weights, plain = dict(module.named_parameters()), shape.head_dim - shape.rope_head_dim
    temperature = (
        0.1 * shape.rope_mscale * math.log(shape.rope_factor) + 1
        if shape.rope_scaling == "yarn"
        else 1.0
    )
    q_by_token, k_by_token, v_by_token = [], [], []
    for at, x in enumerate(x_TD):
        latent, shared = (weights["kv_down.weight"] @ x).split((shape.kv_rank, shape.rope_head_dim))
        both = (weights["kv_up.weight"] @ normed(latent, weights["kv_norm.weight"])).view(
            shape.num_heads, -1
        )
        if shape.query_rank:
            q = weights["q_up.weight"] @ normed(
                weights["q_down.weight"] @ x, weights["q_norm.weight"]
            )
        else:
            q = weights["q.weight"] @ x
        q = q.view(shape.num_heads, -1)
        q_by_token.append(
            [torch.cat((head[:plain], turned(head[plain:], at, shape))) for head in q]
        )
        k_by_token.append([torch.cat((head[:plain], turned(shared, at, shape))) for head in both])
        v_by_token.append([head[plain:] for head in both])
    rows = []
    for at in range(TOKENS):
        seen = [
            s for s in range(at + 1) if ids_T[s] == ids_T[at] and (not window or at - s < window)
        ]
        heads = []
        for head in range(shape.num_heads):
            scores = torch.stack([q_by_token[at][head] @ k_by_token[s][head] for s in seen])
            share = (scores * temperature**2 / math.sqrt(shape.head_dim)).softmax(0)
            heads.append(
                sum(part * v_by_token[s][head] for part, s in zip(share, seen, strict=True))
            )
        rows.append(weights["o.weight"] @ torch.cat(heads))
    return torch.stack(rows)


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("documents", [False, True], ids=["packed", "documents"])
@pytest.mark.parametrize("name", SHAPES)
def test_it_is_what_the_formulas_say(name: str, documents: bool, window: int) -> None:
    shape = SHAPES[name]
    module = LatentAttention(shape, window)
    fill(module)
    module.double()
    x = torch.randn(
        2, TOKENS, shape.dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    positions, ids = (
        torch.arange(TOKENS).expand(2, -1),
        DOCUMENTS if documents else torch.zeros_like(DOCUMENTS),
    )
    with torch.no_grad():
        found = module(
            x, make_rotary_table(positions, shape, x.dtype), positions, ids if documents else None
        )
        wanted = torch.stack(
            [by_hand(module, shape, x[row], ids[row].tolist(), window) for row in range(2)]
        )
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
