"""The plain statements of what compressions send, beside the hooks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from phalanx.core.phases import PhaseTimer
from phalanx.mesh.mesh import Mesh, open_mesh
from phalanx.parallel.hooks import bf16, fp16, int8, powersgd
from phalanx.parallel.hooks._protocol import CompressionOptions, Gradient
from phalanx.parallel.traffic import GradientTraffic
from phalanx.parallel.wire import Wire
from phalanx.plan.layout import Layout
from phalanx.verify.plain.compression import (
    find_half_int8_levels,
    plain_cast_excess,
    plain_int8_excess,
    plain_powersgd_matrix_error,
    plain_powersgd_step,
    plain_topk_excess,
    round_to_16_bits,
)
from ranks import run_ranks

GRADIENT = torch.tensor([[0.5, -4.0, 0.1], [3.0, 0.0, -2.0]])


def _keep(*sent: tuple[int, int]) -> torch.Tensor:
    kept = GRADIENT.clone()
    for row, column in sent:
        kept[row, column] = 0.0
    return kept


def test_the_largest_elements_are_no_excess() -> None:
    assert plain_topk_excess(GRADIENT, _keep((0, 1), (1, 0)), 1 / 3) <= 0
    assert plain_topk_excess(GRADIENT, torch.zeros(2, 3), 1.0) <= 0
    assert plain_topk_excess(torch.zeros(4), torch.zeros(4), 0.5) <= 0


def test_a_smaller_element_in_place_of_a_larger_one_is_an_excess() -> None:
    assert plain_topk_excess(GRADIENT, _keep((0, 1), (0, 2)), 1 / 3) == pytest.approx(2.9 / 4.0)


def test_another_number_of_elements_is_an_excess() -> None:
    for sent in ([(0, 1)], [(0, 1), (1, 0), (1, 2)]):
        assert plain_topk_excess(GRADIENT, _keep(*sent), 1 / 3) == float("inf")


# The hooks themselves, on two ranks, beside their definitions

OPTIONS = CompressionOptions(rank=2, fraction=0.1, seed=0)
SHAPE = (30, 40)


def _reduce_twice(mesh: Mesh, hook: Any) -> list[tuple[Any, ...]]:
    """(gradient with what was kept, mean of the ranks', what arrived, what is kept, Q before) of
    each of two steps."""
    wire = Wire(mesh.data_parallel_group(), GradientTraffic(), PhaseTimer())
    generator = torch.Generator().manual_seed(mesh.rank)
    kept, steps = torch.zeros(SHAPE, dtype=torch.float64), []
    slots = hook.shared_slots("matrix", kept)
    for _ in range(2):
        full = torch.randn(SHAPE, generator=generator, dtype=torch.float64) + kept
        mean = mesh.all_reduce_sum(full.clone()) / mesh.world_size
        gradient = Gradient("matrix", full.clone(), slots)
        q = slots["q"].clone() if slots else None
        (kept,) = hook.reduce([gradient], wire)
        steps.append((full, mean, gradient.tensor, kept, q))
    return steps


def _judge_hooks(rank: int) -> None:
    with open_mesh(Layout(dp_replicate=2), device="cpu") as mesh:
        for full, mean, _, kept, _ in _reduce_twice(mesh, int8.build(OPTIONS)):
            excess_of = partial(plain_int8_excess, full, mean, _average_half_levels(mesh, full))
            assert excess_of(kept, 2) <= 0
            largest = kept.abs().max() / full.abs().max()
            assert 0 < excess_of(3 * kept, 2) < 3 * largest
        first, second = _reduce_twice(mesh, powersgd.build(OPTIONS))
        for full, mean, arrived, _, q in (first, second):
            rank_norm = float(mesh.all_reduce_sum(full.norm()) / mesh.world_size)
            sent, allowed = plain_powersgd_step(mean, q, rank_norm)
            assert allowed < 1e-12
            assert (sent - arrived).norm() <= allowed * mean.norm()
        # With the first step's matrix something else would be sent.
        cold, _ = plain_powersgd_step(second[1], first[4], 1.0)
        assert (cold - second[2]).norm() > 0.1 * second[1].norm()
        # The matrix that the first step leaves is the one with which the second begins.
        assert plain_powersgd_matrix_error(first[2], second[4]) < 1e-12
        assert plain_powersgd_matrix_error(first[2], first[4]) > 0.1


def _average_half_levels(mesh: Mesh, full: torch.Tensor) -> torch.Tensor:
    """What `find_half_int8_levels` says of the ranks' gradients, in the mean. Collective."""
    return mesh.all_reduce_sum(find_half_int8_levels(full, mesh.world_size)) / mesh.world_size


def _judge_int8_of_a_rank_without_gradient(rank: int) -> None:
    # The 1s cancel. Rounded by their level of 1/127, 21.51 becomes 22, and the mean's level is
    # larger than the mean says; 11 is half of 22, and no multiple of that level: its rounding is as
    # far off as it can be. Rank 0, which has nothing of its own, keeps that.
    matrix = torch.zeros(3, 3, dtype=torch.float64)
    if rank == 1:
        matrix[0] = torch.tensor([127.0, 21.51, 11.0]) / 127
    elif rank == 2:
        matrix[0, 0] = -1.0
    with open_mesh(Layout(dp_replicate=3), device="cpu") as mesh:
        wire = Wire(mesh.data_parallel_group(), GradientTraffic(), PhaseTimer())
        mean = mesh.all_reduce_sum(matrix.clone()) / 3
        (kept,) = int8.build(OPTIONS).reduce([Gradient("matrix", matrix.clone(), {})], wire)
        if rank == 0:
            assert kept[0, 2].abs() > 1.02 * 3 * mean.max() / 127 / 2
        assert plain_int8_excess(matrix, mean, _average_half_levels(mesh, matrix), kept, 3) <= 0


def _judge_casts(rank: int) -> None:
    """A gradient of large and of tiny elements."""
    generator = torch.Generator().manual_seed(rank)
    size = 10.0 ** -torch.arange(0.0, 12.0, 0.01, dtype=torch.float64)
    full = torch.randn(len(size), generator=generator, dtype=torch.float64) * size
    with open_mesh(Layout(dp_replicate=3), device="cpu") as mesh:
        wire = Wire(mesh.data_parallel_group(), GradientTraffic(), PhaseTimer())
        largest = float(torch.stack(mesh.all_gather(full.abs().max())).max())
        for kind, hook in (("bf16", bf16), ("fp16", fp16)):
            gradient = Gradient("vector", full.clone(), {})
            assert hook.build(OPTIONS).reduce([gradient], wire) == []
            sent = round_to_16_bits(full, kind, largest, 3)
            expected = mesh.all_reduce_sum(sent.clone()) / 3
            sizes = mesh.all_reduce_sum(sent.abs()) / 3
            excess_of = partial(
                plain_cast_excess,
                expected=expected,
                size=sizes,
                kind=kind,
                largest=largest,
                num_ranks=3,
            )
            assert excess_of(gradient.tensor) <= 0
            # Two more roundings of the type, and a sum that none was rounded for.
            assert excess_of(gradient.tensor * (1 + 4 * torch.finfo(_DTYPE[kind]).eps)) > 0
            assert excess_of(full.clone()) > 0
        unscaled = mesh.all_reduce_sum(full.half().double()) / 3
        assert excess_of(unscaled) > 0


_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}


def test_casts_round_once_and_fp16_is_scaled() -> None:
    run_ranks(3, _judge_casts)


def test_int8_keeps_what_rounding_of_other_ranks_gradients_leaves() -> None:
    run_ranks(3, _judge_int8_of_a_rank_without_gradient)


def test_hooks_send_what_their_definitions_say() -> None:
    run_ranks(2, _judge_hooks)
