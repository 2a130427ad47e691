"""Which steps of a run stand, which a restart rolled back, and which were done again."""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass, field, replace

from phalanx.observe import events
from phalanx.observe.attempt_starts import AttemptStarts
from phalanx.observe.events import Envelope
from phalanx.observe.skipped_steps import SkippedSteps
from phalanx.report.event_log import EventLog
from phalanx.report.facts import RunAttempt, StepColumns
from phalanx.report.formats import finite_or_zero


@dataclass
class StepHistory:
    """The attempts' steps: which stand, which were rolled back, which were done again."""

    first_step: dict[int, int] = field(default_factory=dict)
    # step -> the attempt whose result stands
    attempt_of: dict[int, int] = field(default_factory=dict)
    num_redone: int = 0
    num_rolled_back: int = 0
    rolled_back_s: float = 0.0


def select_steps_not_redone(log: EventLog) -> tuple[StepColumns, StepHistory]:
    """The lead rank's steps that stand.

    What an attempt did at or after the next one's first step is undone.
    """
    history = StepHistory()
    if len(log.lead_steps) == 1:
        ((attempt, steps),) = log.lead_steps.items()
        if all(map(operator.lt, steps.step, itertools.islice(steps.step, 1, None))):
            # Nothing was done twice: most runs, and no row is copied.
            history.first_step[attempt] = steps.step[0]
            history.attempt_of = dict.fromkeys(steps.step, attempt)
            return steps, history
    location: dict[int, tuple[int, int]] = {}  # step -> (attempt, row)
    done: set[int] = set()
    for attempt in sorted(log.lead_steps):
        steps = log.lead_steps[attempt]
        first = min(steps.step)
        history.first_step[attempt] = first
        # A list, for the loop takes steps out of `location`.
        for step in [step for step in location if step >= first]:
            earlier, row = location.pop(step)
            history.num_rolled_back += 1
            history.rolled_back_s += finite_or_zero(log.lead_steps[earlier].step_s[row])
        # Done before in any attempt, whether a restart rolled it back or not.
        history.num_redone += len(done.intersection(steps.step))
        done.update(steps.step)
        location.update({step: (attempt, row) for row, step in enumerate(steps.step)})
    standing = StepColumns()
    for step in sorted(location):
        attempt, row = location[step]
        history.attempt_of[step] = attempt
        _copy_step_row(log.lead_steps[attempt], row, standing)
    return standing, history


def _copy_step_row(source: StepColumns, row: int, target: StepColumns) -> None:
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


def select_skips_not_redone(log: EventLog, history: StepHistory) -> list[events.StepSkipped]:
    """Skipped steps that were not done, without a skip, by a later attempt."""
    skipped = SkippedSteps()
    for envelope in log.rest:
        skipped.add_event(envelope)
    return skipped.list_standing_skips(history.attempt_of)


def list_attempts(log: EventLog, history: StepHistory) -> list[RunAttempt]:
    """The attempts by number. Of one that nobody announced it is the launcher that started the
    ranks again."""
    started: dict[int, events.RunStarted] = {}
    starts = AttemptStarts()
    for envelope in log.rest:
        starts.add_event(envelope)
        if isinstance(envelope.event, events.RunStarted) and envelope.rank == log.lead_rank:
            started[envelope.attempt] = envelope.event
    attempts: list[RunAttempt] = []
    for number in sorted(set(started) | set(history.first_step)):
        start = starts.find_start(number)
        is_by_launcher = bool(attempts) and start == "launcher"
        attempts.append(
            RunAttempt(
                number,
                history.first_step.get(number),
                started.get(number),
                is_restart=bool(attempts) and start != "resume",
                is_by_launcher=is_by_launcher,
            )
        )
    return attempts


def name_last_steps_of_ends(story: list[Envelope], log: EventLog) -> list[Envelope]:
    """The story with the last recorded step in each end of a run: those of earlier releases name
    the newest that was saved."""
    newest_attempt, renamed_story = -1, []
    for envelope in story:
        if isinstance(envelope.event, events.RunStarted):
            newest_attempt = max(newest_attempt, envelope.attempt)
        elif isinstance(envelope.event, events.RunFinished):
            # Its own number may be that of an attempt whose ranks left no word.
            until = max(newest_attempt, envelope.attempt)
            done = [number for number in log.lead_steps if number <= until]
            if done:
                last = max(envelope.event.step, log.lead_steps[max(done)].step[-1])
                envelope = replace(envelope, event=replace(envelope.event, step=int(last)))
        renamed_story.append(envelope)
    return renamed_story
