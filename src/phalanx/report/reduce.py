"""From the event files of all ranks and attempts to one `RunFacts`.

A step done again after a restart counts once: the last attempt wins, and what it replaced is
counted as redone. Files are read line by line; of the steps only columns of numbers are kept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from phalanx.checkpoint.best import read_best_step
from phalanx.core.files import read_whole_regular_file
from phalanx.observe import events
from phalanx.observe.events import Envelope
from phalanx.observe.order import sort_events
from phalanx.observe.units import choose_metric_units_of_job
from phalanx.observe.words import describe_lost_events
from phalanx.report.bottleneck.of_run import judge_step_table
from phalanx.report.bottleneck.step_table import StepTable, read_step_table
from phalanx.report.event_log import SUPERVISOR_RANK, EventLog, RankStepTimes, read_event_log
from phalanx.report.facts import (
    RankPhaseSeconds,
    RunAttempt,
    RunFacts,
    StepColumns,
    WallTimeBreakdown,
    describe_skipped_steps,
)
from phalanx.report.formats import finite_or_zero
from phalanx.report.history import (
    StepHistory,
    list_attempts,
    name_last_steps_of_ends,
    select_skips_not_redone,
    select_steps_not_redone,
)
from phalanx.report.ledger import list_ledger_warnings
from phalanx.report.reading_gaps import list_reading_gaps
from phalanx.report.reliability import measure_reliability
from phalanx.report.self_time import build_self_time_map
from phalanx.report.timeline import RunTimeline

NAN = math.nan

Kind = TypeVar("Kind", bound=events.Event)
AtStep = TypeVar("AtStep", events.EvalFinished, events.PipelineMeasured, events.TextGenerated)

# What each rank tells of itself alone; all else is the same on every rank.
_SINGLE_RANK_EVENTS = (
    events.CheckpointFailed,
    events.CheckpointUnusable,
    events.SinkDropped,
    events.Note,
    events.LoaderWorkerReplaced,
    events.InvariantChecked,
)
_ATTEMPT_START_EVENTS = (
    events.RunStarted,
    events.RanksStarted,
    events.RestartScheduled,
    events.LayoutChanged,
    events.RolledBack,
)


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
    story = name_last_steps_of_ends(_order_story_events(log), log)
    steps, history = select_steps_not_redone(log)
    status, finished = _find_run_status(story)
    timeline = log.times.build_measured_timeline()
    skipped = select_skips_not_redone(log, history)
    ledger = _charge_wall_time(timeline, story, steps, history, skipped)
    attempts = list_attempts(log, history)
    identity = _identify_run(run_dir, job, plan, story)
    table = read_step_table(run_dir, log.tails or None)
    drifts = log.drift.find_drifts()
    num_ranks = _int_or_none(plan.get("world_size")) or 0
    reading_gaps = list_reading_gaps(log, steps, finished, num_ranks)
    rank_ledgers = log.ledger.build_ledgers()
    return RunFacts(
        run_dir=run_dir,
        name=identity.name,
        status=status,
        is_finished=finished is not None,
        total_steps=_int_or_none(identity.total_steps),
        # A file may write whole numbers as floats (`tail._has_all_tokens`).
        layout={axis: int(degree) for axis, degree in identity.layout.items()},
        world_size=_int_or_none(identity.world_size),
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
        ranks=[_sum_rank_phase_seconds(rank, log.clocks[rank]) for rank in sorted(log.clocks)],
        newest_ranks=_sum_newest_steps(table),
        evals=sorted(_newest_event_by_step(story, events.EvalFinished), key=_get_step_of_event),
        baselines=_select_newest_baselines(story),
        memory=log.memory,
        samples=_newest_event_by_step(story, events.TextGenerated),
        pipelines=sorted(
            _newest_event_by_step(story, events.PipelineMeasured), key=_get_step_of_event
        ),
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
        wall_s=_find_wall_seconds(story, timeline, ledger),
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
            *reading_gaps,
            *_list_warning_texts(story, _describe_skips_at_the_end(finished, steps, skipped)),
            *[drift.describe() for drift in drifts],
            *list_ledger_warnings(rank_ledgers),
        ],
        reading_gaps=reading_gaps,
        self_times=build_self_time_map(
            table, int(identity.layout.get("pp", 1)), _int_or_none(identity.world_size) or 0
        ),
    )


@dataclass(frozen=True)
class _RunIdentity:
    """The name, layout, length and size of a run; values that a file may hold in any form are
    not checked yet."""

    name: str
    layout: dict[str, int]
    total_steps: Any
    world_size: Any
    device: str


def _identify_run(
    run_dir: Path, job: dict[str, Any], plan: dict[str, Any], story: list[Envelope]
) -> _RunIdentity:
    """By its last RunStarted, which a run has that began; else by its job and plan."""
    starts = _select_events(story, events.RunStarted)
    if starts:
        start = starts[-1]
        return _RunIdentity(
            start.run, start.layout, start.total_steps, start.world_size, start.device
        )
    return _RunIdentity(
        name=_text_or_empty(_find_nested_value(job, "run", "name")) or run_dir.resolve().name,
        layout=_parse_layout_degrees(plan),
        total_steps=_find_nested_value(job, "train", "steps"),
        world_size=plan.get("world_size"),
        device=_text_or_empty(plan.get("device")),
    )


def _find_last_step(steps: StepColumns, finished: events.RunFinished | None) -> int:
    """The later of the last step that stands and the one the run's end names; 0 without either."""
    last_steps = [0, *steps.step[-1:]]
    if finished is not None:
        last_steps.append(int(finished.step))
    return max(last_steps)


def _count_restarts(story: list[Envelope], attempts: list[RunAttempt]) -> int:
    """The restarts of a run, by its supervisor and by another launcher."""
    by_launcher = sum(attempt.is_by_launcher for attempt in attempts)
    return len(_select_events(story, events.RestartScheduled)) + by_launcher


def _count_resumes(story: list[Envelope], attempts: list[RunAttempt]) -> int:
    """How often a person continued the run, also where its ranks came to no word then; of early
    releases, which did not say so, by the attempts."""
    said = [each.attempt for each in story if events.is_resume(each.event)]
    return len(said) + sum(
        not attempt.is_restart and attempt.number not in said for attempt in attempts[1:]
    )


def _select_newest_baselines(story: list[Envelope]) -> list[events.BaselineMeasured]:
    """The last baseline of each name."""
    return list(
        {event.name: event for event in _select_events(story, events.BaselineMeasured)}.values()
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


# --- time -----------------------------------------------------------------------------------------


def _sum_rank_phase_seconds(rank: int, clock: RankStepTimes) -> RankPhaseSeconds:
    ordered = sorted(zip(clock.step_s, clock.counts, strict=True))
    num_steps = clock.num_steps
    count = max(num_steps, 1)
    mean_s = NAN
    if ordered:
        mean_s = sum(seconds * each for seconds, each in ordered) / count
    return RankPhaseSeconds(
        rank=rank,
        num_steps=num_steps,
        mean_groups_s={name: seconds / count for name, seconds in clock.groups_s.items()},
        mean_s=mean_s,
        p50_s=_compute_weighted_percentile(ordered, 0.50),
        p99_s=_compute_weighted_percentile(ordered, 0.99),
        max_s=_compute_weighted_percentile(ordered, 1.00),
    )


def _sum_newest_steps(table: StepTable | None) -> list[RankPhaseSeconds]:
    ranks = []
    if table is not None and table.num_steps:
        # A row may be the mean of a window of steps.
        count = max(round(table.steps_per_row), 1)
        for rank, rows in table.rows.items():
            clock = RankStepTimes()
            for row in rows:
                groups_s = {name: count * seconds for name, seconds in row.seconds.items()}
                clock.add_steps(count * row.step_s, count, groups_s)
            ranks.append(_sum_rank_phase_seconds(rank, clock))
    return ranks


def _compute_weighted_percentile(ordered: list[tuple[float, int]], fraction: float) -> float:
    """The smallest of the sorted (value, count) that at least `fraction` of all counts do not
    exceed; NaN of none."""
    least = fraction * sum(count for _, count in ordered)
    num_so_far = 0
    for value, count in ordered:
        num_so_far += count
        if num_so_far >= least:
            return value
    return NAN


def compute_percentile(ordered: list[float], fraction: float) -> float:
    """The smallest of the sorted values that at least `fraction` of them do not exceed; NaN of
    none."""
    if not ordered:
        return NAN
    return ordered[max(math.ceil(fraction * len(ordered)) - 1, 0)]


def compute_median_of_finite(values: list[float]) -> float:
    return compute_percentile(sorted(value for value in values if math.isfinite(value)), 0.5)


def _charge_wall_time(
    timeline: RunTimeline,
    story: list[Envelope],
    steps: StepColumns,
    history: StepHistory,
    skipped: list[events.StepSkipped],
) -> WallTimeBreakdown:
    """Charge the wall clock: steps that stand, what they waited for, steps that were not applied,
    steps that were undone, starting (if that is known), the rest."""
    starts = _select_events(story, events.RunStarted)
    wall_s = timeline.alive_s
    data_s = _sum_positive(steps.groups_s["data"])
    checkpoint_s = _sum_positive(steps.groups_s["checkpoint"])
    in_steps_s = _sum_positive(steps.groups_s["evaluate"])
    stages_s = _sum_positive(steps.groups_s["pipeline"])
    between_steps_s = _sum_finite(
        event.wall_s for event in _select_events(story, events.EvalFinished)
    )
    # A save between two steps is charged to the next one's phases but not to its seconds:
    # unaccounted is then negative. No more than the save: what another phase has in the next step,
    # as the record of a step, is in the seconds of that one.
    between_s = _sum_positive(
        min(-finite_or_zero(spare_s), save_s)
        for spare_s, save_s in zip(
            steps.groups_s["unaccounted"], steps.groups_s["checkpoint"], strict=True
        )
    )
    step_s = _sum_finite(steps.step_s) + between_s
    # What a step's own phases have is taken out of it: no second is charged twice.
    parts = {
        "training steps": max(step_s - data_s - checkpoint_s - in_steps_s - stages_s, 0.0),
        "waiting for data": data_s,
    }
    if stages_s:
        parts["waiting for other stages"] = stages_s
    for name, lost_s in _sum_seconds_of_skipped_steps(steps, skipped).items():
        taken_s = min(lost_s, parts.get(name, 0.0))
        if taken_s:
            parts[name] -= taken_s
            parts["skipped steps"] = parts.get("skipped steps", 0.0) + taken_s
    parts |= {
        "checkpoints": checkpoint_s,
        "evaluation": in_steps_s + between_steps_s,
        "steps done again": history.rolled_back_s,
    }
    if _knows_starts(story, history):
        parts["starting"] = _sum_finite(start.startup_s for start in starts)
    # Never less than its parts, so that what is left for "everything else" is not negative.
    wall_s = max(wall_s, sum(parts.values()))
    parts["everything else"] = wall_s - sum(parts.values())
    return WallTimeBreakdown(wall_s, parts)


def _knows_starts(story: list[Envelope], history: StepHistory) -> bool:
    """False where an attempt has steps, and nobody said how long it took to start: rank 0 does,
    whose file may be lost."""
    started = {each.attempt for each in story if isinstance(each.event, events.RunStarted)}
    return history.first_step.keys() <= started


def _sum_seconds_of_skipped_steps(
    steps: StepColumns, skipped: list[events.StepSkipped]
) -> dict[str, float]:
    """Seconds of the steps that were not applied, by the part they would be charged to."""
    numbers = {int(event.step) for event in skipped}
    training_s = stages_s = 0.0
    for row, step in enumerate(steps.step):
        if step in numbers:
            in_groups_s = {
                name: max(steps.groups_s[name][row], 0.0)
                for name in ("data", "checkpoint", "evaluate", "pipeline")
            }
            stages_s += in_groups_s["pipeline"]
            step_s = finite_or_zero(steps.step_s[row])
            training_s += max(step_s - sum(in_groups_s.values()), 0.0)
    return {"training steps": training_s, "waiting for other stages": stages_s}


def _sum_positive(seconds: Iterable[float]) -> float:
    return sum(max(value, 0.0) for value in seconds)


def _sum_finite(seconds: Iterable[float]) -> float:
    return sum(finite_or_zero(value) for value in seconds)


def _find_wall_seconds(
    story: list[Envelope], timeline: RunTimeline, ledger: WallTimeBreakdown
) -> float:
    """The duration that the only command of a run reported at its end; else the span of the events
    of all commands, of which one that was killed reported nothing."""
    end = story[-1].event if story else None
    is_one_command = timeline.num_commands == 1
    if is_one_command and isinstance(end, events.RunFinished) and math.isfinite(end.wall_s):
        return end.wall_s
    if ledger.wall_s > 0:
        return ledger.wall_s
    return NAN


# --- the story ------------------------------------------------------------------------------------


def _order_story_events(log: EventLog) -> list[Envelope]:
    """Everything but steps, in order, once: what all ranks say alike is taken from the lead
    rank."""
    story: list[Envelope] = []
    for envelope in sort_events(log.rest):
        is_of_one_rank = isinstance(envelope.event, _SINGLE_RANK_EVENTS)
        if envelope.rank not in (SUPERVISOR_RANK, log.lead_rank) and not is_of_one_rank:
            continue
        # Rank 0 and the supervisor both see the end.
        if story and _are_all_run_ends(story[-1], envelope):
            story.pop()
        story.append(envelope)
    return story


def _are_all_run_ends(*envelopes: Envelope) -> bool:
    return all(isinstance(envelope.event, events.RunFinished) for envelope in envelopes)


def _find_run_status(story: list[Envelope]) -> tuple[str, events.RunFinished | None]:
    # Newest first: an end counts unless something began after it.
    for envelope in reversed(story):
        if isinstance(envelope.event, events.RunFinished):
            return envelope.event.status, envelope.event
        if isinstance(envelope.event, _ATTEMPT_START_EVENTS):
            return "unfinished", None
    if not story:
        return "no events", None
    return "unfinished", None


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


def _select_events(story: list[Envelope], kind: type[Kind]) -> list[Kind]:
    return [envelope.event for envelope in story if isinstance(envelope.event, kind)]


def _newest_event_by_step(story: list[Envelope], kind: type[AtStep]) -> list[AtStep]:
    """One event for each step: a step done again replaces what was said of it, in its place."""
    return list({event.step: event for event in _select_events(story, kind)}.values())


def _get_step_of_event(event: events.EvalFinished | events.PipelineMeasured) -> float:
    return event.step


# --- small things ---------------------------------------------------------------------------------


def _is_number_of_ordinary_size(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def _int_or_none(value: Any) -> int | None:
    if not _is_number_of_ordinary_size(value):
        return None
    return int(value)


def _text_or_empty(value: Any) -> str:
    if isinstance(value, str):
        return value
    return ""


def _find_nested_value(value: Any, *keys: str) -> Any:
    """The value under `keys`, one inside the other; None where there is no such object."""
    for key in keys:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def _parse_layout_degrees(plan: dict[str, Any]) -> dict[str, int]:
    layout = plan.get("layout")
    if not isinstance(layout, dict):
        return {}
    return {
        str(axis): int(degree)
        for axis, degree in layout.items()
        if _is_number_of_ordinary_size(degree)
    }
