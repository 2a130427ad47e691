"""How a run ended, whether it goes on, or that it was cut off: the lines before all others."""

from __future__ import annotations

from dataclasses import replace

from phalanx.checkpoint.ownership.run_lock import LockHolder, find_live_holder
from phalanx.observe import events
from phalanx.observe.words import describe_end, describe_event
from phalanx.report.facts import RunFacts


def list_status_lines(facts: RunFacts) -> list[str]:
    """How the run ended and, of one that failed, the failure; or that it goes on, and where; or
    that it was cut off."""
    end = find_run_end(facts)
    if end is not None:
        # Runs of earlier releases recorded the newest step that is saved.
        line = describe_end(replace(end, step=facts.last_step))
        if end.exit_code:
            line += f", exit code {end.exit_code}"
        failure = describe_last_failure(facts)
        return [line, failure] if failure else [line]
    holder = find_job_of_run(facts)
    if holder is not None:
        return [f"still runs, {facts.last_step:,} steps are done: {holder}"]
    if not facts.num_events:
        return ["no events were recorded, and no job runs here"]
    return [f"cut off after step {facts.last_step:,}: no end was recorded, and no job runs here"]


def find_run_end(facts: RunFacts) -> events.RunFinished | None:
    """The recorded end of a run; None while it goes on, or where it was cut off."""
    if not facts.is_finished:
        return None
    for envelope in reversed(facts.story):
        if isinstance(envelope.event, events.RunFinished):
            return envelope.event
    return None


def find_job_of_run(facts: RunFacts) -> LockHolder | None:
    """The job that still writes into a run without a recorded end; None without one. One of another
    machine, which cannot be seen from here, counts as alive."""
    if facts.is_finished:
        return None
    return find_live_holder(facts.run_dir)


def describe_last_failure(facts: RunFacts) -> str:
    """The failure that ended a failed run, in a sentence; empty where none was recorded, or the run
    did not fail."""
    if facts.status != "failed":
        return ""
    for envelope in reversed(facts.story):
        # A failure before ranks that started since was not the last word.
        if isinstance(envelope.event, events.RunStarted | events.RestartScheduled):
            return ""
        if isinstance(envelope.event, events.RankFailed):
            return describe_event(envelope) or ""
    return ""
