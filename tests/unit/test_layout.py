"""Ranks and coordinates, against the rank formula of the most-used 3D layouts."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import ExitCode, LayoutError
from phalanx.plan.layout import AXES, Layout, complete_layout_degrees
from phalanx.plan.pipeline.closed_forms import closed_form_bubble
from phalanx.plan.pipeline.cut import LayerCosts, cut_stages
from phalanx.plan.pipeline.generate import generate_schedule
from phalanx.plan.pipeline.simulate import StageCosts


def degrees_of(world_size: int) -> st.SearchStrategy[Layout]:
    """Any layout whose degrees multiply to a power of two."""
    power = world_size.bit_length() - 1
    cuts = st.lists(st.integers(0, power), min_size=4, max_size=4).map(sorted)
    return cuts.map(
        lambda c: Layout(*(2 ** (b - a) for a, b in zip([0, *c], [*c, power], strict=True)))
    )


@settings(max_examples=30, deadline=None)
@given(degrees_of(1024))
def test_coordinates_of_1024_ranks_are_bijective_and_follow_the_formula(layout: Layout) -> None:
    assert layout.world_size == 1024
    seen = set()
    for rank in range(1024):
        place = layout.coordinates(rank)
        assert list(place) == list(AXES)
        number = 0
        for axis in AXES:
            assert 0 <= place[axis] < getattr(layout, axis)
            number = number * getattr(layout, axis) + place[axis]
        assert number == rank
        seen.add(tuple(place.values()))
    assert len(seen) == 1024


THREE_OF_64 = {  # tensor-parallel ranks are neighbours; pipeline stages are farthest apart
    "TP8 x PP4 x DP2": (Layout(pp=4, dp_shard=2, tp=8), {"tp": 1, "dp_shard": 8, "pp": 16}),
    "DP8 x (PP2 x TP4)": (
        Layout(pp=2, dp_replicate=8, tp=4),
        {"tp": 1, "dp_replicate": 4, "pp": 32},
    ),
    "TP8 x PP8": (Layout(pp=8, tp=8), {"tp": 1, "pp": 8}),
}


@pytest.mark.parametrize("name", list(THREE_OF_64))
def test_three_layouts_of_64_ranks(name: str) -> None:
    """Strides of each axis, written out; groups of an axis are the ranks that differ on it
    alone."""
    layout, strides = THREE_OF_64[name]
    assert layout.world_size == 64
    for axis, stride in strides.items():
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(64):
            place = layout.coordinates(rank)
            groups.setdefault(tuple(v for k, v in place.items() if k != axis), []).append(rank)
        for group in groups.values():
            assert group == [group[0] + stride * step for step in range(getattr(layout, axis))]
    assert layout.coordinates(0) == dict.fromkeys(AXES, 0)
    assert [layout.coordinates(rank)["tp"] for rank in range(4)] == [0, 1, 2, 3]


def test_ranks_of_one_replica_read_the_same_share_of_the_batch() -> None:
    layout = Layout(pp=2, dp_replicate=2, dp_shard=3, cp=2, tp=2)
    shares: dict[int, int] = {}
    for rank in range(layout.world_size):
        place = layout.coordinates(rank)
        assert layout.data_parallel_rank(rank) == place["dp_replicate"] * 3 + place["dp_shard"]
        shares[layout.data_parallel_rank(rank)] = shares.get(layout.data_parallel_rank(rank), 0) + 1
    assert shares == dict.fromkeys(range(6), 8)
    assert layout.data_parallel_size == 6


@pytest.mark.parametrize("axis", [*AXES, "ep"])
@pytest.mark.parametrize("degree", [0, -1, 1.5, "2"])
def test_a_degree_is_a_whole_number_of_at_least_one(axis: str, degree: object) -> None:
    with pytest.raises(LayoutError, match=f"{axis} is {degree!r}") as caught:
        Layout(**{axis: degree})  # type: ignore[arg-type]
    assert caught.value.exit_code == ExitCode.JOB


def test_experts_fold_over_dp_shard_and_cp() -> None:
    assert Layout(dp_shard=2, cp=2, ep=4).world_size == 4
    with pytest.raises(LayoutError, match="ep 3 does not divide dp_shard x cp = 4"):
        Layout(dp_shard=4, ep=3)


@pytest.mark.parametrize("rank", [-1, 4, 100])
def test_a_rank_outside_is_refused(rank: int) -> None:
    with pytest.raises(LayoutError, match=f"rank {rank} is outside the 4 ranks"):
        Layout(dp_shard=4).coordinates(rank)


def test_json_comes_back_and_text_names_what_is_split() -> None:
    for degrees in itertools.product((1, 2), repeat=5):
        layout = Layout(*degrees)
        assert Layout.from_json(layout.to_json()) == layout
        assert layout.world_size == math.prod(degrees)
    assert str(Layout(dp_replicate=2, dp_shard=4)) == "dp_replicate=2 x dp_shard=4"
    assert str(Layout()) == "one rank"


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"pp": 4, "tp": 8}, Layout(pp=4, dp_replicate=2, tp=8)),
        ({"pp": 4, "tp": 8, "dp_replicate": 1}, Layout(pp=4, dp_shard=2, tp=8)),
        ({"pp": 2, "tp": 4}, Layout(pp=2, dp_replicate=8, tp=4)),
        ({"pp": 8, "tp": 8}, Layout(pp=8, tp=8)),
        ({"dp_shard": 16}, Layout(dp_replicate=4, dp_shard=16)),
        ({"dp_shard": 8, "dp_replicate": 2, "cp": 4}, Layout(dp_replicate=2, dp_shard=8, cp=4)),
        ({}, Layout(dp_replicate=64)),
    ],
)
def test_what_is_left_open_takes_the_rest_of_64_ranks(
    asked: dict[str, int], wanted: Layout
) -> None:
    assert complete_layout_degrees(64, **asked) == wanted


@pytest.mark.parametrize(
    ("num_ranks", "asked", "wanted"),
    [
        (
            64,
            {"pp": 3, "tp": 8},
            "pp 3 x tp 8 = 24 does not divide the 64 ranks; nearest: pp=4 x tp=8",
        ),
        (
            64,
            {"pp": 4, "tp": 6},
            "pp 4 x tp 6 = 24 does not divide the 64 ranks; nearest: pp=4 x tp=8",
        ),
        (
            64,
            {"pp": 16, "tp": 8},
            "pp 16 x tp 8 = 128 does not divide the 64 ranks; nearest: pp=8 x tp=8",
        ),
        (
            16,
            {"pp": 8, "tp": 8},
            "pp 8 x tp 8 = 64 does not divide the 16 ranks; nearest: pp=2 x tp=8",
        ),
        (64, {"tp": 3}, "tp 3 does not divide the 64 ranks; nearest: tp=4"),
        (
            12,
            {"pp": 5, "tp": 2},
            "pp 5 x tp 2 = 10 does not divide the 12 ranks; nearest: pp=6 x tp=2",
        ),
        (
            7,
            {"pp": 2, "tp": 2},
            "pp 2 x tp 2 = 4 does not divide the 7 ranks; nearest: pp=1 x tp=1",
        ),
        (
            64,
            {"dp_shard": 8, "dp_replicate": 2, "tp": 8},
            (
                "dp_replicate 2 x dp_shard 8 x tp 8 = 128 is not the 64 ranks; nearest:"
                " dp_replicate=1 x dp_shard=8 x tp=8"
            ),
        ),
        (
            8,
            {"dp_shard": 1, "dp_replicate": 1},
            "all degrees are 1, and there are 8 ranks; leave parallel.dp_replicate open",
        ),
    ],
)
def test_a_product_that_does_not_divide_is_refused_with_the_nearest(
    num_ranks: int, asked: dict[str, int], wanted: str
) -> None:
    with pytest.raises(LayoutError) as caught:
        complete_layout_degrees(num_ranks, **asked)
    assert str(caught.value) == wanted
    assert caught.value.exit_code == ExitCode.JOB


def test_a_filled_layout_has_degrees_of_at_least_one() -> None:
    with pytest.raises(LayoutError, match="tp is 0"):
        complete_layout_degrees(64, tp=0)


def test_stages_of_three_layouts_of_64_ranks() -> None:
    """Which ranks hold which stage: TP x DP neighbours share one; a V puts first and last on the
    same."""
    four, two, eight = (layout for layout, _ in THREE_OF_64.values())
    for layout, of_first, of_last in (
        (four, range(16), range(48, 64)),
        (two, range(32), range(32, 64)),
    ):
        schedule = generate_schedule("1f1b", layout.pp, 16)
        held = [schedule.stages_of_rank(layout.coordinates(rank)["pp"]) for rank in range(64)]
        assert [rank for rank in range(64) if held[rank] == (0,)] == list(of_first)
        assert [rank for rank in range(64) if held[rank] == (layout.pp - 1,)] == list(of_last)
    v = generate_schedule("zb-v", eight.pp, 16)
    assert [
        rank for rank in range(64) if 15 in v.stages_of_rank(eight.coordinates(rank)["pp"])
    ] == list(range(8))


def test_70b_on_64_ranks_as_tp8_x_pp8() -> None:
    """80 layers, a batch of 1024 in microbatches of 1, no data parallelism: 10 layers a stage, a
    bubble of 0.7 %."""
    layout = complete_layout_degrees(64, pp=8, tp=8)
    assert (layout.data_parallel_size, layout) == (1, Layout(pp=8, tp=8))
    assert cut_stages(LayerCosts(0, (1,) * 80, 0), layout.pp).num_blocks == (10,) * 8
    assert closed_form_bubble(
        "1f1b", layout.pp, 1024, 1, StageCosts(1.0, 1.0, 1.0)
    ) == pytest.approx(7 / 1031)
