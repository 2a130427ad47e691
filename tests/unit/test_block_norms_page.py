"""Norms by block on the page of a run, for programs and as metrics: all say the same numbers."""

from __future__ import annotations

import math
import re
from pathlib import Path

from test_report import Run, page_of

from phalanx.observe.events import BlockNormsMeasured, Envelope
from phalanx.observe.sinks._metrics import EventMetricsExtractor
from phalanx.observe.tail import parse_valid_event_line
from phalanx.report.prometheus.run_metrics import RunMetrics
from phalanx.report.reduce import collect_run_facts
from phalanx.report.summary import build_run_json

NAMES = ("embed", "blocks.0", "blocks.1", "head")


def measured(
    step: int, *, scale: float = 1.0, nonfinite: tuple[str, ...] = ()
) -> BlockNormsMeasured:
    return BlockNormsMeasured(
        step,
        {name: scale * (1 + at) for at, name in enumerate(NAMES) if name not in nonfinite},
        dict.fromkeys(NAMES, 0.02) if not nonfinite else {},
        dict.fromkeys(NAMES, 10.0) if not nonfinite else {},
        list(nonfinite),
    )


def trained(tmp_path: Path) -> Run:
    """Steps 1 to 201; the last is done again after a restart, and is not finite then."""
    run = Run(tmp_path)
    run.start()
    run.steps(range(1, 201))
    for step in (1, 51, 101):
        run.say(measured(step))
    run.say(measured(151, scale=3.0))
    run.steps([201])
    run.say(measured(201))
    run.start(attempt=1, at=200)
    run.steps([201], attempt=1)
    run.say(measured(201, nonfinite=("blocks.1",)), attempt=1)
    return run


def test_the_page_draws_blocks_by_steps_and_names_the_first_that_is_not_finite(
    tmp_path: Path,
) -> None:
    page = page_of(trained(tmp_path))
    found = re.search(r'<section id="blocks">(.*?)</section>', page.source, re.DOTALL)
    assert found is not None
    gradients, updates = found[1].split("Update of each block over its weights")
    rows = re.findall(r'aria-label="(\S+): ([^"]*) in the last', gradients)
    assert rows == [("embed", "1"), ("blocks.0", "2"), ("blocks.1", "not finite"), ("head", "4")]
    # Columns of block 1: as its median three times, 3 times it, not finite.
    drawn = re.search(r'<svg[^>]*aria-label="blocks.1[^>]*>(.*?)</svg>', gradients)
    assert drawn is not None
    cells = dict(re.findall(r'<path d="([^"]*)" class="(h\d)"', drawn[1]))
    shape = "M{} 0h1v1h-1z".format
    assert cells == {shape(4): "h0", shape(0) + shape(1) + shape(2): "h4", shape(3): "h6"}
    assert "At step 201 the gradients of blocks.1 are not finite (1 of 4 blocks)." in page.text
    # 0.002, and nothing where the step was not applied.
    drawn = re.search(r'<svg[^>]*aria-label="head[^>]*>(.*?)</svg>', updates)
    assert drawn is not None
    assert drawn[1].count("M") == 4
    assert 'class="h5"' in drawn[1]
    assert "#blocks" in page.attributes("href")


def test_programs_sinks_and_metrics_have_the_same_numbers(tmp_path: Path) -> None:
    run = trained(tmp_path)
    facts = collect_run_facts(run.directory)
    assert [event.step for event in facts.block_norms.steps] == [1, 51, 101, 151, 201]
    last = build_run_json(facts)["block_norms"]
    assert last["step"] == 201
    assert last["nonfinite"] == ["blocks.1"]
    line = Envelope(measured(51), 0, 0, 1.7e9, 3, 5.0).to_line()
    envelope = parse_valid_event_line(line.encode())
    assert envelope is not None
    assert envelope.event == measured(51)
    point = EventMetricsExtractor().extract_metric_point(envelope)
    assert point is not None
    assert point.values["blocks/grad_norm/blocks_1"] == 3.0
    assert math.isclose(point.values["blocks/update_ratio/embed"], 0.002)
    metrics = RunMetrics("run", {})
    metrics.add_event(envelope)
    snapshot = metrics.build_snapshot()
    assert snapshot.find_value("phalanx_block_grad_norm", "blocks.1") == 3.0
