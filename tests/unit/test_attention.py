"""Every attention path against the formula, in fp64: an explicit mask over all pairs, a softmax,
a sum."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from models import SEQ_LEN, VOCAB, fill, shape
from phalanx.job.shapes.decoder import DecoderShape
from phalanx.nn.attention import AttentionCore, make_attention_mask
from phalanx.nn.models.decoder import Decoder

T, HEADS, WIDTH = 9, 4, 6
EXACT = {"rtol": 1e-12, "atol": 1e-12}

# Rows with one document, several, one that is a single token, and one that comes back after
# another.
DOCUMENTS = torch.tensor(
    [[0] * 9, [0, 0, 0, 1, 1, 1, 1, 2, 2], [5, 6, 6, 6, 6, 6, 6, 6, 7], [1, 1, 1, 2, 2, 1, 1, 1, 1]]
)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """The formula. keep: [B, T, T], True where the first token attends to the second."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return scores.masked_fill(~keep[:, None], -torch.inf).softmax(-1) @ v


def kept(documents: torch.Tensor | None, window: int, causal: bool = True) -> torch.Tensor:
    """Pair by pair, as one would say it."""
    keep = torch.zeros(len(DOCUMENTS), T, T, dtype=torch.bool)
    for row in range(len(DOCUMENTS)):
        for i in range(T):
            for j in range(T):
                same = documents is None or documents[row, i] == documents[row, j]
                near = not window or abs(i - j) < window
                keep[row, i, j] = bool((j <= i or not causal) and near and same)
    return keep


def inputs(kv_heads: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(len(DOCUMENTS), heads, T, WIDTH) for heads in (HEADS, kv_heads, kv_heads)]
    return [
        torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in sizes
    ]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [0, 1, 3, 8, 9, 100])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["packed", "documents"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both-ways"])
def test_every_path_equals_the_formula(
    causal: bool, documents: torch.Tensor | None, window: int, kv_heads: int
) -> None:
    q, k, v = inputs(kv_heads)
    wanted = attend(q, k, v, kept(documents, window, causal))
    found = AttentionCore(causal=causal, window=window)(
        q, k, v, torch.arange(T).expand(len(q), T), documents
    )
    torch.testing.assert_close(found, wanted, **EXACT)
    weights = torch.randn(
        found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    gradients = [torch.autograd.grad((out * weights).sum(), (q, k, v)) for out in (found, wanted)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["packed", "documents"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both-ways"])
def test_a_mask_made_beforehand_changes_nothing(
    causal: bool, documents: torch.Tensor | None, window: int
) -> None:
    q, k, v = inputs(4)
    core, positions = AttentionCore(causal=causal, window=window), torch.arange(T).expand(len(q), T)
    mask = make_attention_mask(T, window, documents, q.dtype, q.device, causal=causal)
    assert torch.equal(
        core(q, k, v, positions, documents, mask), core(q, k, v, positions, documents)
    )


def test_plain_causal_attention_needs_no_mask() -> None:
    assert make_attention_mask(T, 0, None, torch.float32, torch.device("cpu")) is None
    assert make_attention_mask(T, T, None, torch.float32, torch.device("cpu")) is None


@pytest.mark.parametrize("window", [0, 3])
def test_a_document_of_a_packed_sequence_computes_what_it_computes_alone(window: int) -> None:
    """Whole decoder, with blocks of both kinds, rotary and learned positions."""
    for positions in ("rope", "learned"):
        changes = {
            "positions": positions,
            "max_positions": SEQ_LEN if positions == "learned" else 0,
        }
        module = built(
            replace(shape(num_layers=3), sliding_window=window, global_every=2, **changes)
        )
        tokens = torch.randint(VOCAB, (2, SEQ_LEN), generator=torch.Generator().manual_seed(0))
        ids = (torch.arange(SEQ_LEN) >= 3).long().expand(2, -1)
        at = torch.cat((torch.arange(3), torch.arange(SEQ_LEN - 3))).expand(2, -1)
        packed = module(tokens, document_ids=ids, positions=at).hidden_BTD
        torch.testing.assert_close(packed[:, :3], module(tokens[:, :3]).hidden_BTD, **EXACT)
        torch.testing.assert_close(packed[:, 3:], module(tokens[:, 3:]).hidden_BTD, **EXACT)


def test_a_token_reaches_back_one_window_per_block() -> None:
    """Two blocks with a window of 3 carry a token's influence over 4 places, and no further."""
    module = built(replace(shape(num_layers=2), sliding_window=3))
    tokens = torch.randint(VOCAB, (1, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 1] = (changed[:, 1] + 1) % VOCAB
    differs = (module(tokens).hidden_BTD != module(changed).hidden_BTD).any(-1)[0]
    assert differs.nonzero().flatten().tolist() == [1, 2, 3, 4, 5]


def built(a_shape: DecoderShape) -> Decoder:
    module = Decoder(a_shape)
    fill(module)
    return module.double()
