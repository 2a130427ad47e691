"""The story of a run: its events but for steps, in order, each once."""

from __future__ import annotations

from typing import TypeVar

from phalanx.observe import events
from phalanx.observe.events import Envelope
from phalanx.observe.order import sort_events
from phalanx.report.event_log import SUPERVISOR_RANK, EventLog

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


def order_story_events(log: EventLog) -> list[Envelope]:
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


def find_run_status(story: list[Envelope]) -> tuple[str, events.RunFinished | None]:
    # Newest first: an end counts unless something began after it.
    for envelope in reversed(story):
        if isinstance(envelope.event, events.RunFinished):
            return envelope.event.status, envelope.event
        if isinstance(envelope.event, _ATTEMPT_START_EVENTS):
            return "unfinished", None
    if not story:
        return "no events", None
    return "unfinished", None


def select_story_events(story: list[Envelope], kind: type[Kind]) -> list[Kind]:
    return [envelope.event for envelope in story if isinstance(envelope.event, kind)]


def select_newest_by_step(story: list[Envelope], kind: type[AtStep]) -> list[AtStep]:
    """One event for each step: a step done again replaces what was said of it, in its place."""
    return list({event.step: event for event in select_story_events(story, kind)}.values())


def sort_newest_by_step(story: list[Envelope], kind: type[AtStep]) -> list[AtStep]:
    return sorted(select_newest_by_step(story, kind), key=lambda event: event.step)
