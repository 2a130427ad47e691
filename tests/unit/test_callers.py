"""Collectives by who called them: from a rank's totals to those of a run."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.core.call_site import UNKNOWN_CALL_SITE, CallSite
from phalanx.mesh.collective_recorder import CallerTotals
from phalanx.observe.bus import Bus
from phalanx.observe.events import CollectivesCounted
from phalanx.report.event_log import read_event_log
from phalanx.report.page import write_report
from phalanx.report.reduce import collect_run_facts
from phalanx.report.summary import build_run_json
from phalanx.train.collectives_record import MAX_CALLERS_IN_EVENT, build_collectives_event


def totals(line: int, wait_s: float, *, axis: str = "dp", file: str = "/a/b/c.py") -> CallerTotals:
    return CallerTotals("all_reduce", axis, "0-3", CallSite(file, line), 2, 100, wait_s)


def test_ranks_and_attempts_are_added_up_by_caller(tmp_path: Path) -> None:
    for rank, attempt, wait_s in ((0, 0, 0.5), (1, 0, 2.0), (1, 1, 1.0)):
        bus = Bus(rank=rank, attempt=attempt, run_dir=tmp_path)
        called = [totals(7, wait_s), totals(9, 0.0, axis="tp")]
        bus.emit(build_collectives_event(20, called))
        bus.close()
    first, second = read_event_log(tmp_path).callers.list_caller_facts()
    assert (first.axis, first.operation, first.caller) == ("dp", "all_reduce", "b/c.py:7")
    assert (first.num_calls, first.num_bytes, first.num_ranks) == (6, 300, 2)
    assert (first.wait_s, first.most_wait_s) == pytest.approx((3.5, 3.0))
    assert (second.axis, second.caller, second.wait_s) == ("tp", "b/c.py:9", 0.0)
    facts = collect_run_facts(tmp_path)
    assert [each["caller"] for each in build_run_json(facts)["collectives"]] == [
        "b/c.py:7",
        "b/c.py:9",
    ]
    assert "Collectives by caller" not in write_report(tmp_path).read_text(), "without a ledger"


def test_calls_on_a_gpu_are_not_timed_and_not_called_short(tmp_path: Path) -> None:
    for rank in range(2):
        bus = Bus(rank=rank, run_dir=tmp_path)
        called = [replace(totals(7, 0.0), is_timed=False), totals(9, 0.0)]
        bus.emit(build_collectives_event(20, called))
        bus.close()
    callers = {each.caller: each for each in read_event_log(tmp_path).callers.list_caller_facts()}
    on_gpu, on_cpu = callers["b/c.py:7"], callers["b/c.py:9"]
    assert (on_gpu.num_calls, on_cpu.wait_s, on_cpu.most_wait_s) == (4, 0.0, 0.0)
    assert math.isnan(on_gpu.wait_s)
    assert math.isnan(on_gpu.most_wait_s)


def test_the_largest_are_told_and_the_others_counted() -> None:
    # The same line twice is one caller; a call that nobody made in Python has no line.
    called = [totals(line, 1.0) for line in range(30)] + [totals(0, 1.0)]
    event = build_collectives_event(3, [totals(0, 5.0, file=""), *called])
    assert len(event.num_calls) == MAX_CALLERS_IN_EVENT
    assert event.num_left_out == 31 - MAX_CALLERS_IN_EVENT
    assert event.num_calls["dp [0-3]: all_reduce at b/c.py:0"] == 4
    unknown = CallerTotals("send", "pp", "", UNKNOWN_CALL_SITE)
    (name,) = build_collectives_event(3, [unknown]).num_calls
    assert name == "pp []: send at nobody knows where"


def test_names_of_a_damaged_file_raise_nothing(tmp_path: Path) -> None:
    bus = Bus(rank=0, run_dir=tmp_path)
    for name in ("", "dp", "dp [0]: x", "a: b at c: d at e"):
        bus.emit(CollectivesCounted(1, {name: 3}, {}, {}))
    bus.close()
    callers = read_event_log(tmp_path).callers.list_caller_facts()
    assert {each.num_calls for each in callers} == {3}
    assert all(math.isnan(each.wait_s) for each in callers)
