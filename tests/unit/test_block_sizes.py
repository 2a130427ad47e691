"""Sizes of blocks change how often loops run, and nothing that they compute.

Reference: the same computation with the usual sizes. `bucket_bytes` needs ranks:
tests/distributed/test_bucket_sizes.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from models import fill, shape
from phalanx.core.block_sizes import (
    BlockSizes,
    get_block_sizes,
    restore_shared_memory_sizes,
    use_block_sizes,
)
from phalanx.mesh import counter_rng, malloc
from phalanx.mesh.attend_blocks import VisibleKeys
from phalanx.mesh.counter_rng import make_dropout_keep_mask
from phalanx.mesh.logical import Box, LogicalShard
from phalanx.mesh.shared_memory import calls, reduction
from phalanx.nn import init, objective
from phalanx.nn.attention import AttentionCore
from phalanx.nn.init import InitRule, initialize_shards
from phalanx.nn.models.decoder import Decoder
from phalanx.nn.objective import CausalOutput, causal_cross_entropy
from phalanx.parallel import gradients
from phalanx.parallel.gradients import LocalBlockReplicas, collect_gradients_and_sum_squares

USUAL = BlockSizes()
# Smaller than those that `verify` takes, so that each of these loops runs three times.
SMALL = BlockSizes(
    query_block=3,
    recorded_init_bytes=1,
    loss_chunk_tokens=5,
    bucket_bytes=2053,
    norm_elements=37,
    cpu_dropout_pairs=101,
    gpu_dropout_pairs=101,
    init_elements=61,
    mapped_scratch_bytes=1,
    reusable_file_bytes=401,
    reusable_block_bytes=101,
    replica_split_bytes=1009,
    checkpoint_read_bytes=101,
    shared_chunk_bytes=1351,
    shared_whole_bytes=101,
    shared_piece_bytes=203,
    shared_mapped_bytes=203,
    shared_bucket_bytes=1001,
    shared_rows_bytes=1,
)
NUM_TOKENS, WIDTH, FFN_WIDTH, VOCAB = 64, 32, 90, 251
Tensors = tuple[torch.Tensor, ...]


def attention() -> Tensors:
    """Loss and gradients of a decoder of blocks with a window and without, and documents."""
    module = Decoder(replace(shape(num_layers=2), sliding_window=11, global_every=2))
    fill(module)
    module.double()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(37, (2, NUM_TOKENS), generator=generator)
    documents = torch.randint(0, 4, (2, NUM_TOKENS), generator=generator).sort(-1).values
    loss = module(tokens, None, documents).hidden_BTD.square().sum()
    # The head is the objective's.
    grads = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)
    return loss.detach(), *(grad for grad in grads if grad is not None)


def loss(dtype: torch.dtype = torch.float64) -> Tensors:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(1, NUM_TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    head = torch.randn(VOCAB, WIDTH, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(VOCAB, (1, NUM_TOKENS), generator=generator)
    targets[0, 3:11] = -100
    total, _ = causal_cross_entropy(2048)(CausalOutput(hidden, head), {"targets": targets})
    return total.detach(), *torch.autograd.grad(1.7 * total, (hidden, head))


def norm() -> Tensors:
    generator = torch.Generator().manual_seed(3)
    named, blocks = [], {}
    for number, size in enumerate(((VOCAB, WIDTH), (WIDTH,), (FFN_WIDTH, WIDTH), ())):
        parameter = nn.Parameter(torch.zeros(size, dtype=torch.float64))
        parameter.grad = torch.randn(size, generator=generator, dtype=torch.float64)
        named.append((str(number), parameter))
        blocks[str(number)] = (LocalBlockReplicas((), 1),)
    return (collect_gradients_and_sum_squares(named, blocks)[1],)


def dropout() -> Tensors:
    """Masks of a whole tensor, of a part of its tokens, and of a part of its width, in rows of even
    and odd length."""
    masks = []
    for width in (WIDTH, FFN_WIDTH + 1):
        full = (2, NUM_TOKENS, width)
        masks.append(make_dropout_keep_mask(5, 0.7, full))
        masks.append(
            make_dropout_keep_mask(5, 0.7, (2, 16, width), offsets=(0, 17, 0), global_sizes=full)
        )
        masks.append(
            make_dropout_keep_mask(5, 0.7, (2, NUM_TOKENS, 7), offsets=(0, 0, 7), global_sizes=full)
        )
    return tuple(masks)


def initial_weights() -> Tensors:
    """A matrix, a part of its columns, and a part of the rows of each of several matrices."""
    filled = []
    for full, offset, size in (
        ((VOCAB, WIDTH), (0, 0), (VOCAB, WIDTH)),
        ((WIDTH, FFN_WIDTH), (0, 23), (WIDTH, 23)),
        ((WIDTH, WIDTH), (0, 8), (WIDTH, 8)),
        ((4, FFN_WIDTH, WIDTH), (0, 45, 0), (4, 23, WIDTH)),
    ):
        shard = LogicalShard(
            "w", full, "float32", (Box(offset, (0,) * len(size), size),), torch.empty(size)
        )
        initialize_shards({"w": shard}, (InitRule("*", std=0.02),), 3)
        filled.append(shard.tensor)
    return tuple(filled)


class Calls:
    """Counts calls of `owner.name`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.count, original = 0, getattr(owner, name)

        def count(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, count)


# (the computation; what each pass of its loop calls, once; loops; calls outside of them).
CASES: dict[str, tuple[Callable[[], Tensors], Any, str, int, int]] = {
    # Of two layers, forward and backward.
    "query_block": (attention, VisibleKeys, "build_additive_mask", 4, 0),
    "loss_chunk_tokens": (loss, objective, "_sum_loss_and_write_gradient", 1, 0),
    # Rows are mixed once for each mask; of rows of odd length one with a part of their width has
    # lines that begin in the middle of a pair, filled by a loop of their own.
    "cpu_dropout_pairs": (dropout, counter_rng, "_apply_splitmix64_in_place", 7, 6),
    "init_elements": (initial_weights, init, "_make_normals_of_runs", 4, 0),
}


def sum_in_shared_memory(num_ranks: int = 3) -> Tensors:
    """What each of several ranks has of an all-reduce of a tensor, all of them in this process."""
    tensors, transfers = [], []
    for rank in range(num_ranks):
        generator = torch.Generator().manual_seed(rank)
        tensor = torch.randn(FFN_WIDTH, 7, generator=generator, dtype=torch.float64)
        context = calls.CallContext(rank, num_ranks, "avg", lambda _: None)
        taken = calls._build_all_reduce(context, [[tensor]])
        assert taken is not None
        tensors.append(tensor)
        transfers.append(taken.operation.transfers)
    for of_ranks in zip(*transfers, strict=True):
        blocks = [np.zeros(transfer.operand_bytes, np.uint8) for transfer in of_ranks]
        for transfer, block in zip(of_ranks, blocks, strict=True):
            transfer.stage(block)
        for transfer in of_ranks:
            transfer.move(blocks, None)
        for transfer, block in zip(of_ranks, blocks, strict=True):
            transfer.collect(block)
    return tuple(tensors)


def test_chunks_of_shared_memory_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = Calls(monkeypatch, reduction, "_reduce_piece_by_numpy")
    usual = sum_in_shared_memory()
    num_usual, pieces.count = pieces.count, 0
    with use_block_sizes(SMALL):
        assert len(calls._list_chunks(usual[0].nbytes)) == 4
        assert len(calls._list_chunks(usual[0].nbytes, num_parts=3)) == 12
        small = sum_in_shared_memory()
    # Each rank reduces everything; then a slice of each chunk, in pieces of 192 bytes.
    assert num_usual == 3
    assert pieces.count == 3 * 3 * 3 + 3 * 2
    assert all(torch.equal(a, usual[0]) for a in (*usual, *small))


def test_shared_memory_sizes_alone_are_restored() -> None:
    sizes = restore_shared_memory_sizes(SMALL)
    assert sizes.shared_chunk_bytes == USUAL.shared_chunk_bytes
    assert sizes.bucket_bytes == SMALL.bucket_bytes


@pytest.mark.parametrize("name", CASES)
def test_a_small_size_takes_more_passes_to_the_same_result(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, owner, callee, num_loops, num_outside = CASES[name]
    calls = Calls(monkeypatch, owner, callee)
    usual = compute()
    num_usual, calls.count = calls.count, 0
    with use_block_sizes(replace(USUAL, **{name: getattr(SMALL, name)})):
        small = compute()
    if name != "query_block":  # with the usual size there are no blocks, but one mask for all
        assert num_usual - num_outside == num_loops
    assert calls.count - num_outside >= 3 * num_loops
    for a, b in zip(small, usual, strict=True):
        if a.dtype == torch.float64:
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
        else:
            assert torch.equal(a, b)


def test_norms_are_of_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[list[int]] = []
    original = torch._foreach_norm

    def record(tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        sizes.append([tensor.numel() for tensor in tensors])
        return original(tensors, *args, **kwargs)

    monkeypatch.setattr(gradients.torch, "_foreach_norm", record)
    (usual,) = norm()
    with use_block_sizes(replace(USUAL, norm_elements=SMALL.norm_elements)):
        (small,) = norm()
    assert sizes[0] == [VOCAB * WIDTH, WIDTH, FFN_WIDTH * WIDTH, 1]
    assert len(sizes[1]) == 218 + 1 + 78 + 1
    assert sum(sizes[1]) == sum(sizes[0])
    assert max(sizes[1]) == SMALL.norm_elements
    torch.testing.assert_close(small, usual, rtol=1e-14, atol=0.0)


def test_scratch_of_its_own_pages_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        usual = loss(dtype)
        calls = Calls(monkeypatch, malloc.mmap, "mmap")
        with use_block_sizes(replace(USUAL, mapped_scratch_bytes=1)):
            small = loss(dtype)
        # In bf16 logits also exist in that type.
        assert calls.count == (2 if dtype is torch.bfloat16 else 1)
        assert all(torch.equal(a, b) for a, b in zip(small, usual, strict=True))


def test_in_bf16_the_head_gets_its_gradient_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a chunk's logits in as many parts of the vocabulary as fit where they were: at least
    three.

    Reference: fp64 of the same rounded numbers, as near as with one chunk.
    """
    exact = [tensor.double() for tensor in loss_of_rounded()]
    usual = loss(torch.bfloat16)
    calls = Calls(monkeypatch, objective.torch, "mm")
    with use_block_sizes(replace(USUAL, loss_chunk_tokens=SMALL.loss_chunk_tokens)):
        small = loss(torch.bfloat16)
    # A chunk's logits and gradients of hidden states are a product each.
    assert calls.count >= (2 + 3) * -(-NUM_TOKENS // 5)
    for a, b, wanted in zip(small, usual, exact, strict=True):
        off, usually = (float((x.double() - wanted).norm() / wanted.norm()) for x in (a, b))
        assert off <= max(1.5 * usually, 0.01)


def loss_of_rounded() -> Tensors:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(1, NUM_TOKENS, WIDTH, generator=generator).bfloat16().double()
    head = torch.randn(VOCAB, WIDTH, generator=generator).bfloat16().double()
    targets = torch.randint(VOCAB, (1, NUM_TOKENS), generator=generator)
    targets[0, 3:11] = -100
    hidden.requires_grad_()
    head.requires_grad_()
    total = nn.functional.cross_entropy(
        (hidden @ head.T).flatten(0, 1), targets.flatten(), reduction="sum"
    )
    return total.detach(), *torch.autograd.grad(1.7 * total, (hidden, head))


def test_a_gpu_has_a_size_of_its_own() -> None:
    sizes = BlockSizes(cpu_dropout_pairs=3, gpu_dropout_pairs=5)
    with use_block_sizes(sizes):
        pairs = [
            counter_rng._get_max_pairs_per_chunk(torch.device(kind)) for kind in ("cpu", "cuda")
        ]
    assert pairs == [3, 5]


@pytest.mark.long  # the first compilation in a process takes seconds
def test_compiled_attention_follows_the_sizes_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    core = AttentionCore(window=11)
    compiled = torch.compile(core, backend="eager")
    calls = Calls(monkeypatch, VisibleKeys, "build_additive_mask")
    generator = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 2, 4, NUM_TOKENS, 8, generator=generator, dtype=torch.float64)
    # Documents, for otherwise blocks share masks.
    documents = torch.arange(NUM_TOKENS).expand(2, -1) // 20
    usual = compiled(q, k, v, None, documents)
    assert calls.count == 0
    for block in (3, 7):
        calls.count = 0
        with use_block_sizes(replace(USUAL, query_block=block)):
            found = compiled(q, k, v, None, documents)
        assert calls.count == -(-NUM_TOKENS // block)
        torch.testing.assert_close(found, usual, rtol=1e-13, atol=1e-13)
    torch._dynamo.reset()


def test_sizes_hold_in_all_threads_until_the_block_ends() -> None:
    seen: list[BlockSizes] = []
    with use_block_sizes(SMALL):
        thread = threading.Thread(target=lambda: seen.append(get_block_sizes()))
        thread.start()
        thread.join()
        with pytest.raises(KeyError), use_block_sizes(USUAL):
            raise KeyError(seen.append(get_block_sizes()))
        seen.append(get_block_sizes())
    assert seen == [SMALL, USUAL, SMALL]
    assert get_block_sizes() == USUAL


def test_every_small_size_is_small_and_none_is_zero() -> None:
    for field in fields(BlockSizes):
        usual, small = getattr(USUAL, field.name), getattr(SMALL, field.name)
        assert small % 2 == 1
        assert usual is None or small < usual
        with pytest.raises(AssertionError, match=field.name):
            replace(USUAL, **{field.name: 0})
