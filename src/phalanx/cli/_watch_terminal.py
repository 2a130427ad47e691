"""`phalanx watch --terminal`: the bar and the events of a run that was started elsewhere."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Any

from phalanx.core.files import read_json
from phalanx.core.terminal import wrap_stream_in_filter
from phalanx.core.units import plural
from phalanx.launch.liveness import describe_liveness
from phalanx.launch.paths import next_attempt_number
from phalanx.observe.console import Console, open_console
from phalanx.observe.events import RunFinished, RunStarted
from phalanx.observe.run_end import read_recorded_end
from phalanx.observe.tail import EventTail, follow_shown_events, read_recorded_events
from phalanx.observe.units import choose_metric_units_of_job
from phalanx.observe.words import describe_end
from phalanx.run.next_command import format_program_command
from phalanx.run.run_in_use import is_run_cut_off

_POLL_INTERVAL_S = 0.2
_DEFAULT_LOG_EVERY = 10
_LIVENESS_INTERVAL_S = 2.0


def show_run_in_terminal(run_dir: Path) -> int:
    """Show the newest attempt of a run and those that follow, until the run ends, or its processes
    are gone, or Ctrl-C.

    Returns the exit code of the verb: 0 also for a run that failed or was cut off, which it says.
    """
    job = _read_job(run_dir)
    console = open_console(
        wrap_stream_in_filter(sys.stdout),
        total_steps=_find_total_steps(run_dir) or _read_count(job, "train", "steps"),
        log_every=_read_count(job, "observe", "log_every") or _DEFAULT_LOG_EVERY,
        units=choose_metric_units_of_job(job),
    )
    tail = follow_shown_events(run_dir, max(next_attempt_number(run_dir) - 1, 0))
    try:
        end = _show_events_until_end(run_dir, console, tail)
    except KeyboardInterrupt:
        # The usual end of watching.
        return 0
    finally:
        console.close()
    if tail.num_unreadable:
        print(
            f"warn    {plural(tail.num_unreadable, 'line')} of the event files could not be read"
            " (damaged, or of another version of phalanx): what they say is missing here",
            file=sys.stderr,
        )
    if end is not None:
        print(f"run     {run_dir}: {describe_end(end)}, exit code {end.exit_code}")
    else:
        print(f"run     {run_dir}: {_describe_cut_off_run(run_dir)}")
    return 0


def _describe_cut_off_run(run_dir: Path) -> str:
    text = "cut off, it seems: its processes are gone and no end was recorded"
    if not (run_dir / "job.json").is_file():
        return text
    resume = f"{format_program_command()} train --resume {shlex.quote(str(run_dir))}"
    return f"{text}; {resume} goes on with it"


def _show_events_until_end(run_dir: Path, console: Console, tail: EventTail) -> RunFinished | None:
    """Returns the end of the run; None if it was cut off without one."""
    shown_sentence, looked_s, is_cut_off, has_events = "", 0.0, False, False
    while True:
        # Before the events are read: what was written until the end is read then.
        end = read_recorded_end(run_dir)
        for envelope in tail.read_new_events():
            console.write(envelope)
            has_events = True
        console.tick()
        if end is not None or is_cut_off:
            return end
        now = time.monotonic()
        if now - looked_s >= _LIVENESS_INTERVAL_S:
            looked_s = now
            # What it wrote before it was cut off is read in one more turn.
            is_cut_off = is_run_cut_off(run_dir, has_events=has_events)
            sentence = describe_liveness(run_dir)
            if sentence != shown_sentence and not is_cut_off:
                console.say(sentence)
                shown_sentence = sentence
        time.sleep(_POLL_INTERVAL_S)


def _find_total_steps(run_dir: Path) -> int:
    """The steps of the newest attempt, as it said at its start: a resumed run may have more than
    its first job; 0 before any has begun."""
    total = 0
    for envelope in read_recorded_events(run_dir, RunStarted):
        if isinstance(envelope.event, RunStarted):
            total = int(envelope.event.total_steps)
    return total


def _read_job(run_dir: Path) -> dict[str, Any]:
    """The job of a run; empty where its file is missing or damaged."""
    try:
        job = read_json(run_dir / "job.json")
    except (OSError, ValueError):
        return {}
    if isinstance(job, dict):
        return job
    return {}


def _read_count(job: dict[str, Any], section: str, key: str) -> int:
    table = job.get(section)
    if isinstance(table, dict) and type(table.get(key)) is int:
        return int(table[key])
    return 0
