"""Ranks and coordinates, against the rank formula of the most-used 3D layouts."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import ExitCode, LayoutError
from phalanx.plan.layout import AXES, Layout


def degrees_of(world_size: int) -> st.SearchStrategy[Layout]:
    """Any layout whose degrees multiply to a power of two."""
    power = world_size.bit_length() - 1
    cuts = st.lists(st.integers(0, power), min_size=4, max_size=4).map(sorted)
    return cuts.map(lambda c: Layout(*(2 ** (b - a) for a, b in zip([0, *c], [*c, power], strict=True))))


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
    "DP8 x (PP2 x TP4)": (Layout(pp=2, dp_replicate=8, tp=4), {"tp": 1, "dp_replicate": 4, "pp": 32}),
    "TP8 x PP8": (Layout(pp=8, tp=8), {"tp": 1, "pp": 8}),
}


@pytest.mark.parametrize("name", list(THREE_OF_64))
def test_three_layouts_of_64_ranks(name: str) -> None:
    """Strides of each axis, written out; groups of an axis are the ranks that differ on it alone."""
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
