"""Documents and windows over parts of sequences whose masks are made for a block of queries at a
time."""

from __future__ import annotations

from typing import Any

import torch

from allocated import most_allocated
from phalanx.core.block_sizes import BlockSizes, use_block_sizes
from phalanx.core.phases import PhaseTimer
from phalanx.mesh.attend import compute_attention
from phalanx.mesh.attend_blocks import VisibleKeys
from phalanx.mesh.mesh import open_mesh
from phalanx.nn.attention import make_attention_mask, make_shared_attention_mask
from phalanx.parallel.context.attention import ATTENTION_FUNCTION_OF_CP_KIND
from phalanx.parallel.context.chunks import SequenceChunksOfRanks
from phalanx.parallel.context.group import ContextGroup
from phalanx.parallel.context.transform import ContextParallelMaskBuilder
from phalanx.plan.layout import Layout
from ranks import run_ranks

RANKS, BATCH, HEADS, KV_HEADS, WIDTH = 4, 2, 8, 4, 8
CPU = torch.device("cpu")
CASES = [(0, True), (3, True), (11, True), (50, True), (3, False), (11, False)]


def given(num_tokens: int, dtype: torch.dtype, batch: int = BATCH) -> list[torch.Tensor]:
    """q, k, v and a gradient of whole sequences."""
    generator = torch.Generator().manual_seed(3)
    sizes = [(batch, heads, num_tokens, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [torch.randn(size, generator=generator, dtype=dtype) for size in sizes]


def documents(num_tokens: int, batch: int = BATCH) -> torch.Tensor:
    return (
        torch.randint(0, 5, (batch, num_tokens), generator=torch.Generator().manual_seed(1))
        .sort(-1)
        .values
    )


def results(
    out: torch.Tensor, leaves: list[torch.Tensor], grad: torch.Tensor
) -> list[torch.Tensor]:
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def part(
    group: ContextGroup, kind: str, tensors: list[torch.Tensor], window: int, ids: Any
) -> list[torch.Tensor]:
    """Output and gradients of this rank's tokens."""
    places = group.chunks.positions_of_rank_tokens(group.rank, tensors[0].shape[2])
    *qkv, grad = (tensor.index_select(2, places) for tensor in tensors)
    leaves = [tensor.requires_grad_() for tensor in qkv]
    make = ContextParallelMaskBuilder(
        group, make_shared_attention_mask, covers_all=kind == "ulysses"
    )
    mask = make(len(places), window, ids, grad.dtype, CPU)
    assert isinstance(mask, VisibleKeys)
    return results(ATTENTION_FUNCTION_OF_CP_KIND[kind](*leaves, mask, window, group), leaves, grad)


def differences(rank: int) -> dict[Any, float]:
    """From one process with a whole mask, of each way to attend: chunks of 6 or 12 tokens in
    blocks of 4."""
    num_tokens, found = 48, {}
    tensors, all_ids = given(num_tokens, torch.float64), documents(num_tokens)
    *leaves, grad = (tensor.clone() for tensor in tensors)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    with open_mesh(Layout(cp=RANKS), device="cpu") as mesh:
        for window, has_documents in CASES:
            ids = all_ids if has_documents else None
            mask = make_attention_mask(num_tokens, window, ids, torch.float64, CPU)
            whole = results(compute_attention(*leaves, mask, is_causal=True), leaves, grad)
            for balance in ("zigzag", "none"):
                group = ContextGroup(
                    mesh.submesh("cp").get_group(),
                    SequenceChunksOfRanks(RANKS, balance),
                    PhaseTimer(),
                )
                places = group.chunks.positions_of_rank_tokens(rank, num_tokens)
                wanted = [tensor.index_select(2, places) for tensor in whole]
                for kind in ATTENTION_FUNCTION_OF_CP_KIND:
                    with use_block_sizes(BlockSizes(query_block=4)):
                        ours = part(group, kind, tensors, window, ids)
                    worst = max(
                        float((a - b).abs().max()) for a, b in zip(ours, wanted, strict=True)
                    )
                    found[window, has_documents, balance, kind] = worst
    return found


def test_every_way_to_attend_equals_the_whole_mask() -> None:
    """Output and gradients, fp64. Reference: attend with attention_mask, in one process."""
    for found in run_ranks(RANKS, differences):
        assert len(found) == len(CASES) * len(ATTENTION_FUNCTION_OF_CP_KIND) * 2
        assert {case: worst for case, worst in found.items() if not worst < 1e-12} == {}


def largest(rank: int) -> dict[str, int]:
    """Bytes of the largest tensor that attention makes, with its masks, forward and backward."""
    num_tokens, found = 1024, {}
    tensors, ids = given(num_tokens, torch.float32, 1), documents(num_tokens, 1)
    with (
        use_block_sizes(BlockSizes(query_block=32)),
        open_mesh(Layout(cp=RANKS), device="cpu") as mesh,
    ):
        group = ContextGroup(
            mesh.submesh("cp").get_group(), SequenceChunksOfRanks(RANKS, "zigzag"), PhaseTimer()
        )
        for kind in ("ring", "all-gather"):
            found[kind], _ = most_allocated(lambda kind=kind: part(group, kind, tensors, 0, ids))  # type: ignore[misc]
    return found


def test_no_rank_has_a_mask_of_its_queries_and_all_keys() -> None:
    whole = 1024 // RANKS * 1024 * 4
    for found in run_ranks(RANKS, largest):
        assert all(num_bytes < whole / 2 for num_bytes in found.values()), found
