"""A run of which files are missing: what they said is not known, and no other number is changed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from test_report import Page

from phalanx.observe import events
from phalanx.observe.events import wrap_event_in_envelope
from phalanx.report.bottleneck.describe import list_verdict_lines
from phalanx.report.failures import list_failure_lines
from phalanx.report.page import write_report
from phalanx.report.reduce import collect_run_facts
from phalanx.report.run_status import list_status_lines
from recorded_steps import write_run

GOLDEN = Path(__file__).parents[1] / "golden" / "2026-11-23" / "run"
ONLY_OF_RANK_0 = ", and what rank 0 alone tells: how long starting took, evaluations, saves"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of two ranks that took 5.9 s, of which 5.5 to start, and failed."""
    shutil.copytree(GOLDEN, tmp_path / "run")
    return tmp_path / "run"


def remove(run_dir: Path, pattern: str) -> None:
    paths = list((run_dir / "events").glob(pattern))
    assert paths
    for path in paths:
        path.unlink()


def test_without_rank_0_nobody_knows_how_long_starting_took(run_dir: Path) -> None:
    whole = collect_run_facts(run_dir)
    assert whole.ledger.parts_s["starting"] == pytest.approx(5.46, abs=0.01)
    remove(run_dir, "rank-0000-*")
    facts = collect_run_facts(run_dir)
    assert "starting" not in facts.ledger.parts_s
    assert facts.ledger.parts_s["everything else"] > 5
    # The command said itself how long it took: its life does not begin with its first event.
    assert facts.ledger.wall_s == pytest.approx(whole.ledger.wall_s, rel=0.01)
    assert facts.reliability.goodput == pytest.approx(whole.reliability.goodput, rel=0.02)
    (gap,) = facts.reading_gaps
    assert gap.startswith("no events of rank 0 are here (attempt 0): what they did is missing")
    assert gap.endswith(ONLY_OF_RANK_0)
    assert (
        "starting, of which nobody said here how long it took"
        in Page(write_report(run_dir, facts)).text
    )


def test_without_any_rank_their_files_are_missed(run_dir: Path) -> None:
    """The supervisor says that steps were done."""
    remove(run_dir, "rank-*")
    facts = collect_run_facts(run_dir)
    assert facts.reading_gaps[0].startswith("no events of ranks 0 and 1 are here (attempt 0)")
    text = Page(write_report(run_dir, facts)).text
    assert "No step is on record: not measured." in text
    assert "No step has finished" not in text
    # Of a run that has ended nothing is "not yet", and a section without content is none.
    assert "no rank has reported its memory." in text
    assert "A sample of what it writes" not in text


def test_a_run_that_failed_before_its_first_step_misses_nothing(run_dir: Path) -> None:
    remove(run_dir, "rank-*")
    path = run_dir / "events" / "supervisor.jsonl"
    path.write_text(path.read_text().replace('"exit_code":10,"step":3', '"exit_code":10,"step":0'))
    assert collect_run_facts(run_dir).reading_gaps == []


def test_a_verdict_on_some_of_the_ranks_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {}, num_ranks=4)
    (run / "plan.json").write_text('{"world_size": 4}')
    remove(run, "rank-0002-*")
    verdict = collect_run_facts(run).bottleneck
    assert verdict is not None
    lines = list_verdict_lines(verdict)
    assert "looked at: steps 4 to 40 of 3 ranks, 105 ms each in the mean" in lines
    assert "not judged: who waits for whom: steps of 3 of 4 ranks are here" in lines


def test_a_run_whose_steps_are_all_done_was_not_cut_off_in_them(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {}, num_ranks=1, num_steps=12)
    (path,) = (run / "events").iterdir()
    for total_steps, words in (
        (12, "all 12 steps are done, but no end was recorded"),
        (20, "cut off after step 12: no end was recorded"),
    ):
        start = events.RunStarted("run", "digest", 1, 0, total_steps, "cpu", {})
        line = wrap_event_in_envelope(start, rank=0, attempt=0, seq=0).to_line()
        lines = [each for each in path.read_text().splitlines() if "run_started" not in each]
        path.write_text("\n".join([line, *lines]) + "\n")
        assert list_status_lines(collect_run_facts(run)) == [f"{words}, and no job runs here"]


def test_resumes_and_commands_that_were_cut_off_are_counted_though_ranks_said_nothing(
    run_dir: Path,
) -> None:
    """The end of the first command is lost, as of a machine that lost its power; the second one
    failed before its ranks began, the third went on."""
    supervisor = run_dir / "events" / "supervisor.jsonl"
    lines = supervisor.read_text().splitlines()[:2]
    for attempt, event in (
        (1, events.Note(events.RESUMED, {"step": 3, "told": "phalanx train --resume"})),
        (1, events.RankFailed(0, 0, "", "exception", "OSError: no disk", 0.1)),
        (1, events.RunFinished("failed", 1, 3, 4.0)),
        (2, events.Note(events.RESUMED, {"step": 3, "told": "phalanx train --resume"})),
    ):
        envelope = wrap_event_in_envelope(event, rank=-1, attempt=attempt, seq=len(lines))
        lines.append(envelope.to_line())
    supervisor.write_text("\n".join(lines) + "\n")
    facts = collect_run_facts(run_dir)
    assert facts.num_resumes == 2
    assert facts.reliability.num_cut_off == 1
    assert facts.reliability.num_failures == 1
    (line, goodput) = list_failure_lines(facts)
    assert "; 1 command cut off without an end on record; first: rank 0 failed before its" in line
    assert goodput.endswith("with 95 % confidence), without what was cut off")


def test_events_of_a_later_schema_are_not_taken_for_those_of_this_one(run_dir: Path) -> None:
    """Their numbers may mean something else."""
    for path in (run_dir / "events").iterdir():
        path.write_text(path.read_text().replace('"schema":1,', '"schema":2,'))
    facts = collect_run_facts(run_dir)
    assert (facts.num_events, facts.num_unreadable) == (0, 15)
    assert list_status_lines(facts) == ["none of its events can be read, and no job runs here"]
    assert facts.reading_gaps[0].startswith("15 lines of the event files could not be read")
    text = Page(write_report(run_dir, facts)).text
    assert "None of the events of this run can be read." in text
