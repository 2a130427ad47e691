"""The waterfall, the memory bars and the rules in a terminal: wide, narrow, coloured, piped."""

from __future__ import annotations

import itertools
import re

import pytest

from phalanx.plan.advice.check_rules import evaluate_rules_of_thumb
from phalanx.plan.advice.decision_tables import look_up_decision_tables
from phalanx.plan.advice.facts import BatchFacts, HardwareFacts, ModelFacts, PlanFacts
from phalanx.plan.advice.terminal import (
    TerminalStyle,
    draw_memory_bars,
    draw_waterfall,
    format_rule_verdicts,
    format_table_answers,
)
from phalanx.plan.advice.waterfall import build_waterfall, list_memory_phases
from phalanx.plan.layout import Layout

GIB = 2**30
TERMS = {"ideal": 1.0, "matmul loss": 0.5, "attention": 0.0, "tp": 0.25, "jitter": 0.25}
MEMORY = {
    "parameters": 4 * GIB,
    "gradients": 4 * GIB,
    "optimizer": 8 * GIB,
    "activations": 16 * GIB,
    "loss": GIB,
    "communication": GIB,
    "staging": GIB,
}
FACTS = PlanFacts(
    ModelFacts("llama3-8b", 8_030_000_000, 8_030_000_000, 32, 4096, 128_256, 32, 8),
    HardwareFacts("h100-sxm", 64, 8, 80 * GIB, 8, 989e12, 3350, 450, 50),
    Layout(dp_replicate=4, tp=16),
    BatchFacts(8192, 1, 4, 256),
    terms_s=TERMS,
)
PLAIN = TerminalStyle()
WIDE = TerminalStyle(100, has_bars=True, has_colour=True)
NARROW = TerminalStyle(44, has_bars=True)


def remove_colours(text: str) -> str:
    return re.sub(r"\x1b\[\d+m", "", text)


def test_waterfall_rows_add_up_and_each_begins_where_the_last_ended() -> None:
    rows = build_waterfall(TERMS, goodput=0.8)
    assert [row.term for row in rows] == ["ideal", "matmul loss", "tp", "jitter", "goodput"]
    assert sum(row.seconds for row in rows[:-1]) == pytest.approx(2.0)
    assert rows[-1].seconds == pytest.approx(0.5)
    for before, row in itertools.pairwise(rows):
        assert row.start_s == pytest.approx(before.start_s + before.seconds)
    assert build_waterfall({}) == []
    assert build_waterfall({"ideal": float("nan")}) == []


def test_waterfall_piped_has_numbers_and_no_bars() -> None:
    lines = draw_waterfall(build_waterfall(TERMS), PLAIN)
    assert lines[0].split() == ["products", "at", "peak", "1,000", "ms", "50.0%"]
    assert not any("█" in line or "\x1b" in line for line in lines)


@pytest.mark.parametrize("style", [WIDE, NARROW, TerminalStyle(10, has_bars=True)])
def test_lines_keep_to_the_terminal(style: TerminalStyle) -> None:
    lines = draw_waterfall(build_waterfall(TERMS, 0.9), style)
    lines += draw_memory_bars(MEMORY, 75 * GIB, style)
    lines += format_table_answers(look_up_decision_tables(FACTS), style)
    assert max(len(remove_colours(line)) for line in lines[:5]) <= style.line_width
    for line in draw_memory_bars(MEMORY, 75 * GIB, style):
        assert len(remove_colours(line)) <= style.line_width


def test_bars_of_the_waterfall_do_not_overlap() -> None:
    lines = draw_waterfall(build_waterfall(TERMS), TerminalStyle(100, has_bars=True))
    ends = [(line.index("█"), line.rindex("█")) for line in lines]
    for (_, end), (start, _) in itertools.pairwise(ends):
        assert start == end + 1


def test_phases_hold_what_exists_in_them() -> None:
    phases = list_memory_phases(MEMORY | {"future": 5})
    assert "activations" not in phases["between steps"]
    assert "gradients" not in phases["forward"]
    assert "staging" not in phases["backward"]
    assert all("future" in parts for parts in phases.values())
    assert sum(phases["backward"].values()) == sum(MEMORY.values()) - GIB + 5


def test_memory_bars_mark_what_a_rank_may_fill() -> None:
    lines = draw_memory_bars(MEMORY, 75 * GIB, TerminalStyle(100, has_bars=True))
    backward = next(line for line in lines if "backward" in line)
    assert "34.0 GiB" in backward
    assert "45%" in backward
    assert backward.endswith("|")
    assert "A activations" in "\n".join(lines)
    too_much = draw_memory_bars(MEMORY, 20 * GIB, TerminalStyle(100, has_bars=True))
    assert not next(line for line in too_much if "backward" in line).endswith("|")


def test_rules_that_fail_are_shown_and_the_others_counted() -> None:
    verdicts = evaluate_rules_of_thumb(FACTS)
    short = format_rule_verdicts(verdicts, PLAIN, shows_all=False)
    assert any(line.startswith("  ✗ Tensor parallelism stays") for line in short)
    assert any("try parallel.tp=8 or less" in line for line in short)
    assert "--rules shows all" in short[-1]
    everything = format_rule_verdicts(verdicts, PLAIN, shows_all=True)
    assert len(everything) > len(short)
    assert any("often said otherwise" in line for line in everything)
    assert sum(line.startswith("  ✓") for line in everything) >= 2


def test_tables_are_labelled_as_heuristics() -> None:
    lines = format_table_answers(look_up_decision_tables(FACTS), PLAIN)
    assert "heuristics" in lines[0]
    assert any("differs" in line for line in lines)
