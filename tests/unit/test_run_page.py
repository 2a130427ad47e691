"""The page's maps of ranks, its lanes and its links to raw events; and the page as a browser shows
it."""

from __future__ import annotations

import errno
import json
import math
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import BinaryIO

import pytest
from test_bottleneck import write_run
from test_pipeline_measured import pipeline
from test_report import Page

from browser import Browser, open_browser
from phalanx.core.files import read_bounded_lines
from phalanx.observe import events
from phalanx.observe.bus import Bus, build_event_file_path
from phalanx.plan.layout import Layout
from phalanx.report import event_log
from phalanx.report.bottleneck.step_table import RankStep, StepTable, read_step_table
from phalanx.report.event_log import EventLogReader
from phalanx.report.page import render_page, write_report
from phalanx.report.reduce import collect_run_facts
from phalanx.report.sections.stragglers import _describe_slowest_rank
from phalanx.report.self_time import MAX_MAP_COLUMNS, MAX_MAP_ROWS, build_self_time_map
from phalanx.report.summary import build_run_json

LAYOUT = {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2, "ep": 1}
STEP_S = 0.2


def table_of(own_s: dict[int, list[float]]) -> StepTable:
    """Ranks in step, each of which waits for the slowest: all steps take `STEP_S`."""
    rows = {}
    for rank, seconds in own_s.items():
        rows[rank] = tuple(
            RankStep(STEP_S, {"backward": each, "collective": STEP_S - each}, 0.0)
            for each in seconds
        )
    steps = tuple(range(4, 4 + len(rows[0])))
    newest = events.StepFinished(4, 1.0, 1, 1, 1.0, 1.0, STEP_S, 1.0, {}, 0.0, 1)
    return StepTable(0, steps, rows, newest, len(steps))


# --- own time -------------------------------------------------------------------------------------


def test_a_rank_that_the_others_wait_for_is_slow_though_all_steps_are_equal() -> None:
    own_s = {rank: [0.10] * 6 for rank in range(4)}
    own_s[2] = [0.10, 0.10, 0.18, 0.10, 0.14, 0.10]
    times = build_self_time_map(table_of(own_s), num_stages=1)
    assert times is not None
    assert times.ranks == ((0,), (1,), (2,), (3,))
    assert times.rows[2] == pytest.approx((0.0, 0.0, 0.08, 0.0, 0.04, 0.0))
    assert [max(map(abs, times.rows[rank])) for rank in (0, 1, 3)] == pytest.approx([0, 0, 0])
    slow = times.slowest[0]
    assert (slow.rank, slow.worst_step) == (2, 6)
    assert slow.excess_s == pytest.approx(0.02)
    assert slow.worst_excess_s == pytest.approx(0.08)


@pytest.mark.parametrize("num_ranks", range(2, 8))
def test_a_rank_stands_beside_the_median_of_the_others(num_ranks: int) -> None:
    """Of two ranks the late one is late by all that they are apart, as the verdict says."""
    random_s = random.Random(num_ranks)
    own_s = {rank: [0.1 + random_s.random(), 0.1 + rank % 2] for rank in range(num_ranks)}
    times = build_self_time_map(table_of(own_s), num_stages=1)
    assert times is not None
    for rank, row in enumerate(times.rows):
        for column, excess_s in enumerate(row):
            others = [own_s[other][column] for other in own_s if other != rank]
            assert excess_s == pytest.approx(own_s[rank][column] - median(others))


def test_ranks_of_a_stage_with_more_work_are_not_slow() -> None:
    """Peers are those with the same work: in two stages nobody is behind."""
    own_s = {rank: [0.10 + 0.05 * (rank >= 2)] * 3 for rank in range(4)}
    alone = build_self_time_map(table_of(own_s), num_stages=1)
    staged = build_self_time_map(table_of(own_s), num_stages=2)
    assert alone is not None
    assert staged is not None
    assert max(map(max, alone.rows)) > 0.01
    assert max(map(max, staged.rows)) == pytest.approx(0.0)


def test_many_ranks_and_steps_are_a_map_of_bounded_size_and_hide_no_slow_rank() -> None:
    own_s = {rank: [0.10] * 500 for rank in range(300)}
    own_s[217] = [0.15] * 500
    times = build_self_time_map(table_of(own_s), num_stages=1)
    assert times is not None
    assert len(times.rows) <= MAX_MAP_ROWS
    assert {len(row) for row in times.rows} == {len(times.steps)}
    assert len(times.steps) <= MAX_MAP_COLUMNS
    assert [rank for bucket in times.ranks for rank in bucket] == list(range(300))
    assert (times.steps[0][0], times.steps[-1][1]) == (4, 503)
    (slow,) = [row for row, bucket in zip(times.rows, times.ranks, strict=True) if 217 in bucket]
    assert slow == pytest.approx([0.05] * len(times.steps))
    assert sum(max(row) > 0.01 for row in times.rows) == 1


def test_one_rank_alone_and_no_steps_have_no_map() -> None:
    assert build_self_time_map(table_of({0: [0.1] * 5}), num_stages=1) is None
    assert build_self_time_map(table_of({0: [], 1: []}), num_stages=1) is None
    assert build_self_time_map(None, num_stages=1) is None


# --- a page of a run of eight ranks ---------------------------------------------------------------


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Eight ranks in two stages; rank 5 is slow in its backward. A fault, a restart, a skip."""
    write_run(tmp_path, {5: {"backward": 0.03}}, num_ranks=8)
    plan = {
        "layout": LAYOUT, "world_size": 8, "zero_stage": 3, "device": "cpu",
        "pipeline": pipeline("interleaved", num_ranks=2).to_json(),
    }  # fmt: skip
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "job.json").write_text(json.dumps({"run": {"name": "eight"}}))
    rank, supervisor = Bus(rank=0, run_dir=tmp_path), Bus(rank=-1, run_dir=tmp_path)
    rank.emit(events.RunStarted("eight", "d", 8, 0, 40, "cpu", LAYOUT, "", 1.0))
    rank.emit(events.StepSkipped(10, "nonfinite_gradients", math.nan, 0, 8))
    rank.emit(events.CheckpointSaved(20, "checkpoints/step-20", 5 * 2**20, 0.25))
    rank.emit(events.EvalFinished(40, 2.0, 500, 0.2))
    supervisor.emit(events.RankFailed(5, 30, "backward", "signal", "killed", 0.3))
    supervisor.emit(events.RestartScheduled(1, 3, 20))
    supervisor.emit(events.Note(events.RESUMED, {"step": 35, "told": "--resume"}))
    supervisor.emit(events.RunFinished("finished", 0, 40, 42.5))
    rank.close()
    supervisor.close()
    return tmp_path


def section_of(page: Page, name: str) -> str:
    found = re.search(rf'<section id="{name}">(.*?)</section>', page.source, re.DOTALL)
    assert found is not None, name
    return found[1]


def test_of_few_steps_a_slow_rank_may_be_chance() -> None:
    for num_steps, is_said in ((7, True), (12, False)):
        times = build_self_time_map(
            table_of({0: [0.1] * num_steps, 1: [0.2] * num_steps}), num_stages=1
        )
        assert times is not None
        text = _describe_slowest_rank(times)
        assert f"in the mean of steps 4 to {num_steps + 3}" in text
        assert ("too few steps" in text) is is_said
    times = build_self_time_map(table_of({0: [0.1], 1: [0.2]}), num_stages=1)
    assert times is not None
    assert ", in step 4 alone: " in _describe_slowest_rank(times)


def test_each_table_has_a_name_for_screen_readers(run_dir: Path) -> None:
    page = Page(write_report(run_dir))
    tables = re.findall(r"<table[^>]*>(?:<caption>)?", page.source)
    assert len(tables) > 10
    assert [each for each in tables if "aria-label=" not in each and "<caption>" not in each] == []
    assert 'aria-label="Gradient norm"' in page.source


def test_the_slow_rank_stands_out_with_the_line_of_its_worst_step(run_dir: Path) -> None:
    page = Page(write_report(run_dir))
    ranks = section_of(page, "ranks")
    assert re.search(r"Rank 5 takes \d+\.\d ms longer by itself than the median", ranks)
    labels = re.findall(r'aria-label="rank (\d): \S(\S+) ms of its peers in the mean', ranks)
    assert [rank for rank, _ in labels] == list(map(str, range(8)))
    assert max(labels, key=lambda label: float(label[1]))[0] == "5"
    table = read_step_table(run_dir)
    assert table is not None
    times = collect_run_facts(run_dir).self_times
    assert times is not None
    shown = re.search(r'<div id="raw-rank-5".*?</div>', page.source, re.DOTALL)
    assert shown is not None
    assert f"&quot;step&quot;:{times.slowest[0].worst_step}," in shown[0]
    assert "events/rank-0005-attempt-00.jsonl, line " in shown[0]


def test_a_predicted_step_stands_beside_the_measured_one(run_dir: Path) -> None:
    assert "predicted and measured" not in section_of(Page(write_report(run_dir)), "time")
    plan = json.loads((run_dir / "plan.json").read_text())
    terms = {"ideal": 0.05, "matmul loss": 0.03, "tp": 0.002, "dp exposed": 0.001, "bubble": 0.01}
    for low_s, high_s, where in ((1e-4, 10.0, "inside"), (1e-5, 1e-4, "outside")):
        plan["step_time"] = {"terms": terms, "total_s": 0.093, "low_s": low_s, "high_s": high_s}
        (run_dir / "plan.json").write_text(json.dumps(plan))
        section = section_of(Page(write_report(run_dir)), "time")
        table = section.partition("A step, predicted and measured")[2]
        assert re.search(
            r"a whole step</t[hd]><td>93\.0 ms</td><td>[\d.]+ ms</td><td>[+-]\d+ %", table
        )
        assert re.search(r"forward and backward</t[hd]><td>80\.0 ms</td>", table)
        assert re.search(r"communication</t[hd]><td>3\.00? ms</td>", table)
        assert f"{where} the plan" in table
    for damaged in ([], {"terms": {"ideal": "x"}}, {"terms": 3}):
        plan["step_time"] = damaged
        (run_dir / "plan.json").write_text(json.dumps(plan))
        assert "A step, predicted" not in section_of(Page(write_report(run_dir)), "time")


def test_the_mesh_has_each_rank_and_what_it_holds(run_dir: Path) -> None:
    page = Page(write_report(run_dir))
    mesh = section_of(page, "mesh")
    cells = re.findall(r"<i(?: class=\"h\d\")?>(\d+)</i>", mesh)
    assert cells == list(map(str, range(8)))
    slow = re.search(r'<i class="h(\d)">5</i>', mesh)
    assert slow is not None
    assert int(slow[1]) >= 6
    rows = re.findall(r"<tr><td>(\d+)</td>(.*?)</tr>", mesh)
    held = {int(rank): re.findall(r"<td>(.*?)</td>", rest) for rank, rest in rows}
    layout = Layout.from_json(LAYOUT)
    for rank in range(8):
        at = layout.coordinates(rank)
        blocks = {0: "0–1 with embedding; 4–5", 1: "2–3; 6–7 with head"}[at["pp"]]
        assert held[rank] == [
            blocks,
            f"{at['tp'] + 1} of 2",
            "all",
            f"{at['dp_shard'] + 1} of 2",
            f"optimizer, gradients and parameters: {at['dp_shard'] + 1} of 2",
        ]


def test_lanes_lie_on_the_axis_of_the_loss(run_dir: Path) -> None:
    page = Page(write_report(run_dir))
    training = section_of(page, "training")
    in_chart = re.search(r'<b class="skip" style="left:([\d.]+)%', training)
    in_lane = re.search(r'<b class="warn" style="left:([\d.]+)%" title="[^"]*step 10', training)
    assert in_chart is not None
    assert in_lane is not None
    assert in_lane[1] == in_chart[1]
    assert 'title="resumed at step 35"' in training
    names = re.findall(r'<span class="lanelabel">(\w+)</span>', training)
    assert names == ["faults", "starts", "skips", "saves", "evals"]


def test_the_goodput_is_that_of_the_ledger(run_dir: Path) -> None:
    facts = collect_run_facts(run_dir)
    share = 100 * facts.ledger.parts_s["training steps"] / facts.ledger.wall_s
    page = Page(write_report(run_dir))
    assert f"Goodput {share:.1f} %" in page.text


def test_each_raw_line_stands_in_the_file_that_it_names(run_dir: Path) -> None:
    page = Page(write_report(run_dir))
    raw = section_of(page, "raw")
    shown = re.findall(r"<h3>events/(\S+), line ([\d,]+)</h3><pre[^>]*>(.*?)</pre>", raw)
    assert len(shown) >= 10
    for file, number, text in shown:
        lines = (run_dir / "events" / file).read_text().splitlines()
        assert text.replace("&quot;", '"') == lines[int(number.replace(",", "")) - 1]
    for key in ("loss", "held-out", "restarts", "skips", "wall", "layout"):
        assert f'href="#raw-{key}"' in page.source, key
        assert f'id="raw-{key}"' in page.source, key


def test_a_run_of_one_rank_has_neither_map(tmp_path: Path) -> None:
    write_run(tmp_path, {}, num_ranks=1)
    page = Page(write_report(tmp_path))
    assert 'id="ranks"' not in page.source
    assert 'id="mesh"' not in page.source
    assert 'href="#ranks"' not in page.source


def test_damaged_files_cost_parts_and_not_the_page(run_dir: Path) -> None:
    for layout in ({"pp": 10**9, "tp": 10**9}, {"pp": -1}, {"tp": "two"}, [], {"ep": 7}):
        (run_dir / "plan.json").write_text(json.dumps({"layout": layout, "zero_stage": "x"}))
        with open(run_dir / "events" / "rank-0000-attempt-00.jsonl", "ab") as file:
            file.write(b'\xff{"event":"note","seq":99999999999999999999}\n{"seq":1')
        Page(write_report(run_dir))


# --- in a browser ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_shows_the_page_without_a_request_or_an_error(
    run_dir: Path, browser: Browser, width: int, dark: bool
) -> None:
    page = write_report(run_dir)
    browser.open(page.as_uri(), width=width, dark=dark)
    assert browser.problems == []
    assert {url for url in browser.requests if url != "data:,"} == {page.as_uri()}
    assert is_as_wide_as_its_window(browser), "nothing is scrolled sideways"
    picture = browser.take_screenshot(run_dir / "page.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    # Lanes and loss share their frame: the same left and right edge.
    edges = browser.evaluate(
        "['#training .plot', '#training .eventlane'].map((each) => {"
        " const box = document.querySelector(each).getBoundingClientRect();"
        " return [Math.round(box.left), Math.round(box.right)]; })"
    )
    assert edges[0] == edges[1]
    # What is slow is told from what is not, and its number can be read.
    slow, usual = browser.evaluate(
        "[5, 4].map((rank) => getComputedStyle("
        "document.querySelectorAll('.mesh i')[rank]).backgroundColor)"
    )
    assert slow != usual


# Texts that stand where they were put (ticks, marks, names of lanes and tiles), by their boxes: those of one chart that
# cover each other by more than a pixel each way. Lines of a paragraph are no business of it.
OVERLAPS = """
(() => {
  const labels = '.xtick, .ytick, .end, .flag, .heataxis span, .heatname, .heatend, .lanelabel, .lanename, .laneidle,'
    + ' .laneaxis span, .lanerow .beside, dl.keys dt, dl.keys .why, .ylabel, .meshname, .barlabel > span, .legend .key';
  const found = [];
  for (const home of document.querySelectorAll('figure, dl.keys, .block, .goodput')) {
    const boxes = [];
    for (const each of home.querySelectorAll(labels)) {
      const range = document.createRange();
      range.selectNodeContents(each);
      // What is cut off takes no more room than its box.
      const text = range.getBoundingClientRect(), own = each.getBoundingClientRect();
      const clips = getComputedStyle(each).overflowX === 'hidden';
      const right = clips ? Math.min(text.right, own.right) : text.right;
      if (text.width && text.height && own.width) {
        boxes.push([text.left, right, text.top, text.bottom, each.textContent, each]);
      }
    }
    for (const [index, one] of boxes.entries()) {
      if (one[1] > innerWidth + 1 && !one[5].closest('.scroll')) found.push('beyond the window: ' + one[4]);
      for (const other of boxes.slice(index + 1)) {
        const wide = Math.min(one[1], other[1]) - Math.max(one[0], other[0]);
        const high = Math.min(one[3], other[3]) - Math.max(one[2], other[2]);
        if (wide > 1 && high > 2 && !one[5].contains(other[5])) found.push(one[4] + ' / ' + other[4]);
      }
    }
  }
  return found;
})()
"""


@pytest.mark.parametrize("width", [320, 760, 1280])
def test_no_label_covers_another_one(run_dir: Path, browser: Browser, width: int) -> None:
    """Also of a run with restarts, baselines with long names, and a measured pipeline."""
    rank, supervisor = Bus(rank=0, run_dir=run_dir), Bus(rank=-1, run_dir=run_dir)
    for name, loss in (("uniform over bytes", 5.545), ("Kneser-Ney trigram", 1.826)):
        rank.emit(events.BaselineMeasured(name, loss, 1000, 0.1))
    for number, step in enumerate((8, 14, 20, 24, 31), start=2):
        supervisor.emit(events.RestartScheduled(number, 9, step))
    rank.close()
    supervisor.close()
    browser.open(write_report(run_dir).as_uri(), width=width)
    assert browser.evaluate(OVERLAPS) == []
    assert is_as_wide_as_its_window(browser), "nothing is scrolled sideways"


def is_as_wide_as_its_window(browser: Browser) -> bool:
    return bool(
        browser.evaluate(
            "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        )
    )


def test_a_why_link_shows_the_lines_behind_the_number(run_dir: Path, browser: Browser) -> None:
    browser.open(write_report(run_dir).as_uri())
    visible = (
        "[...document.querySelectorAll('.rawlines')].filter((each) => each.offsetHeight > 0)"
        ".map((each) => each.id)"
    )
    assert browser.evaluate(visible) == []
    # By the keyboard, as somebody without a mouse does.
    browser.evaluate("document.querySelector('a.why[href=\"#raw-restarts\"]').focus()")
    browser.press("Enter")
    assert browser.evaluate(visible) == ["raw-restarts"]
    text = browser.evaluate("document.getElementById('raw-restarts').innerText")
    assert '"event":"rank_failed"' in text
    assert '"event":"restart_scheduled"' in text
    assert browser.evaluate(
        "[...document.querySelectorAll('i.raw')].every((each) =>"
        " getComputedStyle(each).display !== 'none')"
    ), "keys of legends stay"


# --- runs so large that ranks record sums of steps ------------------------------------------------


def write_windows(run_dir: Path, num_steps: int = 200, window: int = 20) -> None:
    """Rank 0 records each step, rank 1 sums over windows; an evaluation of 0.2 s each window."""
    lead, other = Bus(rank=0, run_dir=run_dir), Bus(rank=1, run_dir=run_dir)
    phases_s = {"forward": 0.03, "backward": 0.06, "collective": 0.01}
    for step in range(1, num_steps + 1):
        lead.emit(
            events.StepFinished(
                step, 2.0, 64, 64 * step, 1e-3, 1.0, 0.1, 640.0, phases_s, 0.0, 2**28, cpu_s=0.09
            )
        )
        if step % window == 0:
            summed_s = {name: window * seconds for name, seconds in phases_s.items()}
            other.emit(
                events.StepsSummed(
                    step - window + 1,
                    step,
                    window,
                    0.1 * window,
                    0.1,
                    step,
                    summed_s,
                    {},
                    0.0,
                    0.09 * window,
                    2**28,
                    2**28,
                )
            )
            lead.emit(events.EvalFinished(step, 2.0, 500, 0.2))
    lead.close()
    other.close()


def test_evaluations_weigh_on_windows_as_on_steps(tmp_path: Path) -> None:
    """0.2 s each 20 steps of 0.1 s are a tenth: one mean step of each window is not all of it."""
    write_windows(tmp_path)
    facts = collect_run_facts(tmp_path)
    assert facts.self_times is not None
    assert facts.self_times.steps_per_value == 20
    assert facts.self_times.first_step == 1
    assert facts.bottleneck is not None
    assert [cause.kind for cause in facts.bottleneck.causes] == ["compute"]


def test_the_line_behind_a_window_is_its_sum(tmp_path: Path) -> None:
    write_windows(tmp_path)
    page = Page(write_report(tmp_path))
    assert "Ranks of this run record sums over about 20 steps" in page.text
    shown = re.search(r'<div id="raw-rank-1".*?</div>', page.source, re.DOTALL)
    assert shown is not None
    assert "&quot;event&quot;:&quot;steps_summed&quot;" in shown[0]


# --- while it grows -------------------------------------------------------------------------------


def test_a_page_read_bit_by_bit_is_the_page_read_at_once(run_dir: Path, tmp_path: Path) -> None:
    """Also where a restart does steps again, and where a read ends in the middle of a line."""
    again = Bus(rank=0, attempt=1, run_dir=run_dir)
    again.emit(events.RunStarted("eight", "d", 8, 20, 40, "cpu", LAYOUT, "", 1.0))
    phases_s = {"forward": 0.03, "backward": 0.06, "collective": 0.01}
    for step in range(21, 31):
        again.emit(
            events.StepFinished(step, 1.5, 64, 64, 1e-3, 1.0, 0.1, 640.0, phases_s, 0.0, 2**28)
        )
    again.close()
    growing = tmp_path / "growing"
    (growing / "events").mkdir(parents=True)
    for name in ("job.json", "plan.json"):
        (growing / name).write_bytes((run_dir / name).read_bytes())
    reader = EventLogReader(growing)
    # Attempt after attempt, each file in pieces that no line ends with.
    for path in sorted((run_dir / "events").iterdir(), key=lambda path: path.name[-8:]):
        content = path.read_bytes()
        for start in range(0, len(content), 3001):
            with open(growing / "events" / path.name, "ab") as file:
                file.write(content[start : start + 3001])
            reader.read_new_events()
    grown, fresh = collect_run_facts(growing, reader.log), collect_run_facts(growing)
    assert grown.num_rolled_back == 20
    assert build_run_json(grown) == build_run_json(fresh)
    assert render_page(grown) == render_page(fresh)


def test_a_file_that_can_be_read_again_is_no_gap_of_the_page(run_dir: Path, tmp_path: Path) -> None:
    """As a network file system may refuse one read: also where nothing was added meanwhile."""
    growing = tmp_path / "growing"
    shutil.copytree(run_dir, growing)
    path = build_event_file_path(growing, 1, 0)
    reader = EventLogReader(growing)
    for first_read in (True, False):
        path.rename(tmp_path / "aside")
        path.mkdir()
        reader.read_new_events()
        assert list(reader.log.unreadable_files) == [path.name]
        path.rmdir()
        (tmp_path / "aside").rename(path)
        reader.read_new_events()
        assert reader.log.unreadable_files == {}, f"{first_read=}"
    assert build_run_json(collect_run_facts(growing, reader.log)) == build_run_json(
        collect_run_facts(growing)
    )


def test_lines_before_a_read_that_the_disk_refuses_are_counted_once(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = []

    def refuse_once(file: BinaryIO) -> Iterator[bytes]:
        for number, line in enumerate(read_bounded_lines(file)):
            if number == 3 and file.name not in refused:
                refused.append(file.name)
                raise OSError(errno.EIO, "Input/output error")
            yield line

    monkeypatch.setattr(event_log, "read_bounded_lines", refuse_once)
    reader = EventLogReader(run_dir)
    for _ in range(2):
        # The first of two also asks each file for its first step, which meets the error instead.
        reader.read_new_events()
        refused.clear()
        reader.read_new_events()
    monkeypatch.undo()
    reader.read_new_events()
    assert build_run_json(collect_run_facts(run_dir, reader.log)) == build_run_json(
        collect_run_facts(run_dir)
    )
