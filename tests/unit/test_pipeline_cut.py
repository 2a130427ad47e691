"""Stages by cost, against every possible cut; block costs against the FLOPs of the whole model."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import ExitCode, LayoutError
from phalanx.job.shapes.decoder import DecoderShape
from phalanx.job.shapes.measured import MeasuredModule
from phalanx.job.shapes.vit import VitShape
from phalanx.plan.pipeline.costs import ModelPartCosts, compute_stage_costs
from phalanx.plan.pipeline.cut import LayerCosts, StageCut, build_requested_cut, cut_stages

AMOUNTS = st.one_of(st.integers(1, 9), st.floats(0.01, 9), st.sampled_from([0.1, 0.2, 0.3]))


def every_cut(costs: LayerCosts, num_stages: int) -> list[StageCut]:
    """All runs of blocks in which every stage has work."""
    size = len(costs.blocks)
    found = []
    for ends in itertools.combinations_with_replacement(range(size + 1), num_stages - 1):
        counts = tuple(end - begin for begin, end in zip((0, *ends), (*ends, size), strict=True))
        has_work = [count > 0 for count in counts]
        has_work[0] |= costs.embedding > 0
        has_work[-1] |= costs.head > 0
        if all(has_work):
            found.append(StageCut(counts))
    return found


@settings(max_examples=80, deadline=None)
@given(
    st.lists(AMOUNTS, min_size=1, max_size=8),
    st.one_of(st.just(0), AMOUNTS),
    st.one_of(st.just(0), AMOUNTS, st.integers(10, 40)),
    st.data(),
)
def test_no_cut_has_a_cheaper_costliest_stage(
    blocks: list[float], embedding: float, head: float, data: st.DataObject
) -> None:
    exact = LayerCosts(Fraction(embedding), tuple(map(Fraction, blocks)), Fraction(head))
    num_stages = data.draw(st.integers(1, len(blocks) + (embedding > 0) + (head > 0)))
    found = cut_stages(LayerCosts(embedding, tuple(blocks), head), num_stages)

    def rank(stages: StageCut) -> tuple[Fraction, Fraction, tuple[int, ...]]:
        costs = [Fraction(cost) for cost in exact.sum_by_stage(stages)]
        return max(costs), sum((cost**2 for cost in costs), Fraction(0)), stages.num_blocks

    assert found == min(every_cut(exact, num_stages), key=rank)
    assert sum(found.num_blocks) == len(blocks)


def test_equal_blocks_that_do_not_divide_leave_less_to_early_stages() -> None:
    assert cut_stages(LayerCosts(0, (1,) * 10, 0), 4).num_blocks == (2, 2, 3, 3)
    assert cut_stages(LayerCosts(0, (0.1,) * 10, 0), 4).num_blocks == (2, 2, 3, 3)
    assert cut_stages(LayerCosts(0, (1,) * 8, 0), 4).num_blocks == (2, 2, 2, 2)


def test_a_large_head_takes_blocks_from_the_last_stage() -> None:
    assert cut_stages(LayerCosts(0, (1,) * 10, 2), 4).num_blocks == (3, 3, 3, 1)
    assert cut_stages(LayerCosts(0, (1,) * 6, 5), 3).num_blocks == (3, 3, 0)
    assert cut_stages(LayerCosts(2, (1,) * 10, 0), 4).num_blocks == (1, 3, 3, 3)


def test_stages_know_their_blocks() -> None:
    stages = StageCut((3, 3, 0))
    assert stages.block_ranges == ((0, 3), (3, 6), (6, 6))
    assert [stages.stage_of_block(block) for block in range(6)] == [0, 0, 0, 1, 1, 1]
    assert LayerCosts(1, (1,) * 6, 4).sum_by_stage(stages) == (4, 3, 4)
    assert StageCut.from_json(stages.to_json()) == stages


@pytest.mark.parametrize(
    ("costs", "num_stages", "nearest"),
    [
        (LayerCosts(0, (1,) * 4, 0), 5, 4),
        (LayerCosts(0, (1,) * 4, 1), 6, 5),
        (LayerCosts(1, (1,) * 4, 1), 7, 6),
        (LayerCosts(1, (1,) * 4, 1), 0, 1),
    ],
)
def test_more_stages_than_work(costs: LayerCosts, num_stages: int, nearest: int) -> None:
    with pytest.raises(LayoutError) as caught:
        cut_stages(costs, num_stages)
    assert (
        str(caught.value) == f"4 blocks cannot be cut into {num_stages} stages; nearest: {nearest}"
    )
    assert caught.value.exit_code == ExitCode.JOB


@pytest.mark.parametrize("given_cut", [(3, 3, 3, 3), (4, 4, 4, 0), (0, 5, 5, 2), (1, 9, 1, 1)])
def test_a_cut_of_ones_own(given_cut: tuple[int, ...]) -> None:
    assert build_requested_cut(given_cut, 12, 4) == StageCut(given_cut)


@pytest.mark.parametrize(
    ("given_cut", "wanted"),
    [
        (
            (4, 4, 4),
            (
                "blocks are given for 3 stages (4, 4, 4), and there are 4; give 4 numbers, such as"
                " 4, 4, 4, 3"
            ),
        ),
        (
            (4, 4, 4, 4),
            "stages of 4, 4, 4, 4 blocks make 16, and the model has 15; nearest: 3, 4, 4, 4",
        ),
        (
            (4, 4, 3, 2),
            "stages of 4, 4, 3, 2 blocks make 13, and the model has 15; nearest: 4, 4, 4, 3",
        ),
        (
            (7, 0, 4, 4),
            (
                "stage 1 of 7, 0, 4, 4 blocks would have 0 (only the first and the last stage have"
                " work without a block: embedding and head); such as 4, 4, 4, 3"
            ),
        ),
        (
            (-1, 8, 4, 4),
            (
                "stage 0 of -1, 8, 4, 4 blocks would have -1 (only the first and the last stage"
                " have work without a block: embedding and head); such as 4, 4, 4, 3"
            ),
        ),
    ],
)
def test_a_cut_of_ones_own_that_does_not_add_up(given_cut: tuple[int, ...], wanted: str) -> None:
    with pytest.raises(LayoutError) as caught:
        build_requested_cut(given_cut, 15, 4)
    assert str(caught.value) == wanted


def test_a_cut_of_few_blocks() -> None:
    with pytest.raises(LayoutError, match=r"nearest: 0, 1, 1, 0$"):
        build_requested_cut((1, 1, 1, 1), 2, 4)
    with pytest.raises(LayoutError, match="2 blocks cannot be cut into 5 stages; nearest: 2"):
        build_requested_cut((1, 1, 1, 1, 1), 2, 5)


SHAPES = {
    "decoder": DecoderShape(6, 64, 4, 2, 16, 128, 1000, False),
    "windows": DecoderShape(6, 64, 4, 2, 16, 128, 1000, True, sliding_window=16, global_every=3),
    "experts": DecoderShape(
        6,
        64,
        4,
        4,
        16,
        128,
        1000,
        False,
        num_experts=8,
        experts_per_token=2,
        expert_ffn_dim=32,
        num_dense_layers=1,
    ),
    "vit": VitShape(
        4,
        64,
        4,
        4,
        16,
        128,
        image_size=32,
        patch_size=4,
        num_channels=3,
        num_classes=10,
    ),
}


@pytest.mark.parametrize("name", list(SHAPES))
def test_parts_sum_to_the_model(name: str) -> None:
    shape = SHAPES[name]
    flops, whole = shape.flops(48), shape.flops_per_sample(48)
    parts = [flops.embedding, *flops.blocks, flops.head]
    assert sum(part.matmul for part in parts) == whole["matmul"]
    assert sum(part.attention for part in parts) == whole["attention"]
    for num_stages in (1, 2, 3):
        stages = cut_stages(
            ModelPartCosts(shape.count_part_params(), flops).layer_costs, num_stages
        )
        costs = compute_stage_costs(flops, stages, samples=2, flops_per_s=Fraction(10**9))
        at_once = (
            0 if shape.reads_images else 2 * flops.head.matmul
        )  # the gradients that the loss of tokens makes
        assert sum(c.forward_s for c in costs) * 10**9 == 2 * (
            whole["matmul"] + whole["attention"] + at_once
        )
        total = sum(c.forward_s + c.backward_input_s + c.backward_weight_s for c in costs)
        assert total * 10**9 == 2 * whole["training"]


def test_blocks_are_weighed_one_by_one() -> None:
    """By hand: a window, an expert, a head of a large vocabulary."""
    windows = SHAPES["windows"].flops(48).blocks
    assert windows[0] == windows[1] == windows[3]
    assert windows[2].attention == 4 * 64 * 48 * 49 // 2  # 2 x 2 x heads x head_dim for each pair
    assert windows[0].attention == 4 * 64 * (16 * 17 // 2 + 32 * 16)
    experts = SHAPES["experts"].flops(48).blocks
    assert experts[0].matmul - experts[1].matmul == 2 * 48 * (
        3 * 64 * 128 - 2 * 3 * 64 * 32 - 64 * 8
    )
    assert SHAPES["decoder"].flops(48).head.matmul == 2 * 48 * 64 * 1000
    assert SHAPES["decoder"].flops(48).embedding.matmul == 0


def test_recompute_pays_the_forward_of_blocks_again() -> None:
    flops = SHAPES["decoder"].flops(48)
    stages = StageCut((3, 3))
    plain = compute_stage_costs(flops, stages, samples=1, flops_per_s=Fraction(1))
    again = compute_stage_costs(
        flops, stages, samples=1, flops_per_s=Fraction(1), recomputed=range(len(flops.blocks))
    )
    blocks = sum(block.forward for block in flops.blocks[:3])
    assert [a.backward_input_s - p.backward_input_s for a, p in zip(again, plain, strict=True)] == [
        blocks,
        blocks,
    ]
    assert [a.forward_s for a in again] == [p.forward_s for p in plain]


def test_llama_3_8b_gives_its_head_room() -> None:
    """32 blocks and a head of 128,256 x 4096, worth 2.2 blocks at 8192 tokens: the last of 4
    stages has fewer."""
    shape = DecoderShape(32, 4096, 32, 8, 128, 14336, 128256, False)
    flops = shape.flops(8192)
    stages = cut_stages(ModelPartCosts(shape.count_part_params(), flops).layer_costs, 4)
    assert sum(stages.num_blocks) == 32
    assert stages.num_blocks[-1] < min(stages.num_blocks[:-1])
    even = max(
        ModelPartCosts(shape.count_part_params(), flops).layer_costs.sum_by_stage(
            StageCut((8, 8, 8, 8))
        )
    )
    assert (
        max(ModelPartCosts(shape.count_part_params(), flops).layer_costs.sum_by_stage(stages))
        < even
    )


def test_an_own_module_is_not_weighed() -> None:
    assert MeasuredModule("mine:build", 4, 100, 100, 10, 40).flops(48) is None
