"""The decoder: documents kept apart, grouped heads, relative positions, and the counts that
planning relies on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models import SEQ_LEN, VOCAB, decoder, fill, shape
from phalanx.job.shapes.decoder import DecoderShape
from phalanx.mesh.logical import collect_module_shards
from phalanx.nn.models.decoder import Decoder
from phalanx.nn.objective import CausalOutput, causal_cross_entropy
from phalanx.nn.rotary import make_rotary_table, rotate


def logits(module: Decoder, tokens: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        out: CausalOutput = module(tokens, **named)
        return out.hidden_BTD @ out.head_VD.T


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(VOCAB, (2, SEQ_LEN), generator=torch.Generator().manual_seed(0))


def test_no_token_sees_a_later_one(tokens: torch.Tensor) -> None:
    module = decoder(tied=True, dtype=torch.float64)
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % VOCAB
    before, after = logits(module, tokens), logits(module, changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any(-1).all()  # and every later one does


def test_documents_do_not_see_each_other(tokens: torch.Tensor) -> None:
    """Changing the first document changes nothing in the second, which computes what it would
    compute alone."""
    module = decoder(tied=True, dtype=torch.float64)
    ids = (torch.arange(SEQ_LEN) >= 3).long().expand(2, -1)
    positions = torch.cat((torch.arange(3), torch.arange(SEQ_LEN - 3))).expand(2, -1)
    changed = tokens.clone()
    changed[:, :3] = (changed[:, :3] + 1) % VOCAB
    before = logits(module, tokens, document_ids=ids, positions=positions)
    after = logits(module, changed, document_ids=ids, positions=positions)
    assert torch.equal(before[:, 3:], after[:, 3:])
    assert (before[:, :3] != after[:, :3]).any(-1).all()
    torch.testing.assert_close(before[:, 3:], logits(module, tokens[:, 3:]), rtol=1e-12, atol=1e-12)
    assert (
        logits(module, tokens)[:, 3:] != logits(module, changed)[:, 3:]
    ).any()  # without ids they are seen


def test_one_document_is_plain_causal_attention(tokens: torch.Tensor) -> None:
    module = decoder(tied=True, dtype=torch.float64)
    same = logits(module, tokens, document_ids=torch.zeros_like(tokens))
    torch.testing.assert_close(same, logits(module, tokens), rtol=1e-12, atol=1e-12)


def test_grouped_heads_equal_repeated_key_and_value_heads(tokens: torch.Tensor) -> None:
    """GQA with 2 key-value heads is multi-head attention whose 4 heads have the weights of their
    group's."""
    grouped = decoder(tied=True, dtype=torch.float64)
    full = Decoder(shape(num_kv_heads=4)).double()
    weights = grouped.state_dict()
    for name, weight in weights.items():
        if name.endswith(("attention.k.weight", "attention.v.weight")):
            weights[name] = weight.unflatten(0, (2, 8)).repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(weights)
    torch.testing.assert_close(
        logits(full, tokens), logits(grouped, tokens), rtol=1e-12, atol=1e-12
    )


def test_rotation_depends_on_the_difference_of_positions_only() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 1, 8, generator=generator, dtype=torch.float64) for _ in range(2))

    def score(at_q: int, at_k: int) -> float:
        tables = [
            make_rotary_table(torch.tensor([[at]]), shape(), torch.float64) for at in (at_q, at_k)
        ]
        return (rotate(q, tables[0]) * rotate(k, tables[1])).sum().item()

    assert score(7, 3) == pytest.approx(score(104, 100), rel=1e-12)
    assert score(7, 3) != pytest.approx(score(7, 4), rel=1e-3)
    assert rotate(
        q, make_rotary_table(torch.tensor([[9]]), shape(), torch.float64)
    ).norm() == pytest.approx(q.norm().item())


def test_shifting_all_positions_changes_nothing(tokens: torch.Tensor) -> None:
    module = decoder(tied=True, dtype=torch.float64)
    positions = torch.arange(SEQ_LEN).expand(2, -1)
    shifted = logits(module, tokens, positions=positions + 50)
    torch.testing.assert_close(shifted, logits(module, tokens), rtol=1e-10, atol=1e-10)
    stretched = logits(module, tokens, positions=positions * 2)
    assert (stretched - shifted).abs().max() > 1e-3


SHAPES = {
    "tied": shape(tied=True),
    "untied": shape(tied=False, num_kv_heads=4, num_layers=3),
    "narrow": DecoderShape(1, 24, 2, 1, 12, 64, 50, tie_embeddings=False),
    "gpt2": replace(
        shape(num_kv_heads=4),
        activation="gelu_tanh",
        norm="layernorm",
        bias="all",
        positions="learned",
        max_positions=16,
    ),
    "qwen2": replace(shape(), bias="qkv"),
    "qwen3": replace(shape(), qk_norm=True, head_dim=12),
    "latent": replace(
        shape(num_kv_heads=4), kv_rank=10, head_dim=12, rope_head_dim=4, value_head_dim=6
    ),
    "latent queries": replace(
        shape(num_kv_heads=4),
        query_rank=14,
        kv_rank=10,
        head_dim=12,
        rope_head_dim=4,
        value_head_dim=12,
    ),
    "gemma3": replace(
        shape(num_layers=4),
        activation="geglu_tanh",
        norm_plus_one=True,
        post_norms=True,
        qk_norm=True,
        scale_embeddings=True,
        sliding_window=5,
        global_every=2,
    ),
}


@pytest.mark.parametrize("a_shape", SHAPES.values(), ids=SHAPES)
def test_parameters_are_those_of_the_shape(a_shape: DecoderShape) -> None:
    with torch.device("meta"):
        module = Decoder(a_shape)
    assert sum(p.numel() for p in module.parameters()) == a_shape.num_params
    assert sum(p.numel() for p in module.blocks[0].parameters()) == a_shape.block_params


@pytest.mark.parametrize("a_shape", SHAPES.values(), ids=SHAPES)
def test_flops_are_those_torch_counts(a_shape: DecoderShape) -> None:
    """Against torch.utils.flop_counter of a forward.

    Matrix products are equal; of attention torch counts all T x T pairs, DecoderShape those that the
    mask of each block keeps.
    """
    module, seq_len = Decoder(replace(a_shape)), 16
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter, sdpa_kernel(SDPBackend.MATH):
        outputs = module(torch.zeros(1, seq_len, dtype=torch.long))
        batch = {"targets": torch.zeros(1, seq_len, dtype=torch.long)}
        causal_cross_entropy(seq_len)(outputs, batch)
    counts = {
        str(operation): count for operation, count in counter.get_flop_counts()["Global"].items()
    }
    wanted = a_shape.flops_per_sample(seq_len)
    assert counts.get("aten.mm", 0) + counts.get("aten.addmm", 0) == wanted["matmul"]
    # Of all pairs that torch counts, the mask keeps these.
    pairs = [
        causal_pairs(seq_len, a_shape.sliding_window * a_shape.is_local(n))
        for n in range(a_shape.num_layers)
    ]
    useful = counts["aten.bmm"] * sum(pairs)
    if a_shape.kv_rank:  # values are computed as wide as keys
        useful = useful * (a_shape.head_dim + a_shape.value_head_dim) // (2 * a_shape.head_dim)
    assert useful == wanted["attention"] * a_shape.num_layers * seq_len**2
    assert wanted["training"] == 3 * (wanted["matmul"] + wanted["attention"])


def causal_pairs(tokens: int, window: int) -> int:
    return sum(1 for i in range(tokens) for j in range(i + 1) if not window or i - j < window)


def test_a_window_is_not_seen_in_what_blocks_without_it_compute(tokens: torch.Tensor) -> None:
    """With every block global, a window changes nothing, to the last bit."""
    plain, windowed = Decoder(shape()), Decoder(replace(shape(), sliding_window=2, global_every=1))
    fill(plain)
    windowed.load_state_dict(plain.state_dict())
    assert torch.equal(logits(plain, tokens), logits(windowed, tokens))


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "gemma3"])
@torch.no_grad()
def test_initial_norms_are_the_identity_and_biases_zero(name: str) -> None:
    module = Decoder(SHAPES[name])
    module.initialize(collect_module_shards(module)[0], 0)
    for key, parameter in module.named_parameters():
        if key.endswith(".bias"):
            assert not parameter.any()
        elif "norm." in key:
            assert (parameter == (0 if SHAPES[name].norm_plus_one else 1)).all()
    residual = 0.02 / (2 * SHAPES[name].num_layers) ** 0.5
    assert module.blocks[0].attention.o.weight.std().item() == pytest.approx(residual, rel=0.1)
    assert module.embed.weight.std().item() == pytest.approx(0.02, rel=0.1)
    if module.embed_positions is not None:
        assert module.embed_positions.weight.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("a_shape", SHAPES.values(), ids=SHAPES)
def test_bf16_runs_and_keeps_its_type(a_shape: DecoderShape) -> None:
    module, tokens = (
        Decoder(a_shape),
        torch.randint(VOCAB, (2, SEQ_LEN), generator=torch.Generator().manual_seed(0)),
    )
    fill(module)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = module(tokens).hidden_BTD
    assert hidden.dtype == torch.bfloat16
    exact = module(tokens).hidden_BTD
    assert (hidden.float() - exact).norm() < 0.03 * exact.norm()
