"""Masked attention block by block, against today's reference: torch's attention with the whole
mask."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from allocated import most_allocated
from models import fill, shape
from phalanx.job.shapes.masks import DEFAULT_QUERY_BLOCK
from phalanx.mesh.attend import compute_attention
from phalanx.mesh.attend_blocks import VisibleKeys, compute_attention_by_blocks
from phalanx.nn.attention import AttentionCore, make_attention_mask, make_shared_attention_mask
from phalanx.nn.models.decoder import Decoder
from phalanx.parallel.recompute.contexts import make_selective_contexts
from ranks import run_ranks

BATCH, HEADS, WIDTH, BLOCK = 2, 4, 8, 8
CPU = torch.device("cpu")
Leaves = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def given(
    num_tokens: int, kv_heads: int, dtype: torch.dtype, batch: int = BATCH
) -> tuple[Leaves, torch.Tensor]:
    """q, k and v as linear layers lay them out, and a gradient."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(batch, num_tokens, heads, WIDTH, generator=generator, dtype=torch.float64)
        .to(dtype)
        .transpose(1, 2)
        for heads in (HEADS, kv_heads, kv_heads, HEADS)
    )
    return (q.requires_grad_(), k.requires_grad_(), v.requires_grad_()), grad


def documents(num_tokens: int, batch: int = BATCH) -> torch.Tensor:
    """Documents that cross blocks, end in them and where they end; the last row's are each as
    long as a block."""
    drawn = (
        torch.randint(0, 5, (batch - 1, num_tokens), generator=torch.Generator().manual_seed(1))
        .sort(-1)
        .values
    )
    return torch.cat((drawn, (torch.arange(num_tokens) // BLOCK)[None]))


def results(out: torch.Tensor, leaves: Leaves, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (out.detach(), *torch.autograd.grad(out, leaves, grad))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("num_tokens", [9, 16, 27])
@pytest.mark.parametrize("window", [0, 1, 3, 8, 12, 26])
@pytest.mark.parametrize("has_documents", [False, True], ids=["packed", "documents"])
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "both-ways"])
def test_equals_attention_with_the_whole_mask(
    is_causal: bool, has_documents: bool, window: int, num_tokens: int, kv_heads: int
) -> None:
    """Output and gradients.

    Reference: attend with attention_mask. Lengths that blocks divide and that they do not.
    """
    ids = documents(num_tokens) if has_documents else None
    for dtype, near in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        leaves, grad = given(num_tokens, kv_heads, dtype)
        mask = make_attention_mask(num_tokens, window, ids, dtype, CPU, causal=is_causal)
        wanted = results(compute_attention(*leaves, mask, is_causal=is_causal), leaves, grad)
        found = compute_attention_by_blocks(
            *leaves, ids, window=window, is_causal=is_causal, block=BLOCK
        )
        torch.testing.assert_close(results(found, leaves, grad), wanted, rtol=near, atol=near)


def test_in_bf16_gradients_of_keys_do_not_lose_more_than_with_the_whole_mask() -> None:
    """They add up over 16 blocks. Reference: fp64 with the whole mask."""
    num_tokens, ids = 128, documents(128)
    exact_leaves, exact_grad = given(num_tokens, 1, torch.float64)
    mask = make_attention_mask(num_tokens, 0, ids, torch.float64, CPU)
    exact = results(
        compute_attention(*exact_leaves, mask, is_causal=True), exact_leaves, exact_grad
    )
    leaves, grad = given(num_tokens, 1, torch.bfloat16)
    by_blocks = compute_attention_by_blocks(*leaves, ids, window=0, is_causal=True, block=BLOCK)
    at_once = compute_attention(*leaves, mask.bfloat16(), is_causal=True)  # type: ignore[union-attr]
    for ours, theirs, right in zip(
        results(by_blocks, leaves, grad), results(at_once, leaves, grad), exact, strict=True
    ):
        assert (ours.double() - right).norm() <= 1.2 * (theirs.double() - right).norm()


@pytest.mark.parametrize("window", [0, 1, 5, 8, 20])
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("is_causal", [True, False])
def test_masks_of_blocks_are_parts_of_the_whole_mask(
    is_causal: bool, has_documents: bool, window: int
) -> None:
    """Of any rectangle, also one that the diagonal or the window's edge does not cross."""
    ids, whole = documents(24) if has_documents else None, 24
    mask = make_attention_mask(whole, window, ids, torch.float32, CPU, causal=is_causal)
    if mask is None:  # without documents and window
        mask = torch.zeros(1, 1, whole, whole)
        mask = (
            mask.masked_fill(torch.ones(whole, whole, dtype=torch.bool).triu(1), -torch.inf)
            if is_causal
            else mask
        )
    seen = VisibleKeys(ids, window, is_causal)
    for first, last in ((0, 8), (8, 16), (5, 6), (16, 24)):
        begin, end = seen.visible_key_range(first, last, whole)
        outside = torch.cat((mask[:, :, first:last, :begin], mask[:, :, first:last, end:]), dim=-1)
        assert (outside == -torch.inf).all()
        for columns in ((begin, end), (0, 8), (8, 24), (3, 4)):
            found = seen.build_additive_mask(first, last, *columns, torch.float32, CPU)
            assert torch.equal(found, mask[:, :, first:last, slice(*columns)])


LONG = 2 * DEFAULT_QUERY_BLOCK + 77


@pytest.mark.parametrize("kind", ["documents", "window", "documents, recomputed selectively"])
def test_no_tensor_has_an_element_for_each_pair_of_tokens(kind: str) -> None:
    """Of a whole decoder, forward and backward, of blocks with a window and blocks without."""
    has_window = kind == "window"
    windows = {"sliding_window": 100, "global_every": 2} if has_window else {}
    module = Decoder(replace(shape(num_layers=2), **windows))
    fill(module)
    tokens = torch.zeros(1, LONG, dtype=torch.long)
    ids = None if has_window else documents(LONG, 2)[:1]
    selective = "recomputed" in kind

    def compute() -> None:
        forward: Any = module
        if selective:
            forward = partial(
                checkpoint, module, use_reentrant=False, context_fn=make_selective_contexts
            )
        forward(tokens, None, ids).hidden_BTD.sum().backward()

    largest, worst = most_allocated(compute)
    pairs = LONG * LONG * 4  # bytes of a mask of all in fp32
    assert largest <= DEFAULT_QUERY_BLOCK * LONG * 4 < pairs / 2
    assert worst < pairs * 1.2  # the whole mask, kept beside what the forward keeps, would take 2.5


def test_a_longer_sequence_takes_more_memory_in_proportion_only() -> None:
    """Peak of attention, forward and backward, of 2, 4 and 8 blocks: quadruple memory would be
    that of T x T."""

    def peak(num_tokens: int) -> int:
        leaves, grad = given(num_tokens, 1, torch.float32, 1)
        ids = documents(num_tokens, 2)[:1]
        _, worst = most_allocated(
            lambda: compute_attention_by_blocks(
                *leaves, ids, window=0, is_causal=True, block=64
            ).backward(grad)
        )
        return worst

    peaks = [peak(64 * n) for n in (8, 16, 32)]
    assert peaks[2] < 2.3 * peaks[1] < 2.3 * 2.3 * peaks[0]


def test_the_core_takes_its_blocks_where_one_mask_would_be_too_long() -> None:
    """The same as with a whole mask that is handed to it; where one block suffices, the same
    bits."""
    for num_tokens, window in (
        (DEFAULT_QUERY_BLOCK, 0),
        (DEFAULT_QUERY_BLOCK + 5, 0),
        (DEFAULT_QUERY_BLOCK + 5, 700),
    ):
        leaves, grad = given(num_tokens, 2, torch.float64, 1)
        ids = documents(num_tokens, 2)[:1]
        core = AttentionCore(causal=True, window=window)
        whole = make_attention_mask(num_tokens, window, ids, torch.float64, CPU)
        shared = make_shared_attention_mask(num_tokens, window, ids, torch.float64, CPU)
        assert (shared is None) == (num_tokens > DEFAULT_QUERY_BLOCK)
        wanted = results(core(*leaves, None, ids, whole), leaves, grad)
        found = results(core(*leaves, None, ids, shared), leaves, grad)
        near = 1e-12 if shared is None else 0.0
        torch.testing.assert_close(found, wanted, rtol=near, atol=near)


def test_selective_recompute_keeps_what_it_computed() -> None:
    """The forward of attention runs once, as torch's own does; gradients are those without
    recompute."""
    leaves, grad = given(20, 2, torch.float64)
    ids = documents(20)
    calls: list[str] = []

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    def computed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return compute_attention_by_blocks(
            q * 2, k, v, ids, window=5, is_causal=True, block=BLOCK
        ).tanh()

    wanted = results(computed(*leaves), leaves, grad)
    with Counting():
        out = checkpoint(computed, *leaves, use_reentrant=False, context_fn=make_selective_contexts)
        found = results(out, leaves, grad)  # type: ignore[arg-type]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))
    assert calls.count("phalanx.attend_by_blocks.default") == 1


def test_a_compiler_sees_one_operation() -> None:
    """No graph break, also under autocast, whose type the operation computes in; the same bits.

    In its own process: a compiler keeps what it traced with.
    """
    assert run_ranks(1, compiled_is_equal) == [[True] * 8]


def compiled_is_equal(rank: int) -> list[bool]:
    leaves, grad = given(20, 2, torch.float32)
    ids, equal = documents(20), []

    def computed(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        return (
            compute_attention_by_blocks(q * 2, k, v, ids, window=5, is_causal=True, block=BLOCK) * 3
        )

    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16):
            wanted = results(computed(*leaves, ids), leaves, grad.to(dtype))
            compiled = torch.compile(computed, backend="aot_eager", fullgraph=True)
            found = results(compiled(*leaves, ids), leaves, grad.to(dtype))
        assert wanted[0].dtype is dtype
        equal += [torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True)]
    return equal
