"""From the event files of all ranks and attempts to one `RunFacts`.

A step done again after a restart counts once: the last attempt wins, and what it replaced is
counted as redone. Files are read line by line; of the steps only columns of numbers are kept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from phalanx.checkpoint.best import read_best_step
from phalanx.core.files import read_whole_regular_file
from phalanx.observe import events
from phalanx.observe.events import Envelope
from phalanx.observe.units import choose_metric_units_of_job
from phalanx.observe.words import describe_lost_events
from phalanx.report.bottleneck.of_run import find_size_of_attempt, judge_step_table
from phalanx.report.bottleneck.step_table import StepTable, read_step_table
from phalanx.report.event_log import EventLog, read_event_log
from phalanx.report.facts import RunAttempt, RunFacts, StepColumns, describe_skipped_steps
from phalanx.report.formats import int_or_none
from phalanx.report.history import (
    list_attempts,
    name_last_steps_of_ends,
    select_skips_not_redone,
    select_steps_not_redone,
)
from phalanx.report.ledger import list_ledger_warnings
from phalanx.report.percentiles import compute_median_of_finite
from phalanx.report.rank_phases import sum_newest_steps, sum_rank_phase_seconds
from phalanx.report.reading_gaps import list_reading_gaps
from phalanx.report.reliability import measure_reliability
from phalanx.report.run_identity import identify_run
from phalanx.report.self_time import SelfTimeMap, build_self_time_map
from phalanx.report.story import (
    find_run_status,
    order_story_events,
    select_newest_by_step,
    select_story_events,
    sort_newest_by_step,
)
from phalanx.report.wall_time import charge_wall_time, find_wall_seconds


def collect_run_facts(run_dir: Path, log: EventLog | None = None) -> RunFacts:
    """Read everything a run has written so far.

    A run that wrote nothing gives facts that say so. `log`: its events, where they were read
    already.
    """
    if log is None:
        log = read_event_log(run_dir)
    problems: list[str] = []
    plan = _read_json_object(run_dir / "plan.json", problems)
    job = _read_json_object(run_dir / "job.json", problems)
    story = name_last_steps_of_ends(order_story_events(log), log)
    steps, history = select_steps_not_redone(log)
    status, finished = find_run_status(story)
    timeline = log.times.build_measured_timeline()
    skipped = select_skips_not_redone(log, history)
    rank_ledgers = log.ledger.build_ledgers()
    lead_ledger = next((each for each in rank_ledgers if each.rank == log.lead_rank), None)
    ledger = charge_wall_time(timeline, story, steps, history, skipped, lead_ledger)
    attempts = list_attempts(log, history)
    identity = identify_run(run_dir, job, plan, story)
    table = read_step_table(run_dir, log.tails or None)
    drifts = log.drift.find_drifts()
    num_ranks = int_or_none(plan.get("world_size")) or 0
    reading_gaps = list_reading_gaps(log, steps, finished, num_ranks)
    return RunFacts(
        run_dir=run_dir,
        name=identity.name,
        status=status,
        is_finished=finished is not None,
        total_steps=identity.total_steps,
        layout=identity.layout,
        world_size=identity.world_size,
        device=identity.device,
        lead_rank=log.lead_rank,
        steps=steps,
        last_step=_find_last_step(steps, finished),
        num_redone=history.num_redone,
        num_rolled_back=history.num_rolled_back,
        num_restarts=_count_restarts(story, attempts),
        num_resumes=_count_resumes(story, attempts),
        skipped=skipped,
        attempts=attempts,
        ranks=[sum_rank_phase_seconds(rank, log.clocks[rank]) for rank in sorted(log.clocks)],
        newest_ranks=sum_newest_steps(table),
        evals=sort_newest_by_step(story, events.EvalFinished),
        baselines=_select_newest_baselines(story),
        memory=log.memory,
        samples=select_newest_by_step(story, events.TextGenerated),
        pipelines=sort_newest_by_step(story, events.PipelineMeasured),
        experts=log.experts.build_expert_facts(history.attempt_of.get),
        block_norms=log.block_norms.build_block_norm_facts(history.attempt_of.get),
        callers=log.callers.list_caller_facts(),
        invariants=log.invariants.list_invariant_facts(),
        bottleneck=judge_step_table(run_dir, plan, table, job),
        story=story,
        ledger=ledger,
        reliability=measure_reliability(
            story, timeline, attempts, history.attempt_of, ledger.good_s
        ),
        rank_ledgers=rank_ledgers,
        wall_s=find_wall_seconds(story, timeline, ledger),
        tokens_per_s=compute_median_of_finite(steps.tokens_per_s),
        timeline=timeline,
        started_unix_s=log.first_unix_s,
        last_unix_s=log.last_unix_s,
        num_events=log.num_events,
        num_unreadable=log.num_unreadable,
        plan=plan,
        job=job,
        problems=problems,
        kept_best=read_best_step(run_dir),
        units=choose_metric_units_of_job(job),
        drifts=drifts,
        warnings=[
            *problems,
            *reading_gaps,
            *_list_warning_texts(story, _describe_skips_at_the_end(finished, steps, skipped)),
            *[drift.describe() for drift in drifts],
            *list_ledger_warnings(rank_ledgers),
        ],
        reading_gaps=reading_gaps,
        self_times=_build_self_time_map(run_dir, plan, table),
    )


def _build_self_time_map(
    run_dir: Path, plan: dict[str, Any], table: StepTable | None
) -> SelfTimeMap | None:
    """The map of `table`, by the layout that its attempt had."""
    if table is None or not table.ranks:
        return None
    num_ranks, degrees = find_size_of_attempt(run_dir, plan, table)
    return build_self_time_map(table, degrees.get("pp", 1), num_ranks)


def _find_last_step(steps: StepColumns, finished: events.RunFinished | None) -> int:
    """The later of the last step that stands and the one the run's end names; 0 without either."""
    last_steps = [0, *steps.step[-1:]]
    if finished is not None:
        last_steps.append(int(finished.step))
    return max(last_steps)


def _count_restarts(story: list[Envelope], attempts: list[RunAttempt]) -> int:
    """The restarts of a run, by its supervisor and by another launcher."""
    by_launcher = sum(attempt.is_by_launcher for attempt in attempts)
    return len(select_story_events(story, events.RestartScheduled)) + by_launcher


def _count_resumes(story: list[Envelope], attempts: list[RunAttempt]) -> int:
    """How often a person continued the run, also where its ranks came to no word then; of early
    releases, which did not say so, by the attempts."""
    resumed_attempts = [each.attempt for each in story if events.is_resume(each.event)]
    return len(resumed_attempts) + sum(
        not attempt.is_restart and attempt.number not in resumed_attempts
        for attempt in attempts[1:]
    )


def _select_newest_baselines(story: list[Envelope]) -> list[events.BaselineMeasured]:
    """The last baseline of each name."""
    return list(
        {
            event.name: event for event in select_story_events(story, events.BaselineMeasured)
        }.values()
    )


def _describe_skips_at_the_end(
    finished: events.RunFinished | None, steps: StepColumns, skipped: list[events.StepSkipped]
) -> str | None:
    """A warning of the steps that an ended run did not apply; None of a run that goes on, which may
    still apply one."""
    if finished is None:
        return None
    return describe_skipped_steps(steps.step, skipped)


def _read_json_object(path: Path, problems: list[str]) -> dict[str, Any]:
    """A JSON object, or an empty one and a line in `problems` that says why."""
    try:
        value = json.loads(read_whole_regular_file(path).decode("utf-8", "replace"))
    except FileNotFoundError:
        problems.append(f"{path.name} is not in the run directory")
    except OSError as error:
        problems.append(f"{path.name} cannot be read ({error.strerror})")
    # RecursionError: of brackets nested by the thousand.
    except (ValueError, RecursionError):
        problems.append(f"{path.name} is not JSON")
    else:
        if isinstance(value, dict):
            return value
        problems.append(f"{path.name} is not a JSON object")
    return {}


def _list_warning_texts(story: list[Envelope], at_the_end: str | None) -> list[str]:
    """The texts of all notes with the code "warning", each once, of events that are in no file, and
    the warning of the end."""
    texts: list[Any] = []
    for envelope in story:
        event = envelope.event
        if isinstance(event, events.Note) and event.code == "warning":
            texts.append(event.facts.get("text"))
        elif isinstance(event, events.SinkDropped) and event.sink == "events":
            texts.append(describe_lost_events(event))
    texts.append(at_the_end)
    return list(dict.fromkeys(text for text in texts if isinstance(text, str)))
