"""The parts of the page that have a right answer: scales, sampling, escaping."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.report.charts import StackChart, draw_stack_chart
from phalanx.report.markup import Html, build_json_script, build_tag, join_html
from phalanx.report.percentiles import compute_median_of_finite, compute_percentile
from phalanx.report.sample import (
    compute_running_mean,
    compute_running_median,
    select_extremes,
    split_into_buckets,
)
from phalanx.report.scales import (
    AxisScale,
    choose_linear_ticks,
    choose_scale,
    choose_whole_number_ticks,
    format_ticks,
)

numbers = st.floats(allow_nan=True, allow_infinity=True, width=32)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 100, [0, 20, 40, 60, 80, 100]),
        (2.2, 5.6, [3, 4, 5]),
        (0, 0.0031, [0, 0.001, 0.002, 0.003]),
    ],
)
def test_ticks_a_person_would_choose(low: float, high: float, ticks: list[float]) -> None:
    assert choose_linear_ticks(low, high, 5) == pytest.approx(ticks)


def test_ticks_of_steps_are_whole() -> None:
    assert choose_whole_number_ticks(1, 3, 8) == [1, 2, 3]


def test_tick_texts_agree_on_a_unit() -> None:
    assert format_ticks([0, 5000, 10000]) == ["0", "5k", "10k"]
    assert format_ticks([0, 2e6]) == ["0", "2M"]
    assert format_ticks([0.001, 1e-5]) == ["0.001", "1e-5"]
    assert format_ticks([500, 1000]) == ["500", "1000"]


@given(st.lists(numbers, max_size=50), st.booleans(), st.booleans(), st.booleans())
def test_a_scale_shows_every_finite_value(
    values: list[float], zero: bool, may_be_log: bool, snug: bool
) -> None:
    scale = choose_scale(values, zero=zero, may_be_log=may_be_log, snug=snug)
    assert scale.low < scale.high
    for value in values:
        if math.isfinite(value) and not (scale.is_log and value <= 0):
            assert -1e-6 <= scale(value) <= 1 + 1e-6
    assert len(scale.tick_values()) < 20


def test_two_decades_make_a_logarithm_where_that_is_allowed() -> None:
    assert choose_scale([0.5, 60], may_be_log=True).is_log
    assert not choose_scale([0.5, 40], may_be_log=True).is_log
    assert not choose_scale([0.5, 60]).is_log
    assert AxisScale(0.1, 100, is_log=True)(1) == pytest.approx(1 / 3)


@given(st.integers(0, 500), st.integers(1, 50))
def test_buckets_cover_every_row_once(count: int, wanted: int) -> None:
    rows = [row for begin, end in split_into_buckets(count, wanted) for row in range(begin, end)]
    assert rows == list(range(count))


@given(st.lists(numbers, min_size=1, max_size=400))
def test_extremes_survive_sampling(ys: list[float]) -> None:
    xs = list(range(len(ys)))
    kept_xs, kept_ys = select_extremes(xs, ys, 20)
    assert len(kept_xs) <= max(20, 1)
    assert kept_xs == sorted(kept_xs)
    finite = [y for y in ys if math.isfinite(y)]
    if finite:
        assert max(y for y in kept_ys if math.isfinite(y)) == max(finite)
        assert min(y for y in kept_ys if math.isfinite(y)) == min(finite)


def test_smoothing_is_a_centred_mean_that_skips_gaps() -> None:
    assert compute_running_mean([1, 2, 3, 4, 5], 3) == pytest.approx([1.5, 2, 3, 4, 4.5])
    assert compute_running_mean([1, math.nan, 3], 3) == pytest.approx([1, 2, 3])
    assert all(math.isnan(value) for value in compute_running_mean([math.nan], 5))


@given(st.lists(numbers, max_size=60), st.integers(1, 20))
def test_a_running_median_is_that_of_the_finite_neighbours(ys: list[float], span: int) -> None:
    for row, value in enumerate(compute_running_median(ys, span)):
        near = sorted(
            y for y in ys[max(row - span // 2, 0) : row + span // 2 + 1] if math.isfinite(y)
        )
        assert value == near[len(near) // 2] if near else math.isnan(value)


def test_percentiles_are_values_that_occurred() -> None:
    assert compute_percentile([1, 2, 3, 4], 0.5) == 2
    assert compute_percentile([float(n) for n in range(1, 101)], 0.99) == 99
    assert math.isnan(compute_percentile([], 0.5))
    assert compute_median_of_finite([3, math.nan, 1, 2]) == 2


def test_only_markup_built_here_passes_unescaped() -> None:
    assert (
        build_tag("td", "a<b", Html("<b>x</b>"), title='"q"')
        == '<td title="&quot;q&quot;">a&lt;b<b>x</b></td>'
    )
    assert join_html(["<", ["&", None, 3]]) == "&lt;&amp;3"
    assert "</script>" not in build_json_script(["</script><!--"], "points")[:-9]


def test_the_columns_that_are_said_to_be_cut_are_those_that_have_a_sign() -> None:
    """Most take 60 ms: the plot ends at 100, and 155 is above it as 282 is."""
    values = [282.55, 155.6, *[60.0] * 60]
    page = draw_stack_chart(
        StackChart(
            title="Step time",
            y_label="milliseconds",
            unit="ms",
            xs=list(range(1, len(values) + 1)),
            parts={"forward": values},
            classes={"forward": "g1"},
        )
    )
    assert page.count('class="cut"') == 2
    assert "2 columns reach past the top, the highest to 282.55 ms." in page
