"""The page: complete in itself, escaped, equal to the events, and made from whatever a run left
behind."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from phalanx.checkpoint.best import record_best_step
from phalanx.checkpoint.ownership.run_lock import LOCK_FILE_NAME, holding_run_lock
from phalanx.cli._app import run_command_line
from phalanx.core.errors import ResourceError
from phalanx.job.schema import Job
from phalanx.observe import events
from phalanx.observe.bus import Bus, build_event_file_path
from phalanx.observe.events import Envelope, Event, StepFinished
from phalanx.report.facts import describe_skipped_steps
from phalanx.report.page import CONTENT_SECURITY_POLICY, write_report
from phalanx.report.reduce import collect_run_facts
from phalanx.report.run_status import describe_last_failure
from phalanx.report.sections.curves import find_step_range
from phalanx.report.summary import build_run_json

EVIL = (
    '<script>alert("x")</script></pre><img src=https://evil.example/x'
    " onerror=alert(1)>&amp;\x1b[31m\ud800"
)
VOID = {"meta", "link", "br"}
LAYOUT = {"pp": 1, "dp_replicate": 2, "dp_shard": 1, "cp": 1, "tp": 1, "ep": 1}
SIZES = {"parameters": 1000 * 2**10, "activations": 3000 * 2**10}


class Page(HTMLParser):
    """Parses a page and fails on markup that is not balanced; collects text, tags and
    attributes."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.source = path.read_text(encoding="utf-8")
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["script"], ["style"]):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def attributes(self, name: str) -> list[str]:
        return [
            value or ""
            for _, attributes in self.tags
            for key, value in attributes.items()
            if key == name
        ]


class Run:
    """Writes the files of a run, a tenth of a second per event."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.now_s = directory, 1_700_000_000.0

    def say(self, event: Event, *, rank: int = 0, attempt: int = 0) -> None:
        self.now_s += 0.1
        self.raw(
            Envelope(event, rank, attempt, self.now_s).to_line() + "\n", rank=rank, attempt=attempt
        )

    def raw(self, text: str, *, rank: int = 0, attempt: int = 0) -> None:
        path = build_event_file_path(self.directory, rank, attempt)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)

    def start(self, *, attempt: int = 0, at: int = 0, total: int = 30) -> None:
        self.say(
            events.RunStarted("a-run", "d", 2, at, total, "cpu", LAYOUT, "", 1.0), attempt=attempt
        )

    def steps(
        self, numbers: Iterable[int], *, attempt: int = 0, ranks: int = 2, loss: float = 3.0
    ) -> None:
        for number in numbers:
            for rank in range(ranks):
                self.say(
                    step(number, loss=loss - 0.01 * number, rank=rank), rank=rank, attempt=attempt
                )


def step(number: int, *, loss: float = 3.0, rank: int = 0, step_s: float = 0.1) -> StepFinished:
    phases_s = {
        "data": 0.01,
        "forward": 0.03,
        "backward": 0.04,
        "ckpt_write": 0.005,
        "novel": 0.001,
    }
    spare_s = step_s - sum(phases_s.values())
    return StepFinished(
        number,
        loss,
        4096,
        4096 * number,
        1e-3,
        0.5 + rank,
        step_s,
        40960.0,
        phases_s,
        spare_s,
        2**29,
    )


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.fixture
def whole(run: Run) -> Run:
    """A finished run with one of everything: a skip, a restart, an evaluation, baselines,
    memory, text."""
    run.start()
    run.steps(range(1, 21))
    run.say(events.StepSkipped(7, "nonfinite_gradients", math.nan, 192, 32))
    run.say(events.CheckpointSaved(10, "checkpoints/step-10", 5 * 2**20, 0.25))
    run.say(events.RankFailed(1, 20, "backward", "exception", f"Traceback\n{EVIL}", 0.3), rank=-1)
    run.say(events.RestartScheduled(1, 3, 10), rank=-1)
    run.start(attempt=1, at=10)
    run.steps(range(11, 31), attempt=1, loss=2.5)
    for name, loss in (("unigram", 4.5), ("trigram", 2.0)):
        run.say(events.BaselineMeasured(name, loss, 500, 0.1), rank=-1)
    run.say(events.EvalFinished(30, 2.25, 500, 0.2), attempt=1)
    for rank in (0, 1):
        measured = {"parameters": 1100 * 2**10, "activations": 2700 * 2**10, "peak": 4500 * 2**10}
        run.say(
            events.MemoryMeasured(SIZES | {"peak": 4000 * 2**10}, measured, 2**28),
            rank=rank,
            attempt=1,
        )
    run.say(events.TextGenerated(30, "def ", EVIL), attempt=1)
    run.say(events.RunFinished("finished", 0, 30, 42.5), rank=-1)
    chosen = {
        "name": "ddp",
        "layout": LAYOUT,
        "predicted_bytes": SIZES,
        "fits": True,
        "chosen": True,
        "why": "simplest",
    }
    loser = chosen | {
        "name": EVIL,
        "chosen": False,
        "why": f"loses {EVIL}",
        "fits": None,
        "total_bytes": "many",
    }
    plan = {
        "layout": LAYOUT, "world_size": 2, "device": "cpu", "precision": "fp32", "global_batch_size": 32,
        "micro_batch_size": 16, "num_microbatches": 1, "seq_len": 128, "num_params": 3_400_000,
        "memory": {"predicted_bytes": SIZES, "total_bytes": 4000 * 2**10, "capacity_bytes": 2**30, "fits": True},
        "alternatives": [chosen, loser], "reasons": ["because", EVIL],
    }  # fmt: skip
    (run.directory / "plan.json").write_text(json.dumps(plan))
    job = Job().to_json()
    job["model"]["args"] = {EVIL: [EVIL]}
    (run.directory / "job.json").write_text(json.dumps(job))
    return run


def page_of(run: Run) -> Page:
    return Page(write_report(run.directory))


# --- one file that trusts nothing -----------------------------------------------------------------


def test_loads_nothing(whole: Run) -> None:
    page = page_of(whole)
    policy = [
        a.get("content") for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy == [CONTENT_SECURITY_POLICY]
    assert CONTENT_SECURITY_POLICY.startswith(
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    )
    assert page.attributes("src") == []
    assert {value for value in page.attributes("href") if not value.startswith("#")} == {"data:,"}
    style = re.search(r"<style>(.*?)</style>", page.source, re.DOTALL)
    assert style is not None
    assert "url(" not in style[1]
    assert "@import" not in style[1]
    assert "http" not in page.source.replace(CONTENT_SECURITY_POLICY, "").replace(
        "http-equiv", ""
    ).replace("https://evil.example", "")


def test_a_row_of_the_head_with_fewer_tiles_ends_in_the_colour_of_tiles(whole: Run) -> None:
    """Lines between tiles are theirs: as the colour of what lies behind them, they were a bar
    beside the ninth of four in a row."""
    style = page_of(whole).source.partition("<style>")[2].partition("</style>")[0]
    rules = dict(re.findall(r"^(dl\.keys(?: > div)?) \{(.*?)\}", style, re.DOTALL | re.MULTILINE))
    assert "background: var(--card);" in rules["dl.keys"]
    assert "box-shadow: 0 0 0 1px var(--line);" in rules["dl.keys > div"]


def test_text_of_the_run_is_escaped(whole: Run) -> None:
    page = page_of(whole)
    assert "<img" not in page.source
    assert "<script>alert" not in page.source
    assert "\x1b" not in page.source
    assert page.text.count('<script>alert("x")</script></pre><img src=https://evil.example/x') >= 5
    kinds = [attributes.get("type") for tag, attributes in page.tags if tag == "script"]
    assert kinds.count(None) == 1, "our own script and no other"
    assert {
        name for _, attributes in page.tags for name in attributes if name.startswith("on")
    } == set()


def test_every_link_leads_somewhere(whole: Run) -> None:
    page = page_of(whole)
    assert {value[1:] for value in page.attributes("href") if value.startswith("#")} <= set(
        page.attributes("id")
    )
    assert len(page.attributes("id")) == len(set(page.attributes("id")))


def test_charts_have_titles_units_tables_and_points(whole: Run) -> None:
    page = page_of(whole)
    everything = page.source.split("<figure")[1:]
    assert all(re.search(r"<h3>[^<]+</h3>", figure) for figure in everything)
    # Beside the curves there are the lanes under the loss and the maps of ranks.
    figures = [figure for figure in everything if 'class="plot"' in figure]
    assert (len(figures), len(everything)) == (6, 9)
    for figure in figures:
        assert re.search(r'class="ylabel">[^<]+<', figure)
        assert 'class="xlabel">step<' in figure
        assert 'tabindex="0" role="group" aria-label="' in figure
        assert "<summary>Data table</summary>" in figure
        island = re.search(r'<script type="application/json" class="points">(.*?)</script>', figure)
        assert island is not None
        series = json.loads(island[1])["series"]
        assert all(len(xs) == len(ys) for _, _, xs, ys in series)
    for unit in ("nats per token", "tokens per second", "milliseconds per step", "MiB"):
        assert unit in page.text


# --- evaluations ----------------------------------------------------------------------------------


def evaluated(step: int, loss: float, **sources: float) -> events.EvalFinished:
    return events.EvalFinished(step, loss, 500, 0.2, sources, step, loss)


def test_evaluations_on_the_way_are_points_and_the_best_is_named(whole: Run) -> None:
    for at, loss in ((10, 2.0), (20, 2.125)):
        whole.say(evaluated(at, loss, code=loss - 0.5, prose=loss + 0.5), attempt=1)
    whole.say(evaluated(25, math.nan), attempt=1)
    record_best_step(whole.directory, step=10, loss=2.0, num_targets=500)
    page = page_of(whole)
    assert "Held-out loss 2.2500 nats/token best 2.0000 at step 10; 2.250 nats below" in page.text
    assert "Best of 4 evaluations: 2.0000 at step 10, kept as checkpoints/step-10." in page.text
    islands = re.findall(
        r'<script type="application/json" class="points">(.*?)</script>', page.source
    )
    drawn = {name: (xs, ys) for name, _, xs, ys in json.loads(islands[0])["series"]}
    assert drawn["held-out"] == ([10, 20, 25, 30], [2.0, 2.125, None, 2.25])
    assert drawn["held-out, code"] == ([10, 20], [1.5, 1.625])
    assert drawn["held-out, prose"] == ([10, 20], [2.5, 2.625])
    ledger = collect_run_facts(whole.directory).ledger
    assert ledger.parts_s["evaluation"] == pytest.approx(4 * 0.2)


def test_many_evaluations_are_a_line(run: Run) -> None:
    run.start(total=200)
    run.steps(range(1, 201), ranks=1)
    for at in range(2, 201, 2):
        run.say(evaluated(at, 3.0 - at / 100))
    assert page_of(run).source.count('class="dot eval"') == 1, "the key of the legend"


def test_facts_for_programs_are_those_of_the_page(whole: Run) -> None:
    whole.say(evaluated(10, 2.0), attempt=1)
    whole.say(events.Note("warning", {"warning": "high_lr", "text": "a high rate"}))
    facts = build_run_json(collect_run_facts(whole.directory))
    json.dumps(facts, allow_nan=False)
    assert (facts["status"], facts["exit_code"], facts["step"]) == ("finished", 0, 30)
    assert (facts["num_restarts"], facts["num_steps_redone"], facts["num_steps_skipped"]) == (
        1,
        10,
        1,
    )
    assert facts["final_loss"] == 2.2
    assert [(e["step"], e["loss"]) for e in facts["evaluations"]] == [(10, 2.0), (30, 2.25)]
    assert facts["best"] == {
        "step": 10,
        "loss": 2.0,
        "metric": "loss",
        "value": 2.0,
        "checkpoint": None,
    }
    assert facts["warnings"] == ["a high rate"]
    assert (
        "a high rate"
        in page_of(whole).text.split("Steps done")[0] + page_of(whole).text.split("Training")[0]
    )


def test_facts_of_a_run_that_wrote_nothing(run: Run) -> None:
    (run.directory / "events").mkdir()
    facts = build_run_json(collect_run_facts(run.directory))
    json.dumps(facts, allow_nan=False)
    assert (facts["status"], facts["final_loss"], facts["best"]) == ("no events", None, None)


def test_a_users_own_objective_is_not_called_nats(whole: Run) -> None:
    job = Job().to_json()
    job["model"]["objective"] = "own:loss"
    (whole.directory / "job.json").write_text(json.dumps(job))
    whole.say(evaluated(30, 0.5), attempt=1)
    page = page_of(whole)
    assert "Final training loss 2.2000 of step 30" in page.text
    assert "nats/token" not in page.text
    assert "targets per second" in page.text


# --- numbers --------------------------------------------------------------------------------------


def test_the_page_says_what_the_events_say(whole: Run) -> None:
    text = page_of(whole).text
    for wanted in (
        "a-run finished",
        "Steps done 30 / 30 10 steps done again",
        "Final training loss 2.2000 nats/token of step 30",
        (
            "Held-out loss 2.2500 nats/token 2.250 nats below unigram (4.500); 0.250 nats above"
            " trigram (2.000)"
        ),
        "Throughput 41.0 K tokens/s median of 30 steps",
        "Wall time 42.5 s",
        "Restarts 1 10 steps rolled back",
        "Skipped steps 1",
        "Layout dp_replicate=2 2 x cpu",
        "saved checkpoint of step 10: checkpoints/step-10 (5.0 MiB, 250 ms)",
        "rank 1 failed at step 20 in backward: exception",
        "restart 1 of at most 3, from step 10",
        "100 ms 100 ms 100 ms 100 ms 14.0 ms (14.0 %)",
        "3.9 MiB 4.4 MiB 11 % too low",
        "2 ranks as dp_replicate=2, on cpu, in fp32.",
        "Predicted memory per rank is 3.9 MiB, 0.4 % of the 1.0 GiB it may use: it fits.",
        "chosen: simplest",
    ):
        assert wanted in text


def test_phases_of_every_kind_are_charged_somewhere(whole: Run) -> None:
    first, second = collect_run_facts(whole.directory).ranks
    assert (first.rank, first.num_steps, second.num_steps) == (0, 40, 40)
    assert first.mean_groups_s["checkpoint"] == pytest.approx(0.005)
    assert first.mean_groups_s["other"] == pytest.approx(0.001)
    assert sum(first.mean_groups_s.values()) == pytest.approx(first.mean_s)


def test_the_ledger_sums_to_the_whole(whole: Run) -> None:
    ledger = collect_run_facts(whole.directory).ledger
    assert sum(ledger.parts_s.values()) == pytest.approx(ledger.wall_s)
    assert ledger.parts_s["steps done again"] == pytest.approx(1.0)
    assert ledger.parts_s["waiting for data"] == pytest.approx(0.3)
    assert ledger.parts_s["starting"] == pytest.approx(2.0)
    assert min(ledger.parts_s.values()) >= 0


def test_a_save_between_steps_is_not_taken_from_training(run: Run) -> None:
    run.start()
    run.say(replace(step(1), phases_s={"forward": 0.1, "ckpt_write": 0.05}, unaccounted_s=-0.05))
    parts = collect_run_facts(run.directory).ledger.parts_s
    assert parts["training steps"] == pytest.approx(0.1)
    assert parts["checkpoints"] == pytest.approx(0.05)


def test_what_a_phase_has_in_the_next_step_is_counted_once(run: Run) -> None:
    """A step is recorded before its last phase ends: seconds that are in the next one."""
    run.start()
    run.say(replace(step(1), phases_s={"forward": 0.1, "record": 0.05}, unaccounted_s=-0.05))
    run.say(replace(step(2), phases_s={"forward": 0.05}, unaccounted_s=0.05))
    parts = collect_run_facts(run.directory).ledger.parts_s
    assert parts["training steps"] == pytest.approx(0.2)


# --- restarts -------------------------------------------------------------------------------------


def test_the_last_attempt_of_a_step_wins(whole: Run) -> None:
    facts = collect_run_facts(whole.directory)
    assert facts.steps.step == list(range(1, 31))
    assert facts.steps.loss[9] == pytest.approx(3.0 - 0.10)
    assert facts.steps.loss[10] == pytest.approx(2.5 - 0.11)
    assert (facts.num_redone, facts.num_rolled_back, facts.num_restarts) == (10, 10, 1)


def test_steps_rolled_back_and_not_done_again_leave_the_curve(run: Run) -> None:
    run.start()
    run.steps(range(1, 21))
    run.start(attempt=1, at=10)
    run.steps(range(11, 14), attempt=1)
    facts = collect_run_facts(run.directory)
    assert facts.steps.step == list(range(1, 14))
    assert (facts.num_redone, facts.num_rolled_back, facts.last_step) == (3, 10, 13)
    assert facts.status == "unfinished"


def test_a_skip_counts_unless_a_later_attempt_did_the_step(run: Run) -> None:
    run.start()
    run.steps(range(1, 11))
    for number in (3, 8):
        for rank in (0, 1):
            run.say(events.StepSkipped(number, "no_targets", 0.0, 0, 32), rank=rank)
    run.start(attempt=1, at=5)
    run.steps(range(6, 11), attempt=1)
    assert [event.step for event in collect_run_facts(run.directory).skipped] == [3]


def test_a_resumed_run_is_unfinished_until_it_ends_and_its_pause_is_not_its_time(run: Run) -> None:
    run.start()
    run.steps(range(1, 6))
    run.say(events.RunFinished("preempted", 75, 5, 2.0))
    assert collect_run_facts(run.directory).status == "preempted"
    run.now_s += 100_000
    run.start(attempt=1, at=5)
    run.steps(range(6, 11), attempt=1)
    facts = collect_run_facts(run.directory)
    assert facts.status == "unfinished"
    assert facts.wall_s < 10
    assert (facts.num_rolled_back, facts.num_redone) == (0, 0)


# --- whatever a run left behind -------------------------------------------------------------------


@pytest.mark.parametrize("files", [(), ("events",), ("plan.json", "job.json")])
def test_a_run_that_hardly_is_one(run: Run, files: tuple[str, ...]) -> None:
    for name in files:
        path = run.directory / name
        path.write_text("[]") if name.endswith(".json") else path.mkdir()
    text = page_of(run).text
    assert "This run has written no events yet." in text
    assert "not measured" in text.lower()
    assert "nan" not in text.split()


def test_no_step_yet(run: Run) -> None:
    run.start()
    text = page_of(run).text
    assert "a-run unfinished" in text
    assert "No end was recorded" in text
    assert "Steps done 0 / 30" in text
    assert "nan" not in text.split()


@pytest.mark.parametrize("number", [1, 2])
def test_few_steps(run: Run, number: int) -> None:
    run.start()
    run.steps(range(1, number + 1))
    assert f"Steps done {number} / 30" in page_of(run).text


def test_torn_unknown_and_malformed_lines_are_counted_and_left_out(run: Run) -> None:
    run.start()
    run.steps(range(1, 4))
    good = json.loads(Envelope(step(4), 0, 0, run.now_s).to_line())
    for bad in (
        {"loss": "3"},
        {"step": None},
        {"phases_s": {"forward": None}},
        {"phases_s": []},
        {"rank": {}},
    ):
        run.raw(json.dumps(good | bad) + "\n")
    run.raw('{"event":"from_the_future","rank":0}\n[1]\n')
    run.raw(json.dumps(good)[:50])
    facts = collect_run_facts(run.directory)
    assert facts.steps.step == [1, 2, 3]
    assert facts.num_unreadable == 8
    assert "8 lines of the event files could not be read" in page_of(run).text


def test_nothing_is_finite(run: Run) -> None:
    run.start()
    for number in range(1, 5):
        nothing = replace(
            step(number), loss=math.nan, grad_norm=math.inf, step_s=math.nan, tokens_per_s=math.nan
        )
        run.say(replace(nothing, learning_rate=math.nan, unaccounted_s=math.nan))
    run.say(events.EvalFinished(4, math.nan, 0, 0.0))
    run.say(events.BaselineMeasured("unigram", math.nan, 0, 0.0))
    text = page_of(run).text
    assert "Training loss not measured" in text
    assert "Held-out loss not measured" in text


WRONG: list[Any] = [None, 5, "x", [], {}, [[]], {"a": {"b": [1]}}, 10**400, True, math.inf]


@pytest.mark.parametrize("value", WRONG)
def test_a_plan_of_any_shape(run: Run, value: Any) -> None:
    keys = (
        "layout",
        "world_size",
        "memory",
        "alternatives",
        "reasons",
        "num_params",
        "seq_len",
        "zero_stage",
    )
    (run.directory / "plan.json").write_text(json.dumps(dict.fromkeys(keys, value)))
    item = dict.fromkeys(
        ("name", "layout", "predicted_bytes", "total_bytes", "fits", "chosen", "why"), value
    )
    (run.directory / "job.json").write_text(json.dumps({"train": value, "run": {"name": value}}))
    page_of(run)
    (run.directory / "plan.json").write_text(
        json.dumps({"alternatives": [item, value], "layout": {"tp": value}})
    )
    page_of(run)


def test_many_ranks_and_many_events_stay_readable(run: Run) -> None:
    run.start()
    run.steps([1, 2], ranks=60)
    for number in range(2000):
        run.say(events.CheckpointSaved(number, "p", 1, 0.1))
        run.say(events.StepSkipped(number, "no_targets", 0.0, 0, 1))
    run.say(events.RankFailed(5, 2, "backward", "signal", "SIGKILL", 0.3), rank=-1)
    page = page_of(run)
    assert len(page.source) < 500_000
    assert "28 ranks are left out" in page.text
    assert "rank 5 failed at step 2" in page.text
    assert "events in between left out" in page.text


@pytest.mark.long
def test_a_hundred_thousand_steps(run: Run) -> None:
    """Under 5 MB and 10 s of this process's time, and the one bad step is still to be seen."""
    run.start(total=100_000)
    line = Envelope(step(1), 0, 0, run.now_s).to_line() + "\n"
    assert '"step":1,"loss":3.0' in line
    lines = (
        line.replace('"step":1,"loss":3.0', f'"step":{n},"loss":{3 + n % 7 / 10}')
        for n in range(1, 100_001)
    )
    run.raw("".join(lines).replace('"step":54321,"loss":3', '"step":54321,"loss":97'))
    began_s = time.process_time()
    path = write_report(run.directory)
    assert time.process_time() - began_s < 10
    assert path.stat().st_size < 5_000_000
    page = Page(path)
    assert "54321" in page.source
    assert "at step 54321" in page.text
    assert "Steps done 100,000 / 100,000" in page.text


# --- writing it -----------------------------------------------------------------------------------


def test_a_page_is_replaced_whole(whole: Run) -> None:
    first = write_report(whole.directory).read_text()
    before = set(whole.directory.iterdir())
    assert write_report(whole.directory).read_text() == first, "the same events give the same page"
    assert set(whole.directory.iterdir()) == before, "nothing is left beside it"


def test_a_failed_write_leaves_the_old_page(whole: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_report(whole.directory)
    old = path.read_text()
    whole.steps([31], attempt=1)

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(ResourceError, match="no space left while writing the report"):
        write_report(whole.directory)
    assert path.read_text() == old
    assert not list(whole.directory.glob(".*partial"))


def test_needs_no_torch() -> None:
    code = "import sys, phalanx.report; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_start_that_nobody_announced_is_a_restart_of_its_launcher(run: Run) -> None:
    """Under torchrun: rank 0 ends with the attempt, and the ranks just come again."""
    run.start()
    run.steps(range(1, 6))
    run.say(events.RunFinished("failed", 1, 3, 1.0), rank=-1)
    run.start(attempt=1, at=3)
    run.steps(range(4, 8), attempt=1)
    run.say(events.RunFinished("finished", 0, 7, 1.0), rank=-1, attempt=1)
    facts = collect_run_facts(run.directory)
    assert (facts.num_restarts, facts.num_resumes) == (1, 0)
    assert facts.reliability.num_failures == 1
    text = Page(write_report(run.directory)).text
    assert "restart 1" in text
    assert re.search(r"Restarts 1\b", text)
    assert "Resumes" not in text


def test_resumes_are_told_from_restarts(run: Run) -> None:
    """A crash that the supervisor answered, and a run that a person continued: each counted and
    drawn by itself."""
    run.start()
    run.steps(range(1, 6))
    run.say(events.RestartScheduled(1, 3, 3), rank=-1)
    run.start(attempt=1, at=3)
    run.steps(range(4, 8), attempt=1)
    run.say(events.RunFinished("preempted", 75, 7, 1.0), rank=-1, attempt=1)
    facts = {
        "step": 7,
        "changed": {"train.steps": [10, 12]},
        "told": "train.steps 10 -> 12: 5 steps left",
    }
    run.say(events.Note(events.RESUMED, facts), rank=-1, attempt=2)
    run.start(attempt=2, at=7)
    run.steps(range(8, 13), attempt=2)
    run.say(events.RunFinished("finished", 0, 12, 1.0), rank=-1, attempt=2)
    facts_of = collect_run_facts(run.directory)
    assert (facts_of.num_restarts, facts_of.num_resumes) == (1, 1)
    told = build_run_json(facts_of)
    assert (told["num_restarts"], told["num_resumes"]) == (1, 1)
    page = Page(write_report(run.directory))
    assert "restart 1" in page.text
    assert "resume 1" in page.text
    assert "restart 2" not in page.text
    assert re.search(r"Restarts 1\b.*Resumes 1\b", page.text)
    assert "resumed at step 7: train.steps 10 -> 12: 5 steps left" in page.text
    assert {"restart", "resume"} <= set(page.attributes("class"))


def test_the_page_may_be_written_elsewhere(run: Run, tmp_path: Path) -> None:
    run.start()
    run.steps(range(1, 4))
    page, directory = tmp_path / "page.html", str(run.directory)
    assert run_command_line(["report", directory, "--out", str(page)]) == 0
    assert page.read_text().startswith("<!doctype html>")
    assert not (run.directory / "report.html").exists()
    assert run_command_line(["report", directory, "--json", "--out", str(page)]) == 2
    nowhere = tmp_path / "missing" / "page.html"
    assert run_command_line(["report", directory, "--out", str(nowhere)]) == 7


def test_the_failure_that_ended_a_run_is_on_its_axis(run: Run) -> None:
    """It is in a step that nobody finished."""
    run.start()
    run.steps(range(1, 11))
    run.say(events.RankFailed(1, 17, "backward", "exception", "ValueError: no", 0.1), rank=-1)
    run.say(events.RunFinished("failed", 10, 10, 1.0), rank=-1)
    facts = collect_run_facts(run.directory)
    assert find_step_range(facts) == (1.0, 17.0)
    page = Page(write_report(run.directory))
    # The page is of this run: others have the same name.
    assert run.directory.name in page.text


def test_what_cannot_be_read_of_a_run_is_said(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.start()
    for name in ("job.json", "plan.json"):
        (run.directory / name).write_text("{}")
    run.steps(range(1, 6))
    assert collect_run_facts(run.directory).warnings == []
    of_rank_0 = build_event_file_path(run.directory, 0, 0)
    text = of_rank_0.read_bytes()
    # The last line of a process that was killed has no end: nothing is wrong with that.
    of_rank_0.write_bytes(text + b'{"event":"step_fin')
    assert collect_run_facts(run.directory).warnings == []
    lines = text.splitlines(keepends=True)
    of_rank_0.write_bytes(b"".join([*lines[:2], b"\\x00garbled\\n", *lines[3:]]))
    of_rank_1 = build_event_file_path(run.directory, 1, 0)
    of_rank_1.unlink()
    of_rank_1.mkdir()
    warnings = build_run_json(collect_run_facts(run.directory))["warnings"]
    assert any(f"events/{of_rank_1.name} cannot be read" in text for text in warnings)
    assert any("1 line of the event files could not be read" in text for text in warnings)
    assert run_command_line(["report", str(run.directory)]) == 0
    assert f"events/{of_rank_1.name} cannot be read" in capsys.readouterr().err
    of_rank_1.rmdir()
    warnings = collect_run_facts(run.directory).warnings
    assert "no events of rank 1 are here (attempt 0): what they did is missing" in warnings


def test_a_file_that_was_cut_off_between_two_lines_is_said(run: Run) -> None:
    """Of another rank than the first: nothing in it is damaged."""
    run.start()
    for name in ("job.json", "plan.json"):
        (run.directory / name).write_text("{}")
    run.steps(range(1, 21))
    of_rank_1 = build_event_file_path(run.directory, 1, 0)
    whole = of_rank_1.read_bytes()
    of_rank_1.write_bytes(b"".join(whole.splitlines(keepends=True)[:12]))
    assert collect_run_facts(run.directory).warnings == []
    run.say(events.RunFinished("finished", 0, 20, 9.0), rank=-1)
    assert collect_run_facts(run.directory).warnings == [
        "the events of rank 1 end at step 12, and the run finished at step 20: what they did after"
        " it is missing"
    ]
    of_rank_1.write_bytes(whole)
    assert collect_run_facts(run.directory).warnings == []


def test_the_lines_of_a_run_that_met_failures_name_them_and_its_goodput(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.start()
    run.steps(range(1, 11))
    assert run_command_line(["report", str(run.directory)]) == 0
    healthy = capsys.readouterr().out
    assert "failed  " not in healthy
    assert "goodput " not in healthy
    for step in (11, 12):
        run.say(events.RankFailed(1, step, "forward", "signal", "by SIGKILL", 0.1), rank=-1)
        run.say(events.RestartScheduled(1, 10, 0), rank=-1)
    run.say(events.RankFailed(-1, 13, "", "signal", "the server ended", 0.1), rank=-1)
    run.say(events.RestartScheduled(1, 10, 0), rank=-1)
    run.say(events.RolledBack(14, "corruption", "another bit", 5, -1, 2), rank=-1)
    run.steps(range(11, 17))
    run.say(events.RunFinished("finished", 0, 16, 9.0), rank=-1)
    assert run_command_line(["report", str(run.directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (failed,) = [line for line in lines if line.startswith("failed ")]
    assert failed.startswith(
        "failed  3 restarts; 2 x rank 1 killed, server killed; 1 return to an earlier checkpoint;"
        " first: rank 1 failed at step 11 in forward: signal, by SIGKILL"
    )
    (goodput,) = [line for line in lines if line.startswith("goodput ")]
    share = build_run_json(collect_run_facts(run.directory))["reliability"]["goodput"]
    assert goodput.startswith(f"goodput {share:.1%} of the run's life in steps that stand")


def test_each_fact_for_programs_is_on_its_page(whole: Run) -> None:
    page = (Path(__file__).parents[2] / "docs" / "run-facts.md").read_text()
    documented = set(re.findall(r"`([a-z_]+)`", page))
    told = build_run_json(collect_run_facts(whole.directory))
    keys = set(told)
    # Below: objects with keys of their own, and not by block, category or rank.
    for name in ("evaluations", "best", "baselines", "memory", "reliability"):
        of_name = told[name]
        assert of_name, name
        keys |= set(of_name[0] if isinstance(of_name, list) else of_name)
    keys |= set(told["bottleneck"])
    assert sorted(keys - documented) == []


def test_the_page_is_written_though_nobody_reads_the_words(
    whole: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with monkeypatch.context() as patch, contextlib.suppress(BrokenPipeError):
        patch.setattr(sys, "stdout", Closed())
        run_command_line(["report", str(whole.directory)])
    assert (whole.directory / "report.html").exists()


def test_a_run_that_went_back_was_not_restarted_and_did_not_fail(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.start()
    run.steps(range(1, 5))
    run.say(events.StepSkipped(5, "loss_spike", 99.0, 192, 32))
    run.steps(range(5, 6))
    run.say(events.RolledBack(5, "loss_spike", "the loss is 99", 3, -1, 24), rank=-1)
    run.start(attempt=1, at=3)
    run.steps(range(4, 17), attempt=1)
    run.say(events.RunFinished("finished", 0, 16, 9.0), rank=-1, attempt=1)
    assert run_command_line(["report", str(run.directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("faults  1 return to an earlier checkpoint; first: step 5")
    text = page_of(run).text
    assert "Restarts 0 2 steps rolled back" in text
    assert "went back 1" in text
    assert "back to an earlier checkpoint" in text
    assert "restart 1" not in text
    assert "Skipped steps 0 of the steps that stand; 1 more were done again" in text


def test_the_first_lines_say_how_a_run_ended(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.start()
    run.steps(range(1, 17))
    with holding_run_lock(run.directory) as lock:
        assert run_command_line(["report", str(run.directory)]) == 0
        said = capsys.readouterr().out
        assert said.startswith(f"still runs, 16 steps are done: {lock.holder}\n")
        assert build_run_json(collect_run_facts(run.directory))["is_running"] is True
        page = page_of(run).text
        assert "a-run running" in page
        assert "It was running when this page was made." in page
        assert "of step 16" in page.partition("Training loss ")[2][:60]
    assert run_command_line(["report", str(run.directory)]) == 0
    assert capsys.readouterr().out.startswith("cut off after step 16: no end was recorded")
    told = build_run_json(collect_run_facts(run.directory))
    assert (told["status"], told["is_running"], told["failure"]) == ("unfinished", False, None)
    run.say(events.RankFailed(1, 17, "forward", "signal", "SIGKILL", 0.1), rank=-1)
    run.say(events.RunFinished("failed", 10, 16, 9.0), rank=-1)
    assert run_command_line(["report", str(run.directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "failed after step 16, exit code 10"
    assert lines[1].startswith("rank 1 failed at step 17 in forward: signal")
    told = build_run_json(collect_run_facts(run.directory))
    assert (told["is_running"], told["failure"]) == (False, lines[1])
    text = Page(run.directory / "report.html").text
    assert text.index(lines[1]) < text.index("Steps done")


def test_a_page_takes_the_place_of_no_file_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    bus = Bus(rank=0, run_dir=run)
    bus.emit(events.RunFinished("finished", 0, 0, 1.0))
    bus.close()
    (events_file,) = (run / "events").iterdir()
    before = events_file.read_bytes()
    assert run_command_line(["report", str(run), "--out", str(events_file)]) == 2
    assert "is there already, and is no page; it is not overwritten" in capsys.readouterr().err
    assert events_file.read_bytes() == before
    # Nor of a device, as /dev/null is: it would be gone for the whole machine.
    os.mkfifo(tmp_path / "pipe")
    for device in (tmp_path / "pipe", Path("/dev/stdout")):
        assert run_command_line(["report", str(run), "--out", str(device)]) == 7
        assert f"{device}: it is no file that can be replaced" in capsys.readouterr().err
    assert (tmp_path / "pipe").is_fifo()
    # Its own page is written anew.
    for _ in range(2):
        assert run_command_line(["report", str(run), "--out", str(run / "page.html")]) == 0


def test_a_reason_of_a_later_release_is_named_as_it_is() -> None:
    skipped = [events.StepSkipped(step, "too_hot", 1.0, 0, 1) for step in (1, 2, 3)]
    assert describe_skipped_steps(range(1, 5), skipped) == (
        "3 of 4 steps were not applied: 3 had the reason 'too_hot'"
    )


def test_of_a_job_that_cannot_be_seen_nobody_says_that_it_runs(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of another machine, whose lock stays where it went down."""
    run.start()
    run.steps(range(1, 17))
    with holding_run_lock(run.directory) as lock:
        left = asdict(lock.holder)
    (run.directory / LOCK_FILE_NAME).write_text(json.dumps(left | {"host": "node-17"}))
    assert run_command_line(["report", str(run.directory)]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("whether it runs cannot be seen from here, 16 steps are done: locked by")
    assert "on node-17 since" in line
    assert re.search(r" of another machine; last event .+ ago$", line)
    assert build_run_json(collect_run_facts(run.directory))["is_running"] is None


def test_a_failure_of_an_earlier_command_is_no_reason_for_the_end(run: Run) -> None:
    run.start()
    run.steps(range(1, 17))
    run.say(events.RankFailed(1, 17, "forward", "exception", "ValueError: old", 0.1), rank=-1)
    run.say(events.RunFinished("failed", 7, 16, 9.0), rank=-1)
    assert "old" in describe_last_failure(collect_run_facts(run.directory))
    # Resumed, it ended before its ranks started.
    run.say(events.Note(events.RESUMED, {"step": 16}), rank=-1, attempt=1)
    run.say(events.RunFinished("failed", 4, 16, 9.0), rank=-1, attempt=1)
    assert describe_last_failure(collect_run_facts(run.directory)) == ""


def test_a_failure_of_a_run_that_was_not_said_to_be_resumed_is_none_of_the_next_end(
    run: Run,
) -> None:
    """Runs of early releases, and ranks of other launchers, come again without a word."""
    run.start()
    run.steps(range(1, 17))
    run.say(events.RankFailed(1, 17, "forward", "exception", "ValueError: old", 0.1), rank=-1)
    run.say(events.RunFinished("failed", 7, 16, 9.0), rank=-1)
    run.say(events.Note("server_ready", {}), rank=-1, attempt=1)
    run.say(events.RunFinished("failed", 4, 16, 9.0), rank=-1, attempt=1)
    assert describe_last_failure(collect_run_facts(run.directory)) == ""
