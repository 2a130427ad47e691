"""Chunks, block products and their merge, against the reference of a dozen lines and torch's
whole attention."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from models import CPU, shape
from online_softmax import attention_by_blocks
from phalanx.core.errors import LayoutError
from phalanx.job.checks.ranks import check_context_parallel_keys_are_read
from phalanx.job.module_probe import probe_foreign_shape
from phalanx.job.schema import Job
from phalanx.mesh.attention_kernels import (
    CPU_FLASH,
    CUDA_EFFICIENT,
    CUDA_FLASH,
    PLAIN,
    AttentionKernel,
    CpuFlashAttentionKernel,
    UnfusedAttentionKernel,
    choose_attention_kernel,
)
from phalanx.parallel.context.block_attention import (
    BlockAttention,
    KeyValueBlock,
    OnlineSoftmaxOutput,
)
from phalanx.parallel.context.chunks import SequenceChunksOfRanks
from phalanx.plan.degree_checks import check_context_parallel
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan

BALANCES = ("zigzag", "none")


def inputs(
    num_tokens: int, heads: int = 4, kv_heads: int = 4
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def made(count: int) -> torch.Tensor:
        return torch.randn(2, count, num_tokens, 8, generator=generator, dtype=torch.float64)

    return made(heads), made(kv_heads), made(kv_heads)


@pytest.mark.parametrize("size", [1, 5, 16])
def test_the_reference_is_softmax_attention(size: int) -> None:
    q, k, v = (x[0, 0] for x in inputs(16))
    keep = torch.ones(16, 16, dtype=torch.bool).tril()
    keep[:, 3] = False
    keep[3, 2] = True
    whole = F.scaled_dot_product_attention(
        q[None, None], k[None, None], v[None, None], attn_mask=keep
    )
    torch.testing.assert_close(
        attention_by_blocks(q, k, v, keep, size), whole[0, 0], rtol=1e-12, atol=1e-12
    )


def test_the_docs_show_the_reference() -> None:
    source = (Path(__file__).parents[1] / "support" / "online_softmax.py").read_text()
    shown = source.split("# begin reference\n")[1].split("\n\n# end")[0].strip()
    assert shown in (Path(__file__).parents[2] / "docs" / "context-parallel.md").read_text()


@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_share_a_sequence_without_rest(balance: str, size: int) -> None:
    chunks = SequenceChunksOfRanks(size, balance)
    places = [chunks.positions_of_rank_tokens(rank, 24).tolist() for rank in range(size)]
    assert sorted(place for some in places for place in some) == list(range(24))
    assert all(some == sorted(some) and len(some) == 24 // size for some in places)
    assert places[chunks.rank_of_last_token][-1] == 23


@pytest.mark.parametrize("window", [0, 1, 4, 5, 13])
@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_parts_hold_all_that_is_seen_and_without_a_window_nothing_else(
    size: int, balance: str, window: int
) -> None:
    chunks, total = SequenceChunksOfRanks(size, balance), 48
    length = total // chunks.num_chunks
    for rank in range(size):
        for owner in range(size):
            back = (
                chunks.positions_of_rank_tokens(rank, total)[:, None]
                - chunks.positions_of_rank_tokens(owner, total)[None]
            )
            seen = (back >= 0) & ((back < window) if window else True)
            part = chunks.find_visible_rectangle(rank, owner, total, window)
            if part is None:
                assert not seen.any()
                continue
            inside = torch.zeros_like(seen)
            inside[part.query_token_slice(length), part.key_token_slice(length)] = True
            assert not (seen & ~inside).any()
            if not window:
                causal = torch.ones_like(seen).tril() if part.is_causal else torch.ones_like(seen)
                assert torch.equal(seen, inside & causal)


def test_zigzag_gives_all_ranks_equal_work() -> None:
    def work(balance: str) -> list[int]:
        chunks = SequenceChunksOfRanks(4, balance)
        places = [chunks.positions_of_rank_tokens(rank, 64) for rank in range(4)]
        return [int((place + 1).sum()) for place in places]

    assert len(set(work("zigzag"))) == 1
    assert max(work("none")) > 6 * min(work("none"))


def test_a_length_that_does_not_divide_is_refused_with_the_nearest() -> None:
    with pytest.raises(LayoutError, match="8 equal chunks for cp=4") as caught:
        SequenceChunksOfRanks(4).positions_of_rank_tokens(0, 30)
    assert "24 or 32" in str(caught.value)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_the_kernel_of_the_cpu_is_the_plain_one(causal: bool, masked: bool) -> None:
    if causal and masked:
        return  # blocks are one or the other
    q, k, v = inputs(6)
    mask = torch.zeros(2, 1, 6, 6, dtype=torch.float64)
    mask[:, :, :, 4:] = -torch.inf
    given = mask if masked else None
    flash, plain = CpuFlashAttentionKernel(), UnfusedAttentionKernel()
    found, wanted = flash.forward(q, k, v, given, causal), plain.forward(q, k, v, given, causal)
    torch.testing.assert_close(found, wanted)
    out, lse = wanted
    grad, more = torch.ones_like(out), lse + 0.5  # other blocks add to the denominator
    torch.testing.assert_close(
        tuple(flash.backward(grad, q, k, v, out, more, given, causal)),
        tuple(plain.backward(grad, q, k, v, out, more, given, causal)),
    )


@pytest.mark.parametrize(
    ("device", "dtype", "width", "is_masked", "kernel"),
    [
        ("cpu", torch.bfloat16, 64, False, CPU_FLASH),
        ("cuda", torch.bfloat16, 64, False, CUDA_FLASH),
        ("cuda", torch.float16, 256, False, CUDA_FLASH),
        ("cuda", torch.bfloat16, 264, False, CUDA_EFFICIENT),
        ("cuda", torch.bfloat16, 64, True, CUDA_EFFICIENT),
        ("cuda", torch.float32, 64, False, CUDA_EFFICIENT),
        ("cuda", torch.float64, 64, False, PLAIN),
        ("cuda", torch.bfloat16, 60, False, PLAIN),
    ],
)
def test_each_block_has_a_kernel_that_takes_it(
    device: str, dtype: torch.dtype, width: int, is_masked: bool, kernel: AttentionKernel
) -> None:
    """And which takes arguments and gives results as torch declares them, a GPU's kernels
    without one."""
    with FakeTensorMode():
        far = torch.empty(2, 4, 6, width, dtype=dtype, device=device)
        assert choose_attention_kernel(far, far if is_masked else None) is kernel
    q, grad = (torch.empty(2, 4, 6, width, dtype=dtype, device="meta") for _ in range(2))
    k, v = (torch.empty(2, 4, 10, width, dtype=dtype, device="meta") for _ in range(2))
    mask = torch.empty(2, 1, 6, 10, dtype=dtype, device="meta") if is_masked else None
    out, lse = kernel.forward(q, k, v, mask, False)
    assert (out.shape, out.dtype, lse.shape) == (q.shape, dtype, q.shape[:3])
    found = kernel.backward(grad, q, k, v, out, lse, mask, False)
    assert [x.shape for x in found] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("size", [4, 6, 12])
def test_blocks_merge_to_the_whole_forward_and_backward(kv_heads: int, size: int) -> None:
    """Against the reference, and its gradients by autograd: some queries see nothing of a block,
    one not of itself."""
    q, k, v = inputs(12, 4, kv_heads)
    keep = torch.rand(12, 12, generator=torch.Generator().manual_seed(1)) < 0.5
    keep[:, 1] = True
    mask = torch.zeros(1, 1, 12, 12, dtype=torch.float64).masked_fill_(~keep, -torch.inf)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    groups = 4 // kv_heads
    wanted = torch.stack(
        [
            torch.stack([attention_by_blocks(a, leaves[1][b, h // groups], leaves[2][b, h // groups], keep, 5)
                         for h, a in enumerate(row)])
            for b, row in enumerate(leaves[0])
        ]
    )  # fmt: skip
    grad = torch.randn(
        wanted.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    wanted.backward(grad)
    running, products, kv = (
        OnlineSoftmaxOutput.make_empty(q),
        BlockAttention(q),
        torch.stack((k, v)),
    )
    starts = [
        size * place for place in reversed(range(12 // size))
    ]  # out of order, and queries begin blind
    blocks = [
        KeyValueBlock(
            kv, slice(0, 12), slice(at, at + size), mask[..., at : at + size], is_causal=False
        )
        for at in starts
    ]
    for block in blocks:
        products.forward(running, block)
    torch.testing.assert_close(running.out, wanted.detach(), rtol=1e-12, atol=1e-12)
    grad_q = torch.zeros_like(q)
    grad_kv = torch.zeros_like(kv)
    for block in blocks:
        products.backward(grad, running.out, running.lse, block, grad_q, grad_kv)
    for found, leaf in zip((grad_q, *grad_kv), leaves, strict=True):
        torch.testing.assert_close(found, leaf.grad, rtol=1e-10, atol=1e-12)


# The plan


def plan(
    num_ranks: int, model: dict[str, object] | None = None, seq_len: int = 64, **parallel: object
) -> Plan:
    return make_plan(job_of(num_ranks, model, seq_len, **parallel), cluster=CPU, vocab_size=251)


def job_of(
    num_ranks: int, model: dict[str, object] | None = None, seq_len: int = 64, **parallel: object
) -> Job:
    body = {
        "model": {"num_heads": 4, "num_kv_heads": 2, **(model or {})},
        "data": {"seq_len": seq_len},
    }
    return Job.model_validate({**body, "parallel": {"ranks": num_ranks, **parallel}})


@pytest.mark.parametrize(
    ("num_ranks", "parallel", "name", "layout"),
    [
        (2, {"cp": 2}, "ddp", Layout(cp=2)),
        (2, {"cp": 2, "zero_stage": 3}, "zero3", Layout(cp=2)),
        (4, {"cp": 2, "dp_shard": 2}, "zero3", Layout(dp_shard=2, cp=2)),
        (4, {"cp": 2}, "ddp", Layout(dp_replicate=2, cp=2)),
        (
            4,
            {"cp": 2, "dp_replicate": 2, "dp_shard": 1, "zero_stage": 3},
            "zero3",
            Layout(dp_replicate=2, cp=2),
        ),
        (4, {"cp": 2, "tp": 2}, "ddp", Layout(cp=2, tp=2)),
    ],
)
def test_degrees_become_layouts(
    num_ranks: int, parallel: dict[str, object], name: str, layout: Layout
) -> None:
    found = plan(num_ranks, **parallel)
    assert (found.chosen.name, found.layout) == (name, layout)
    assert found.targets_per_rank == found.micro_batch_size * found.num_microbatches * 64 // 2


def test_ulysses_cuts_no_further_than_it_must() -> None:
    assert plan(2, cp=2).parallel.cp_load_balance == "zigzag"
    assert plan(2, seq_len=66, cp=2, cp_attention="ulysses").parallel.cp_load_balance == "none"


def test_each_rank_keeps_the_activations_of_its_tokens() -> None:
    model: dict[str, object] = {"num_kv_heads": 4}
    one, two = plan(1, model).chosen.predicted_bytes, plan(2, model, cp=2).chosen.predicted_bytes
    assert two["parameters"] == one["parameters"]
    # A rank has all sequences of the batch, and half of each.
    assert one["activations"] / two["activations"] == pytest.approx(2, rel=0.01)
    # Blocks of keys and values are there where the feed-forward has freed more than they take.
    assert two["communication"] == one["communication"] == 0


@pytest.mark.parametrize(
    ("model", "seq_len", "parallel", "train", "words"),
    [
        ({}, 66, {"cp": 2}, {}, "nearest seq_len: 64 or 68"),
        ({}, 66, {"cp": 4, "cp_load_balance": "none"}, {}, "nearest seq_len: 64 or 68"),
        (
            {},
            64,
            {"cp": 4, "cp_attention": "ulysses"},
            {},
            "nearest: 2, or parallel.cp_attention=ring",
        ),
        (
            {"num_kv_heads": 1},
            64,
            {"cp": 2, "cp_attention": "ulysses"},
            {},
            "needs; set parallel.cp_attention=ring",
        ),
        ({"preset": "vit-l16"}, 64, {"cp": 2}, {}, "reads images"),
        ({"objective": "own:loss"}, 64, {"cp": 2}, {}, "leave model.objective or parallel.cp out"),
        ({}, 64, {"cp": 2, "compress": "bf16"}, {}, "for ddp alone"),
        ({}, 64, {"cp": 2}, {"compile": True}, "train.compile=false"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(
    model: dict[str, object],
    seq_len: int,
    parallel: dict[str, object],
    train: dict[str, object],
    words: str,
) -> None:
    is_preset = "preset" in model
    body = {
        "model": model if is_preset else {"num_heads": 4, "num_kv_heads": 2, **model},
        "train": train,
    }
    job = Job.model_validate(
        {**body, "data": {"seq_len": seq_len}, "parallel": {"ranks": 4, **parallel}}
    )
    with pytest.raises(LayoutError) as caught:
        make_plan(job, cluster=CPU, vocab_size=None if is_preset else 251)
    assert words in str(caught.value)


def test_models_of_hugging_face_are_refused_by_the_plan() -> None:
    job = Job.model_validate({"model": {"kind": "hf:anywhere"}, "parallel": {"ranks": 2, "cp": 2}})
    with pytest.raises(LayoutError, match="those of Hugging Face have no such seam"):
        check_context_parallel(job, shape())


@pytest.mark.parametrize("has_seam", [False, True])
def test_an_own_module_without_the_seam_is_refused_by_the_plan(
    tmp_path: Path, has_seam: bool
) -> None:
    """As its ranks would refuse it: what they look for, the probe looks for."""
    name = f"seam_{has_seam}"
    (tmp_path / f"{name}.py").write_text(
        SEAM if has_seam else SEAM.replace("self.core =", "self.kernel =")
    )
    sys.path.insert(0, str(tmp_path))
    try:
        shape = probe_foreign_shape(f"{name}:Model", {})
    finally:
        sys.path.remove(str(tmp_path))
    job = Job.model_validate(
        {"model": {"kind": f"{name}:Model"}, "parallel": {"ranks": 2, "cp": 2}}
    )
    if has_seam:
        assert make_plan(job, cluster=CPU, shape=shape).layout.cp == 2
        return
    with pytest.raises(
        LayoutError,
        match=f"cp needs a model whose attention can be swapped, and {name}:Model has no",
    ):
        make_plan(job, cluster=CPU, shape=shape)


SEAM = """
from torch import nn

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.core = nn.Identity()
        self.q = nn.Linear(4, 4)

class Model(nn.Module):
    is_per_token_outside_regions = True
    def __init__(self):
        super().__init__()
        self.attention_mask = lambda *args: None
        self.layers = nn.ModuleList([Attention(), Attention()])
    def forward(self, inputs, positions=None):
        return inputs
"""


def test_keys_that_nothing_reads_are_told() -> None:
    body = {"parallel": {"cp_attention": "ulysses", "cp_load_balance": "none"}}
    found = [
        ".".join(map(str, finding.path))
        for finding in check_context_parallel_keys_are_read.run(Job.model_validate(body))
    ]
    assert found == ["parallel.cp_attention", "parallel.cp_load_balance"]
