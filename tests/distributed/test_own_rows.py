"""ZeRO-1's reduce-scatter of gradients, beside the mean of all ranks' gradients."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn

from phalanx.core.block_sizes import BlockSizes, use_block_sizes
from phalanx.core.phases import PhaseTimer
from phalanx.mesh.mesh import open_mesh
from phalanx.parallel.data_parallel.own_rows import OwnRowsReduction
from phalanx.parallel.data_parallel.zero1 import find_rows_of_rank
from phalanx.parallel.traffic import GradientTraffic
from phalanx.plan.layout import Layout
from ranks import run_ranks

RANKS = 3
# Rows that divide, that leave the last rank fewer, that leave it none, below a dimension of one, of
# one number each, and a single number, which has none.
SHAPES = [(6, 4), (5, 3), (2, 7), (1, 4, 2), (5,), ()]


def make_parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    tensors = [torch.zeros(shape, dtype=dtype) for shape in SHAPES]
    # One that does not lie in the order of its dimensions has no rows, either.
    return [nn.Parameter(tensor) for tensor in (*tensors, torch.zeros(4, 3, dtype=dtype).t())]


def make_gradient(parameter: nn.Parameter, index: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * index + rank)
    values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return torch.empty_like(parameter, requires_grad=False).copy_(values)


def make_gradients_in_bucket(
    parameters: Sequence[nn.Parameter], rank: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(bucket, views of it), as DDP lays gradients out."""
    bucket = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype)
    views, start = [], 0
    for index, parameter in enumerate(parameters):
        view = bucket.as_strided(parameter.shape, parameter.stride(), start)
        views.append(view.copy_(make_gradient(parameter, index, rank)))
        start += parameter.numel()
    return bucket, views


def expect_gradient(
    parameter: nn.Parameter, index: int, rank: int, *, is_whole: bool
) -> torch.Tensor:
    """This rank's gradient, with the mean over ranks in its rows, or in all of it."""
    gradients = [make_gradient(parameter, index, other).double() for other in range(RANKS)]
    mean, expected = torch.stack(gradients).mean(0), gradients[rank].clone()
    rows = find_rows_of_rank(parameter, rank, RANKS)
    if rows is None or is_whole:
        return mean
    rows.slice_tensor(expected).copy_(rows.slice_tensor(mean))
    return expected


def reduce_rows(rank: int, collectives: str, dtype: torch.dtype, rows_bytes: int) -> list[str]:
    """What is wrong after gradients were averaged in a bucket, twice over, and after a pipeline."""
    wrong = []
    with (
        use_block_sizes(BlockSizes(shared_rows_bytes=rows_bytes)),
        open_mesh(Layout(dp_shard=RANKS), device="cpu", collectives=collectives),
    ):
        group = dist.group.WORLD
        assert group is not None
        parameters = make_parameters(dtype)
        reduction = OwnRowsReduction(group, GradientTraffic())
        buckets = [make_gradients_in_bucket(parameters, rank) for _ in range(2)]
        ends = [reduction.post(parameters, views, bucket) for bucket, views in buckets]
        for end in ends:
            end()
        for index, parameter in enumerate(parameters):
            parameter.grad = make_gradient(parameter, index, rank)
        reduction.average_after_backward(parameters, PhaseTimer())
        ways = {"bucket": buckets[0][1], "second bucket": buckets[1][1]}
        ways["pipeline"] = [p.grad for p in parameters if p.grad is not None]
        for way, gradients in ways.items():
            for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
                # Tensors of a bucket that are small are not told apart.
                is_whole = rows_bytes > 1 and way != "pipeline"
                expected = expect_gradient(parameter, index, rank, is_whole=is_whole)
                if not torch.allclose(gradient.double(), expected, rtol=8 * torch.finfo(dtype).eps):
                    wrong.append(f"{way}: {tuple(parameter.shape)} of {dtype}")
        # What a rank lacks is zero.
        parameters[0].grad = None if rank else make_gradient(parameters[0], 0, 0)
        reduction.average_after_backward(parameters[:1], PhaseTimer())
        assert parameters[0].grad is not None
        mean = make_gradient(parameters[0], 0, 0) / RANKS
        own = slice(2 * rank, 2 * rank + 2)
        if not torch.allclose(parameters[0].grad[own], mean[own]):
            wrong.append("a gradient that ranks lack")
    return wrong


@pytest.mark.parametrize(
    ("collectives", "rows_bytes"), [("gloo", 1), ("shared", 1), ("shared", 1000)]
)
def test_a_rank_gets_the_mean_of_its_rows_and_keeps_its_own_of_the_rest(
    collectives: str, rows_bytes: int
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert run_ranks(RANKS, reduce_rows, collectives, dtype, rows_bytes) == [[]] * RANKS


def keep_no_gradient(rank: int) -> bool:
    with open_mesh(Layout(dp_shard=2), device="cpu", collectives="gloo"):
        group = dist.group.WORLD
        assert group is not None
        parameter = nn.Parameter(torch.zeros(4, 3))
        parameter.grad = torch.ones(4, 3)
        reduction = OwnRowsReduction(group, GradientTraffic())
        reduction.average_after_backward([parameter], PhaseTimer())
        gradient = weakref.ref(parameter.grad)
        parameter.grad = None
        return gradient() is None


def test_a_gradient_is_let_go_when_it_was_reduced() -> None:
    """A bucket of one embedding may be as large as all the rest."""
    assert run_ranks(2, keep_no_gradient) == [True, True]


def average_large_numbers(rank: int) -> list[torch.Tensor]:
    with open_mesh(Layout(dp_shard=2), device="cpu", collectives="gloo"):
        group = dist.group.WORLD
        assert group is not None
        parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.float16)) for shape in ((2,), ())]
        gradients = [torch.full_like(parameter, 4e4).detach() for parameter in parameters]
        OwnRowsReduction(group, GradientTraffic()).post(parameters, gradients)()
        return gradients


def test_a_mean_overflows_only_where_a_gradient_does() -> None:
    """DDP divides what it sends, too: the sum of two such numbers is no float16."""
    for gradients in run_ranks(2, average_large_numbers):
        for gradient in gradients:
            assert torch.equal(gradient, torch.full_like(gradient, 4e4))
