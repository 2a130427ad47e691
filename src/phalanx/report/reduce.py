"""From the event files of all ranks and attempts to one `RunFacts`.

A step done again after a restart counts once: the last attempt wins, and what it replaced is
counted as redone. Files are read line by line; of the steps only columns of numbers are kept.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from phalanx.checkpoint.best import read_best
from phalanx.core.files import open_regular, read_bounded_lines, read_regular
from phalanx.observe import events
from phalanx.observe.events import Envelope, StepFinished
from phalanx.observe.order import sort_events
from phalanx.observe.tail import RANK_FILE, SUPERVISOR_FILE, read_event
from phalanx.observe.units import units_of
from phalanx.report.expert_facts import ExpertLog
from phalanx.report.facts import (
    GROUPS,
    Ledger,
    RankTime,
    RunAttempt,
    RunFacts,
    Steps,
    describe_untrained,
    group_of,
)
from phalanx.report.timeline import RunTimeline, TimelineBuilder

NAN = math.nan
SUPERVISOR = -1

Kind = TypeVar("Kind", bound=events.Event)


def reduce_run(run_dir: Path) -> RunFacts:
    """Read everything a run has written so far.

    A run that wrote nothing gives facts that say so.
    """
    log = _read_log(run_dir)
    problems: list[str] = []
    plan = _read_object(run_dir / "plan.json", problems)
    job = _read_object(run_dir / "job.json", problems)
    story = _order_story(log)
    starts = [envelope.event for envelope in story if isinstance(envelope.event, events.RunStarted)]
    start = starts[-1] if starts else None
    steps, history = _select_steps(log)
    status, finished = _status(story)
    timeline = log.times.build()
    ledger = _ledger(timeline, story, steps, history)
    skipped = _find_skipped(log, steps, history)
    attempts = _attempts(log, history)
    name = start.run if start else _text(_look_up(job, "run", "name")) or run_dir.resolve().name
    layout = start.layout if start else _layout(plan)
    total = start.total_steps if start else _look_up(job, "train", "steps")
    world_size = start.world_size if start else plan.get("world_size")
    return RunFacts(
        run_dir=run_dir,
        name=name,
        status=status,
        is_finished=finished is not None,
        total_steps=_int_or_none(total),
        layout={axis: int(degree) for axis, degree in layout.items()},
        world_size=_int_or_none(world_size),
        device=start.device if start else _text(plan.get("device")),
        lead_rank=log.lead_rank,
        steps=steps,
        last_step=max(steps.step[-1] if len(steps) else 0, int(finished.step) if finished else 0),
        num_redone=history.num_redone,
        num_rolled_back=history.num_rolled_back,
        num_restarts=sum(isinstance(envelope.event, events.RestartScheduled) for envelope in story),
        num_resumes=sum(not attempt.is_restart for attempt in attempts[1:]),
        skipped=skipped,
        attempts=attempts,
        ranks=[_rank_time(rank, log.clocks[rank]) for rank in sorted(log.clocks)],
        evals=sorted(
            {event.step: event for event in _select_events(story, events.EvalFinished)}.values(),
            key=_by_step,
        ),
        baselines=list(
            {event.name: event for event in _select_events(story, events.BaselineMeasured)}.values()
        ),
        memory=log.memory,
        samples=list(
            {event.step: event for event in _select_events(story, events.TextGenerated)}.values()
        ),
        pipelines=sorted(
            {
                event.step: event for event in _select_events(story, events.PipelineMeasured)
            }.values(),
            key=_by_step,
        ),
        experts=log.experts.facts(history.attempt_of.get),
        story=story,
        ledger=ledger,
        wall_s=_wall_s(story, ledger),
        tokens_per_s=median(steps.tokens_per_s),
        timeline=timeline,
        started_unix_s=log.first_unix_s,
        last_unix_s=log.last_unix_s,
        num_events=log.num_events,
        num_unreadable=log.num_unreadable,
        plan=plan,
        job=job,
        problems=problems,
        kept_best=read_best(run_dir),
        units=units_of(job),
        warnings=_warnings(
            story, describe_untrained(steps.step, skipped) if finished is not None else None
        ),
    )


# --- reading --------------------------------------------------------------------------------------


@dataclass
class _Clock:
    """Sums of one rank's step times."""

    step_s: array[float] = field(default_factory=lambda: array("d"))
    groups_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(GROUPS, 0.0))


@dataclass
class _Log:
    """The event files as read, steps apart from the rest."""

    lead_rank: int
    lead_steps: dict[int, Steps] = field(default_factory=dict)  # by attempt
    clocks: dict[int, _Clock] = field(default_factory=dict)
    memory: dict[int, events.MemoryMeasured] = field(default_factory=dict)
    experts: ExpertLog = field(default_factory=ExpertLog)
    rest: list[Envelope] = field(default_factory=list)
    num_events: int = 0
    num_unreadable: int = 0
    times: TimelineBuilder = field(default_factory=TimelineBuilder)
    by_stream: dict[tuple[int, int], list[Envelope]] = field(
        default_factory=dict
    )  # first and last of each

    def take(self, envelope: Envelope) -> None:
        event = envelope.event
        self.num_events += 1
        if envelope.rank in (SUPERVISOR, self.lead_rank):
            self.times.take(envelope)
        self.by_stream.setdefault((envelope.attempt, envelope.rank), [envelope])[1:] = [envelope]
        if isinstance(event, StepFinished):
            groups_s = _sum_by_group(event)
            self._clock(envelope.rank, event, groups_s)
            if envelope.rank == self.lead_rank:
                _append(self.lead_steps.setdefault(envelope.attempt, Steps()), event, groups_s)
        elif isinstance(event, events.MemoryMeasured):
            self.memory[envelope.rank] = event
        elif isinstance(event, events.ExpertsLoaded):
            self.experts.take(envelope)
        elif not isinstance(
            event, events.SamplesRead
        ):  # one per step and rank: the ledger's, not the page's
            self.rest.append(envelope)

    @property
    def first_unix_s(self) -> float:
        """Wall-clock time (Unix seconds) of the first event; NaN without events."""
        ends = sort_events(envelope for stream in self.by_stream.values() for envelope in stream)
        return ends[0].time_unix_s if ends else NAN

    @property
    def last_unix_s(self) -> float:
        ends = sort_events(envelope for stream in self.by_stream.values() for envelope in stream)
        return ends[-1].time_unix_s if ends else NAN

    def _clock(self, rank: int, event: StepFinished, groups_s: dict[str, float]) -> None:
        clock = self.clocks.setdefault(rank, _Clock())
        if math.isfinite(event.step_s):
            clock.step_s.append(event.step_s)
        for name, seconds in groups_s.items():
            clock.groups_s[name] += seconds


def _read_log(run_dir: Path) -> _Log:
    files = _event_files(run_dir / "events")
    log = _Log(lead_rank=min((rank for rank, _, _ in files if rank != SUPERVISOR), default=0))
    for _, _, path in files:
        clock = None
        for line in _lines(path):
            envelope = read_event(line, clock)
            if envelope is None:
                log.num_unreadable += 1
            else:
                clock = envelope.clock
                log.take(envelope)
    return log


def _event_files(directory: Path) -> list[tuple[int, int, Path]]:
    """(rank, attempt, path), the supervisor first, then ranks and attempts in order."""
    event_files = []
    try:
        for path in directory.iterdir():
            match = RANK_FILE.fullmatch(path.name)
            if match:
                event_files.append((int(match[1]), int(match[2]), path))
            elif path.name == SUPERVISOR_FILE:
                event_files.append((SUPERVISOR, 0, path))
    except OSError:
        return []
    return sorted(event_files)


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with open_regular(path) as file:
            for line in read_bounded_lines(file):
                if line.strip():
                    yield line
    except OSError:
        return


def _read_object(path: Path, problems: list[str]) -> dict[str, Any]:
    """A JSON object, or an empty one and a line in `problems` that says why."""
    try:
        value = json.loads(read_regular(path).decode("utf-8", "replace"))
    except FileNotFoundError:
        problems.append(f"{path.name} is not in the run directory")
    except OSError as error:
        problems.append(f"{path.name} cannot be read ({error.strerror})")
    except (ValueError, RecursionError):
        problems.append(f"{path.name} is not JSON")
    else:
        if isinstance(value, dict):
            return value
        problems.append(f"{path.name} is not a JSON object")
    return {}


def _sum_by_group(event: StepFinished) -> dict[str, float]:
    groups_s: dict[str, float] = {}
    for phase, seconds in event.phases_s.items():
        name = group_of(phase)
        groups_s[name] = groups_s.get(name, 0.0) + seconds
    if math.isfinite(event.unaccounted_s):
        groups_s["unaccounted"] = event.unaccounted_s
    return groups_s


def _append(steps: Steps, event: StepFinished, groups_s: dict[str, float]) -> None:
    steps.step.append(int(event.step))
    steps.loss.append(event.loss)
    steps.learning_rate.append(event.learning_rate)
    steps.grad_norm.append(event.grad_norm)
    steps.step_s.append(event.step_s)
    steps.tokens_per_s.append(event.tokens_per_s)
    steps.rss_bytes.append(event.rss_bytes)
    steps.sent_bytes.append(event.sent_bytes)
    for axis, sent_bytes in event.sent_by_axis.items():
        steps.sent_by_axis[axis].append(sent_bytes)
    for name, column in steps.groups_s.items():
        column.append(groups_s.get(name, 0.0))


# --- steps that count, and steps that were done again ---------------------------------------------


@dataclass
class _History:
    """The attempts' steps: which stand, which were rolled back, which were done again."""

    first_step: dict[int, int] = field(default_factory=dict)
    attempt_of: dict[int, int] = field(
        default_factory=dict
    )  # step -> the attempt whose result stands
    num_redone: int = 0
    num_rolled_back: int = 0
    rolled_back_s: float = 0.0


def _select_steps(log: _Log) -> tuple[Steps, _History]:
    """The lead rank's steps that stand.

    What an attempt did at or after the next one's first step is undone.
    """
    history = _History()
    location: dict[int, tuple[int, int]] = {}  # step -> (attempt, row)
    done: set[int] = set()
    for attempt in sorted(log.lead_steps):
        steps = log.lead_steps[attempt]
        first = min(steps.step)
        history.first_step[attempt] = first
        for step in [step for step in location if step >= first]:
            earlier, row = location.pop(step)
            history.num_rolled_back += 1
            history.rolled_back_s += _finite_or_zero(log.lead_steps[earlier].step_s[row])
        history.num_redone += len(done.intersection(steps.step))
        done.update(steps.step)
        location.update({step: (attempt, row) for row, step in enumerate(steps.step)})
    standing = Steps()
    for step in sorted(location):
        attempt, row = location[step]
        history.attempt_of[step] = attempt
        _copy_row(log.lead_steps[attempt], row, standing)
    return standing, history


def _copy_row(source: Steps, row: int, target: Steps) -> None:
    target.step.append(source.step[row])
    target.loss.append(source.loss[row])
    target.learning_rate.append(source.learning_rate[row])
    target.grad_norm.append(source.grad_norm[row])
    target.step_s.append(source.step_s[row])
    target.tokens_per_s.append(source.tokens_per_s[row])
    target.rss_bytes.append(source.rss_bytes[row])
    target.sent_bytes.append(source.sent_bytes[row])
    for axis, axis_bytes in target.sent_by_axis.items():
        axis_bytes.append(source.sent_by_axis[axis][row])
    for name, column in target.groups_s.items():
        column.append(source.groups_s[name][row])


def _find_skipped(log: _Log, steps: Steps, history: _History) -> list[events.StepSkipped]:
    """Skipped steps that were not done, without a skip, by a later attempt."""
    latest: dict[int, tuple[int, events.StepSkipped]] = {}
    for envelope in sorted(log.rest, key=lambda envelope: envelope.attempt):
        if isinstance(envelope.event, events.StepSkipped):
            latest[int(envelope.event.step)] = (envelope.attempt, envelope.event)
    return [
        event
        for step, (attempt, event) in sorted(latest.items())
        if history.attempt_of.get(step, attempt) <= attempt
    ]


def _attempts(log: _Log, history: _History) -> list[RunAttempt]:
    started = {
        envelope.attempt: envelope.event
        for envelope in log.rest
        if isinstance(envelope.event, events.RunStarted) and envelope.rank == log.lead_rank
    }
    crashed = {
        envelope.attempt
        for envelope in log.rest
        if isinstance(envelope.event, events.RestartScheduled)
    }
    numbers = sorted(set(started) | set(history.first_step))
    return [
        RunAttempt(
            number,
            history.first_step.get(number),
            started.get(number),
            is_restart=number - 1 in crashed,
        )
        for number in numbers
    ]


# --- time -----------------------------------------------------------------------------------------


def _rank_time(rank: int, clock: _Clock) -> RankTime:
    ordered = sorted(clock.step_s)
    count = max(len(ordered), 1)
    return RankTime(
        rank=rank,
        num_steps=len(ordered),
        mean_groups_s={name: seconds / count for name, seconds in clock.groups_s.items()},
        mean_s=sum(ordered) / count if ordered else NAN,
        p50_s=percentile(ordered, 0.50),
        p99_s=percentile(ordered, 0.99),
        max_s=ordered[-1] if ordered else NAN,
    )


def percentile(ordered: list[float], fraction: float) -> float:
    """The smallest of the sorted values that at least `fraction` of them do not exceed; NaN of
    none."""
    return ordered[max(math.ceil(fraction * len(ordered)) - 1, 0)] if ordered else NAN


def median(values: list[float]) -> float:
    return percentile(sorted(value for value in values if math.isfinite(value)), 0.5)


def _ledger(
    timeline: RunTimeline, story: list[Envelope], steps: Steps, history: _History
) -> Ledger:
    """Charge the wall clock: steps that stand, what they waited for, steps that were undone,
    starting, the rest."""
    starts = _select_events(story, events.RunStarted)
    wall_s = timeline.alive_s
    data_s, checkpoint_s, in_steps_s, stages_s = (
        sum(max(seconds, 0.0) for seconds in steps.groups_s[name])
        for name in ("data", "checkpoint", "evaluate", "pipeline")
    )
    between_steps_s = sum(
        _finite_or_zero(event.wall_s) for event in _select_events(story, events.EvalFinished)
    )
    # A save between two steps is charged to the next one's phases but not to its seconds:
    # unaccounted is then negative.
    between_s = sum(
        max(-_finite_or_zero(seconds), 0.0) for seconds in steps.groups_s["unaccounted"]
    )
    step_s = sum(_finite_or_zero(seconds) for seconds in steps.step_s) + between_s
    parts = {
        "training steps": max(step_s - data_s - checkpoint_s - in_steps_s - stages_s, 0.0),
        "waiting for data": data_s,
        **({"waiting for other stages": stages_s} if stages_s else {}),
        "checkpoints": checkpoint_s,
        "evaluation": in_steps_s + between_steps_s,
        "steps done again": history.rolled_back_s,
        "starting": sum(_finite_or_zero(start.startup_s) for start in starts),
    }
    wall_s = max(wall_s, sum(parts.values()))
    parts["everything else"] = wall_s - sum(parts.values())
    return Ledger(wall_s, parts)


def _wall_s(story: list[Envelope], ledger: Ledger) -> float:
    """The duration that the run reported, if it ended once; else the span of its events."""
    ends = _select_events(story, events.RunFinished)
    if (
        len(ends) == 1
        and math.isfinite(ends[0].wall_s)
        and isinstance(story[-1].event, events.RunFinished)
    ):
        return ends[0].wall_s
    return ledger.wall_s if ledger.wall_s > 0 else NAN


# --- the story ------------------------------------------------------------------------------------


def _order_story(log: _Log) -> list[Envelope]:
    """Everything but steps, in order, once: what all ranks say alike is taken from the lead
    rank."""
    story: list[Envelope] = []
    for envelope in sort_events(log.rest):
        is_own = isinstance(
            envelope.event,
            events.CheckpointFailed
            | events.CheckpointUnusable
            | events.SinkDropped
            | events.Note
            | events.LoaderWorkerReplaced,
        )
        if envelope.rank not in (SUPERVISOR, log.lead_rank) and not is_own:
            continue
        if (
            isinstance(envelope.event, events.RunFinished)
            and story
            and story[-1].event.kind() == envelope.event.kind()
        ):
            story.pop()  # rank 0 and the supervisor both saw the end
        story.append(envelope)
    return story


def _status(story: list[Envelope]) -> tuple[str, events.RunFinished | None]:
    for envelope in reversed(story):
        if isinstance(envelope.event, events.RunFinished):
            return envelope.event.status, envelope.event
        if isinstance(
            envelope.event, events.RunStarted | events.RanksStarted | events.RestartScheduled
        ):
            return "unfinished", None
    return "unfinished" if story else "no events", None


def _warnings(story: list[Envelope], at_the_end: str | None) -> list[str]:
    """The texts of all notes with the code "warning", each once, and the warning of the end."""
    texts = [e.facts.get("text") for e in _select_events(story, events.Note) if e.code == "warning"]
    texts.append(at_the_end)
    return list(dict.fromkeys(text for text in texts if isinstance(text, str)))


def _select_events(story: list[Envelope], kind: type[Kind]) -> list[Kind]:
    return [envelope.event for envelope in story if isinstance(envelope.event, kind)]


def _by_step(event: events.EvalFinished | events.PipelineMeasured) -> float:
    return event.step


# --- small things ---------------------------------------------------------------------------------


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def _int_or_none(value: Any) -> int | None:
    return int(value) if _is_number(value) else None


def _finite_or_zero(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _look_up(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _layout(plan: dict[str, Any]) -> dict[str, int]:
    layout = plan.get("layout")
    return (
        {str(a): int(d) for a, d in layout.items() if _is_number(d)}
        if isinstance(layout, dict)
        else {}
    )
