"""How a run ended, whether it goes on, or that it was cut off: the lines before all others."""

from __future__ import annotations

import math
import socket
import time
from dataclasses import dataclass

from phalanx.checkpoint.ownership.run_lock import (
    LOCK_FILE_NAME,
    LockHolder,
    look_for_holder_process,
    read_lock_holder,
)
from phalanx.core.units import format_seconds
from phalanx.observe import events
from phalanx.observe.words import describe_end, describe_event
from phalanx.report.facts import RunFacts


def list_status_lines(facts: RunFacts) -> list[str]:
    """How the run ended and, of one that failed, the failure; or that it goes on, and where; or
    that it was cut off; or that this cannot be seen from here."""
    end = find_run_end(facts)
    if end is not None:
        line = describe_end(end)
        if end.exit_code:
            line += f", exit code {end.exit_code}"
        failure = describe_last_failure(facts)
        return [line, failure] if failure else [line]
    job = find_job_of_run(facts)
    if job is not None and job.is_alive:
        return [f"still runs, {facts.last_step:,} steps are done: {job.holder}"]
    if job is not None:
        return [_describe_unseen_job(facts, job)]
    if not facts.num_events:
        which = (
            "none of its events can be read" if facts.reading_gaps else "no events were recorded"
        )
        return [f"{which}, and no job runs here"]
    progress = f"cut off after step {facts.last_step:,}:"
    if facts.total_steps is not None and 0 < facts.total_steps <= facts.last_step:
        progress = f"all {facts.last_step:,} steps are done, but"
    return [f"{progress} no end was recorded, and no job runs here"]


def find_run_end(facts: RunFacts) -> events.RunFinished | None:
    """The recorded end of a run; None while it goes on, or where it was cut off."""
    if not facts.is_finished:
        return None
    for envelope in reversed(facts.story):
        if isinstance(envelope.event, events.RunFinished):
            return envelope.event
    return None


@dataclass(frozen=True)
class RunJob:
    """The job that has a run by its lock. `is_alive` is None where it cannot be seen from here."""

    holder: LockHolder
    is_alive: bool | None


def find_job_of_run(facts: RunFacts) -> RunJob | None:
    """The job that writes, or may still write, into a run without a recorded end; None without
    one."""
    holder = read_lock_holder(facts.run_dir / LOCK_FILE_NAME)
    if facts.is_finished or holder is None:
        return None
    state = look_for_holder_process(holder)
    if state == "gone":
        return None
    return RunJob(holder, True if state == "alive" else None)


def _describe_unseen_job(facts: RunFacts, job: RunJob) -> str:
    where = "" if job.holder.host == socket.gethostname() else " of another machine"
    line = (
        f"whether it runs cannot be seen from here, {facts.last_step:,} steps are done: locked by"
        f" {job.holder}{where}"
    )
    ago_s = time.time() - facts.last_unix_s
    if math.isfinite(ago_s):
        line += f"; last event {format_seconds(max(ago_s, 0.0))} ago"
    return line


def describe_last_failure(facts: RunFacts) -> str:
    """The failure that ended a failed run, in a sentence; empty where none was recorded, or the run
    did not fail."""
    if facts.status != "failed":
        return ""
    num_ends = 0
    for envelope in reversed(facts.story):
        num_ends += isinstance(envelope.event, events.RunFinished)
        # A failure before ranks that started since, or of a command before the last, was not the
        # last word.
        if num_ends > 1 or _begins_anew(envelope.event):
            return ""
        if isinstance(envelope.event, events.RankFailed):
            return describe_event(envelope) or ""
    return ""


def _begins_anew(event: events.Event) -> bool:
    """True for what tells that a run goes on after all before it."""
    kinds = events.RunStarted | events.RestartScheduled
    return events.is_resume(event) or isinstance(event, kinds)
