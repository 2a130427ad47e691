"""What of a run is not in its event files, in words: files and lines that cannot be read, and ranks
and steps that they lack."""

from __future__ import annotations

import itertools

from phalanx.core.units import plural
from phalanx.observe import events
from phalanx.observe.tail import RANK_FILE_PATTERN
from phalanx.observe.where_words import format_rank_list
from phalanx.report.event_log import EventLog
from phalanx.report.facts import StepColumns

_MAX_NAMED_RANKS = 8


def list_reading_gaps(
    log: EventLog, steps: StepColumns, finished: events.RunFinished | None, num_ranks: int
) -> list[str]:
    """A line about each thing that is in no number of the run, as it could not be read or is not
    there. `finished`: the end of a run that has one; `num_ranks`: of the plan."""
    return [
        *_list_unread_lines(log),
        *_list_missing_ranks(log, finished, num_ranks),
        *_list_missing_last_steps(steps, finished),
        *_list_ranks_that_end_early(log, finished),
    ]


def _list_unread_lines(log: EventLog) -> list[str]:
    gaps = [
        f"events/{name} cannot be read ({why}): what it says is missing here"
        for name, why in sorted(log.unreadable_files.items())
    ]
    if log.num_damaged:
        gaps.append(
            f"{plural(log.num_damaged, 'line')} of the event files could not be read (damaged, or"
            " of another version of phalanx): what they say is missing here"
        )
    return gaps


def _list_missing_ranks(
    log: EventLog, finished: events.RunFinished | None, num_ranks: int
) -> list[str]:
    """A line about ranks of which no event is here, of the newest attempt with steps: files that
    were lost, or lie on another machine. `num_ranks`: of the plan, where the attempt
    itself does not say."""
    attempt = _find_newest_attempt(log, finished)
    if attempt is None:
        return []
    for envelope in log.rest:
        if isinstance(envelope.event, events.RunStarted) and envelope.attempt == attempt:
            num_ranks = int(envelope.event.world_size)
    recorded_ranks = {rank for number, rank in log.by_stream if number == attempt and rank >= 0}
    # Those are said already.
    for match in filter(None, map(RANK_FILE_PATTERN.fullmatch, log.unreadable_files)):
        if int(match[2]) == attempt:
            recorded_ranks.add(int(match[1]))
    num_missing = num_ranks - len(recorded_ranks)
    if num_missing <= 0:
        return []
    missing = (rank for rank in itertools.count() if rank not in recorded_ranks)
    named = list(itertools.islice(missing, min(num_missing, _MAX_NAMED_RANKS)))
    ranks = _name_ranks(named, num_missing)
    text = f"no events of {ranks} are here (attempt {attempt}): what they did is missing"
    if 0 in named:
        text += ", and what rank 0 alone tells: how long starting took, evaluations, saves"
    return [text]


def _find_newest_attempt(log: EventLog, finished: events.RunFinished | None) -> int | None:
    """The newest attempt with steps; None where there is none, and none is to be expected."""
    if log.lead_steps:
        return max(log.lead_steps)
    if finished is None or finished.step < 1 or any(rank >= 0 for _, rank in log.by_stream):
        return None
    # Not one rank left a word of a run that did steps.
    return max((attempt for attempt, _ in log.by_stream), default=None)


def _list_missing_last_steps(steps: StepColumns, finished: events.RunFinished | None) -> list[str]:
    """A line about the last steps of a run that finished, where its events end before them: files
    that were cut off between two lines have none that is damaged."""
    if finished is None or finished.status != "finished":
        return []
    last, end = steps.step[-1] if steps.step else 0, int(finished.step)
    if last >= end:
        return []
    missing = f"steps {last + 1:,} to {end:,} are" if last + 1 < end else f"step {end:,} is"
    return [f"{missing} not on record: the run finished at step {end:,}, and its events end before"]


def _list_ranks_that_end_early(log: EventLog, finished: events.RunFinished | None) -> list[str]:
    """A line about the other ranks of a run that finished whose events end before its last step."""
    if finished is None or finished.status != "finished" or not log.lead_steps:
        return []
    attempt = max(log.lead_steps)
    early = {
        rank: last
        for (number, rank), last in sorted(log.last_steps.items())
        if number == attempt and rank != log.lead_rank and last < finished.step
    }
    if not early:
        return []
    ranks = _name_ranks(list(early)[:_MAX_NAMED_RANKS], len(early))
    return [
        f"the events of {ranks} end at step {min(early.values()):,}, and the run finished at step"
        f" {int(finished.step):,}: what they did after it is missing"
    ]


def _name_ranks(named: list[int], num_ranks: int) -> str:
    """The ranks `named`, and how many of `num_ranks` are more than these."""
    ranks = format_rank_list(named)
    if num_ranks > len(named):
        ranks += f" and {num_ranks - len(named):,} more"
    return ranks
