"""What came to the experts, on the page of a run, on the console and for programs: all say the
same numbers."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from test_report import EVIL, Page, Run, page_of, step

from phalanx.observe.console import open_console
from phalanx.observe.events import ExpertsLoaded, wrap_event_in_envelope
from phalanx.observe.tail import parse_valid_event_line
from phalanx.report.reduce import collect_run_facts
from phalanx.report.sections.experts import LOAD_LEVELS, choose_heat_level
from phalanx.report.summary import build_run_json

EVEN, SKEWED = [8, 8, 8, 8], [0, 4, 4, 24]  # the busiest has 3 times the mean


def loaded(number: int, layers: dict[str, list[int]], dropped: int = 0) -> ExpertsLoaded:
    return ExpertsLoaded(number, layers, dict.fromkeys(layers, dropped))


def section(page: Page) -> str:
    found = re.search(r'<section id="experts">(.*?)</section>', page.source, re.DOTALL)
    return found[1] if found else ""


def staged(tmp_path: Path) -> Run:
    """Two stages of a pipeline, each of which tells its own layers; a restart that does step 20
    again."""
    run = Run(tmp_path)
    run.start()
    run.steps(range(1, 21))
    run.say(loaded(1, {"blocks.1.moe": SKEWED}))
    run.say(loaded(1, {"blocks.10.moe": EVEN}, dropped=8), rank=1)
    run.say(loaded(20, {"blocks.1.moe": [32, 0, 0, 0]}))
    run.start(attempt=1, at=19)
    run.steps([20], attempt=1)
    run.say(loaded(20, {"blocks.10.moe": SKEWED}, dropped=2), rank=1, attempt=1)
    run.say(loaded(20, {"blocks.2.moe": EVEN}), attempt=1)
    return run


def test_stages_are_put_together_and_what_was_done_again_counts_once(tmp_path: Path) -> None:
    staged(tmp_path)
    experts = collect_run_facts(tmp_path).experts
    assert (experts.steps, experts.worst) == ([1, 20], [3.0, 3.0])
    assert experts.dropped_share == [8 / 64, 2 / 64]
    assert list(experts.tokens.items()) == [("blocks.2.moe", EVEN), ("blocks.10.moe", SKEWED)]
    assert build_run_json(collect_run_facts(tmp_path))["experts"] == {
        "step": 20,
        "max_over_mean": 3.0,
        "dropped_share": 2 / 64,
    }


def test_the_page_says_who_is_busiest_and_draws_each_layer(tmp_path: Path) -> None:
    page = page_of(staged(tmp_path))
    text = page.text.replace("\u00a0", " ")
    assert (
        "At step 20 the busiest is expert 3 of blocks.10.moe, with 3.00 times the mean. 1 expert"
        " got nothing." in text
    )
    assert "3.1 % of the choices were dropped" in text
    rows = re.findall(
        r'aria-label="(blocks[^:"]*): the busiest of 4 experts has (\S+) times', section(page)
    )
    assert rows == [("blocks.2.moe", "1.00"), ("blocks.10.moe", "3.00")]
    assert "Choices that were dropped" in text
    assert "#experts" in page.attributes("href")


def test_a_run_without_experts_has_no_such_section(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.start()
    run.steps([1])
    run.say(loaded(1, {"blocks.0.moe": [0, 0]}))
    page = page_of(run)
    assert "#experts" not in page.attributes("href")
    assert section(page) == ""
    assert build_run_json(collect_run_facts(tmp_path))["experts"] is None


def test_each_cell_has_the_colour_of_its_share() -> None:
    shares = (0, 0.2, 0.5, 0.6, 1, 1.9, 3, 30)
    assert [choose_heat_level(share, 1.0) for share in shares] == list(range(len(LOAD_LEVELS)))
    assert choose_heat_level(0, 0.0) == 0


@pytest.mark.parametrize("columns", [8, 64, 256])
def test_cells_cover_every_expert_once(tmp_path: Path, columns: int) -> None:
    tokens = [(number * 7) % 11 for number in range(columns)]
    run = Run(tmp_path)
    run.start()
    run.steps([1])
    run.say(loaded(1, {"blocks.0.moe": tokens}))
    mean = sum(tokens) / columns
    found = {}
    for d, level in re.findall(r'<path d="([^"]*)" class="h(\d)"', section(page_of(run))):
        for begin, width in re.findall(r"M(\d+) 0h(\d+)", d):
            found |= {int(begin) + cell: int(level) for cell in range(int(width))}
    assert found == {number: choose_heat_level(count, mean) for number, count in enumerate(tokens)}


def test_numbers_that_nobody_can_count_break_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.start()
    run.steps([1])
    run.say(
        loaded(
            1,
            {EVIL: [3, 1], "blocks.1.moe": [], "blocks.2.moe": [1, -1], "blocks.3.moe": [2, 2, 2]},
        )
    )
    assert "1.50 times the mean" in page_of(run).text


def test_events_with_other_types_are_not_read() -> None:
    line = json.loads(wrap_event_in_envelope(loaded(1, {"a": [1]}), rank=0, attempt=0).to_line())
    assert parse_valid_event_line(json.dumps(line).encode()) is not None
    assert (
        parse_valid_event_line(json.dumps(line | {"tokens_by_expert": {"a": "1"}}).encode()) is None
    )


def test_the_console_has_a_word_for_it() -> None:
    stream = io.StringIO()
    console = open_console(stream, total_steps=10, log_every=1, is_terminal=False)
    console.write(wrap_event_in_envelope(step(1), rank=0, attempt=0))
    console.write(wrap_event_in_envelope(loaded(2, {"blocks.1.moe": EVEN}), rank=0, attempt=0))
    console.write(
        wrap_event_in_envelope(loaded(2, {"blocks.2.moe": SKEWED}, dropped=8), rank=2, attempt=0)
    )
    console.write(wrap_event_in_envelope(step(2), rank=0, attempt=0))
    first, second = stream.getvalue().splitlines()
    assert "experts" not in first
    assert "  experts 3.00x dropped 25.0%" in second
