"""Which rank is slow by itself, and in which steps: own time with waiting removed."""

from __future__ import annotations

import math

from phalanx.report import formats
from phalanx.report.bottleneck.step_table import MIN_ROWS, name_attempt_of_steps
from phalanx.report.facts import RunFacts
from phalanx.report.figure import draw_legend
from phalanx.report.heat import draw_heat_axis, draw_heat_cells
from phalanx.report.markup import Html, build_table, build_tag
from phalanx.report.sections.raw import build_key_of_slow_rank, draw_why_link
from phalanx.report.self_time import SelfTimeMap

# By the share of a step that a rank takes longer than its peers, from the left on: the class of
# the colour, and words.
EXCESS_LEVELS = (
    (-0.10, 1, "10 % faster or more"),
    (-0.03, 3, "3 to 10 % faster"),
    (0.03, 4, "as its peers"),
    (0.10, 5, "3 to 10 % slower"),
    (0.25, 6, "10 to 25 % slower"),
    (math.inf, 7, "more"),
)
_NUM_TICKS = 8
_TALL_PX, _LOW_PX = 22, 11
_MAX_TALL_ROWS = 16


def has_self_times(facts: RunFacts) -> bool:
    return facts.self_times is not None


def choose_excess_level(excess_s: float, step_s: float) -> int:
    """The colour class (h1 to h7) of seconds beyond the peers, in a step of `step_s`."""
    share = excess_s / step_s if step_s > 0 else 0.0
    return next(level for most, level, _ in EXCESS_LEVELS if share <= most)


def render_stragglers(facts: RunFacts) -> Html | None:
    """The section; None of one rank alone, or before steps were recorded."""
    times = facts.self_times
    if times is None:
        return None
    return build_tag(
        "section",
        build_tag("h2", "Ranks side by side"),
        build_tag("p", _describe_slowest_rank(times)),
        _draw_map(times),
        _render_slowest_ranks(facts, times),
        id="ranks",
    )


def _describe_slowest_rank(times: SelfTimeMap) -> str:
    slow = times.slowest[0]
    level = choose_excess_level(slow.excess_s, times.step_s)
    if level <= 4:
        return "No rank takes clearly longer by itself than its peers."
    share = formats.format_percent(slow.excess_s, times.step_s)
    peers, remark = "its peers", ""
    if times.has_stages_of_one_rank:
        peers = "all ranks"
        remark = " Each rank is a pipeline stage of its own: the cut may give it more work."
    first, last = times.first_step, times.steps[-1][1]
    if last - first + 1 < MIN_ROWS:
        remark += " These are too few steps to tell that from chance."
    basis = f"in the mean of steps {first:,} to {last:,}"
    if first == last:
        basis = f"in step {first:,} alone"
    return (
        f"Rank {slow.rank} takes {formats.format_milliseconds(slow.excess_s)} longer by itself than"
        f" the median of {peers}, {basis}: {share} of a step (of the median one).{remark}"
    )


def _draw_map(times: SelfTimeMap) -> Html:
    height = _LOW_PX
    if len(times.rows) <= _MAX_TALL_ROWS:
        height = _TALL_PX
    rows = [
        _draw_row(ranks, values, times, height)
        for ranks, values in zip(times.ranks, times.rows, strict=True)
    ]
    first, last = times.first_step, times.steps[-1][1]
    names = [name for _, _, name in EXCESS_LEVELS]
    classes = {name: f"h{level}" for _, level, name in EXCESS_LEVELS}
    attempt = name_attempt_of_steps(times.attempt, times.is_of_last_attempt)
    note = (
        f"Across: steps {first:,} to {last:,} of {attempt}, its first ones left out. Own"
        " time is a step without the phases collective and pipeline, in which ranks wait for"
        f" others; colour: how much longer than the median of {_name_peers(times)}, as a share of a"
        " step."
    )
    if times.steps_per_value > 1:
        note += (
            f" Ranks of this run record sums over about {times.steps_per_value:,.0f} steps: a"
            " column is the mean of those up to the step that is named."
        )
    elif any(first != end for first, end in times.steps):
        note += " Each column is the mean of several steps."
    if any(len(ranks) > 1 for ranks in times.ranks):
        note += " Each row is the slowest of several ranks."
    return build_tag(
        "figure",
        build_tag(
            "figcaption",
            build_tag("h3", "Own time of each rank, waiting removed"),
            draw_legend(names, classes),
        ),
        build_tag("div", rows, draw_heat_axis(_list_tick_texts(times), "mean"), class_="heat"),
        build_tag("p", note, class_="note"),
        build_tag("details", build_tag("summary", "Data table"), _build_map_table(times)),
        class_="chart",
    )


def _name_peers(times: SelfTimeMap) -> str:
    if times.has_stages_of_one_rank:
        return "all ranks, of which no two have the same work"
    return "the ranks with the same work"


def _build_map_table(times: SelfTimeMap) -> Html:
    """A line for each row of the map."""
    rows = []
    for ranks, values in zip(times.ranks, times.rows, strict=True):
        worst = max(range(len(values)), key=values.__getitem__)
        num_slow = sum(choose_excess_level(value, times.step_s) > 4 for value in values)
        rows.append(
            [
                _format_rank_range(ranks),
                _format_signed_milliseconds(max(times.mean_excess_s[rank] for rank in ranks)),
                _format_signed_milliseconds(values[worst]),
                f"{times.steps[worst][1]:,}",
                f"{num_slow} of {len(values)}",
            ]
        )
    head = ["rank", "mean", "largest", "in the column up to step", "columns slower"]
    return build_table(head, rows, css_class="num")


def _format_rank_range(ranks: tuple[int, ...]) -> str:
    if len(ranks) > 1:
        return f"{ranks[0]}–{ranks[-1]}"
    return f"{ranks[0]}"


def _draw_row(
    ranks: tuple[int, ...], values: tuple[float, ...], times: SelfTimeMap, height: int
) -> list[Html]:
    name = _format_rank_range(ranks)
    mean_s = max(times.mean_excess_s[rank] for rank in ranks)
    levels = [choose_excess_level(value, times.step_s) for value in values]
    num_slow = sum(level > 4 for level in levels)
    label = (
        f"rank {name}: {_format_signed_milliseconds(mean_s)} of its peers in the mean, slower in"
        f" {num_slow} of {len(levels)} columns"
    )
    return [
        build_tag("span", name, class_="heatname"),
        draw_heat_cells(levels, label, num_cells=len(levels), height_px=height),
        build_tag("span", _format_signed_milliseconds(mean_s), class_="heatend"),
    ]


def _format_signed_milliseconds(seconds: float) -> str:
    sign = "+"
    if seconds < 0:
        sign = "−"
    return f"{sign}{formats.format_milliseconds(abs(seconds))}"


def _list_tick_texts(times: SelfTimeMap) -> list[str]:
    count = len(times.steps)
    period = max(math.ceil(count / _NUM_TICKS), 1)
    texts = []
    for index, (first, _) in enumerate(times.steps):
        texts.append(f"{first:,}" if index % period == 0 else "")
    return texts


def _render_slowest_ranks(facts: RunFacts, times: SelfTimeMap) -> Html:
    rows = []
    for slow in times.slowest:
        why = draw_why_link(facts, build_key_of_slow_rank(slow.rank), f"rank {slow.rank}")
        rows.append(
            [
                str(slow.rank),
                formats.format_milliseconds(slow.self_s),
                _format_signed_milliseconds(slow.excess_s),
                f"{slow.worst_step:,}",
                [_format_signed_milliseconds(slow.worst_excess_s), " ", why],
            ]
        )
    head = ["rank", "own time", "beside its peers", "slowest in step", "there"]
    title = "The slowest ranks"
    if len(times.mean_excess_s) <= len(times.slowest):
        title = "Ranks by own time"
    return build_tag(
        "div",
        build_tag("h3", title),
        build_table(head, rows, css_class="num"),
        class_="block",
    )
