"""What the picture of a pipeline shows, read back out of its markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from phalanx.plan.pipeline.generate import SCHEDULE_NAMES, generate_schedule
from phalanx.plan.pipeline.simulate import StageCosts, Timeline, simulate_timeline
from phalanx.report.pipeline_chart import draw_timeline_chart

COSTS = StageCosts(0.010, 0.012, 0.008)


def timeline(
    name: str, num_ranks: int, num_microbatches: int, costs: StageCosts = COSTS
) -> Timeline:
    schedule = generate_schedule(name, num_ranks, num_microbatches)
    return simulate_timeline(schedule, [costs] * schedule.num_stages, 0.001)


class Reader(HTMLParser):
    """Counts elements by class, and fails on tags that do not match."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.classes: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.classes += (dict(attrs).get("class") or "").split()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def boxes(page: str) -> list[tuple[float, float, str]]:
    """(left, width in per cent, what hovering says) of each action."""
    found = re.findall(r'<i style="left:([\d.]+)%;width:([\d.]+)%" title="([^"]*)">', page)
    return [(float(left), float(width), text) for left, width, text in found]


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_every_action_is_on_the_chart_where_it_happens(name: str) -> None:
    shown = timeline(name, 3, 6)
    page = draw_timeline_chart(shown)
    assert Reader(page).classes.count("lane") == 3
    actions = [action for row in shown.schedule.actions for action in row]
    spans = [span for row in shown.spans_s for span in row]
    assert len(boxes(page)) == len(actions)
    for (left, width, text), action, (begin, end) in zip(boxes(page), actions, spans, strict=True):
        assert text.startswith(f"{action}: ")
        assert left == pytest.approx(100 * begin / shown.step_s, abs=0.001)
        assert width == pytest.approx(100 * (end - begin) / shown.step_s, abs=0.001)
    for rank in range(3):
        assert f"rank {rank}: idle {100 * shown.bubble_of_rank(rank):.1f} %" in page


def test_hovering_says_what_and_how_long() -> None:
    page = draw_timeline_chart(timeline("1f1b", 2, 2))
    assert boxes(page)[0][2] == "0F0: forward of microbatch 0 in stage 0, 10.0 ms"
    assert any(
        text == "1B1: backward of microbatch 1 in stage 1, 20.0 ms" for _, _, text in boxes(page)
    )


def test_the_legend_names_what_there_is() -> None:
    def keys(name: str) -> list[str]:
        return re.findall(
            r'class="block p\w+"></i>([^<]*)<', draw_timeline_chart(timeline(name, 2, 4))
        )

    assert keys("1f1b") == ["forward", "backward", "idle"]
    assert keys("zb-v") == ["forward", "backward, inputs", "backward, weights", "idle"]
    assert keys("dualpipe-v") == [
        "forward",
        "backward",
        "backward, inputs",
        "backward, weights",
        "idle",
    ]


def test_later_stages_of_a_rank_are_paler() -> None:
    """Rank 0 of a V has stages 0 and 3: as many boxes of each colour as it has actions of each."""
    lane = draw_timeline_chart(timeline("zb-v", 2, 4)).split('class="lane"')[1]
    paths = {
        css_class: d.count("M")
        for d, css_class in re.findall(r'<path d="([^"]*)" class="([^"]*)"', lane)
    }
    assert paths == {"pf": 4, "pf late": 4, "pi": 4, "pi late": 4, "pw": 4, "pw late": 4}


def test_planned_stands_over_measured_on_one_scale() -> None:
    planned = timeline("1f1b", 2, 4)
    measured = timeline("1f1b", 2, 4, StageCosts(0.020, 0.024, 0.016))
    page = draw_timeline_chart(planned, measured)
    assert re.findall(r'aria-label="(rank \d, \w+)', page) == [
        f"rank {rank}, {name}" for rank in (0, 1) for name in ("planned", "measured")
    ]
    first, second = boxes(page)[0], boxes(page)[8]
    assert second[1] == pytest.approx(2 * first[1], rel=0.01)
    assert max(left + width for left, width, _ in boxes(page)) == pytest.approx(100, abs=0.01)
    assert "Planned: " in page
    assert "Measured: " in page


@pytest.mark.long
def test_a_large_pipeline_is_a_page_of_ordinary_size() -> None:
    page = draw_timeline_chart(timeline("interleaved", 64, 128))
    assert Reader(page).classes.count("lane") == 16
    assert "Ranks 8 to 55 are left out" in page
    assert not boxes(page)
    assert len(page) < 400_000
    page = draw_timeline_chart(timeline("1f1b", 4, 2000))
    assert "Colours are as high as their share of the time" in page
    assert len(page) < 60_000


def test_a_step_of_no_time_is_not_drawn() -> None:
    nothing = timeline("gpipe", 1, 1, StageCosts(0.0, 0.0, 0.0))
    assert "Not measured" in draw_timeline_chart(nothing)


def test_titles_cannot_become_markup() -> None:
    assert "<script>" not in draw_timeline_chart(timeline("gpipe", 2, 2), title="<script>")
