"""A run whose ranks this process starts and supervises.

Torch-free: the ranks import torch in their own processes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from phalanx.checkpoint.ownership.fence import RunOwnershipWatch
from phalanx.core.errors import (
    CheckpointError,
    DataError,
    EnvironmentProblem,
    ExitCode,
    LayoutError,
    PhalanxError,
    RunLockedError,
)
from phalanx.launch.end_record import STOPPED_EXIT_CODES
from phalanx.launch.hang_limits import HangSettings
from phalanx.launch.launch_spec import LaunchSpec
from phalanx.launch.outcome import RunOutcome
from phalanx.launch.paths import next_attempt_number
from phalanx.launch.slow_ranks import SlowRankWatch
from phalanx.launch.supervisor import supervise_ranks
from phalanx.observe.bus import Bus
from phalanx.observe.console import Console
from phalanx.observe.events import (
    EVENTS_UNWRITTEN,
    RESUMED,
    Envelope,
    Event,
    Note,
    SinkDropped,
    StepFinished,
    StepsSummed,
)
from phalanx.observe.tail import (
    EventTail,
    follow_shown_events,
    parse_valid_event_line,
    read_recorded_events,
)
from phalanx.run.conclude import RunEnd, emit_ngram_baselines, record_and_report_end_of_run
from phalanx.run.needs import list_modules_to_preload
from phalanx.run.observer.start import observing_run
from phalanx.run.output import RunOutput
from phalanx.run.prepare import PreparedRun
from phalanx.run.rank_run import keeps_ranks
from phalanx.run.reliability_meter import ReliabilityMeter
from phalanx.run.resume import ResumedRun
from phalanx.run.stop_signals import outliving_repeated_stops
from phalanx.run.training_attempts import TrainingAttempts

# By name: the ranks import torch, and this process must not.
RANK_ENTRY = "phalanx.run.rank:run_supervised_rank"

_ERROR_CLASS_OF_EXIT_CODE: dict[ExitCode, type[PhalanxError]] = {
    kind.exit_code: kind for kind in (LayoutError, DataError, EnvironmentProblem, RunLockedError)
}


def train_in_supervised_ranks(
    run: PreparedRun, output: RunOutput, *, began_s: float, resumed: ResumedRun | None
) -> RunEnd:
    """Start the ranks of `run`, show their steps, start them again after a crash, and say how it
    ended.

    `began_s` (monotonic) is when the run was asked for. Raises PhalanxError for what the user can
    mend.
    """
    job, run_dir = run.job, run.run_dir
    attempt = next_attempt_number(run_dir)
    fence = RunOwnershipWatch(run_dir, run.lock.holder)
    slow_ranks = SlowRankWatch()
    reliability = ReliabilityMeter(began_s, run.plan.world_size)
    attempts = TrainingAttempts(run, attempt, began_s, fence, slow_ranks)
    spec = LaunchSpec(
        entry=RANK_ENTRY,
        attempts=attempts,
        num_ranks=run.plan.world_size,
        run_dir=run_dir,
        preload=list_modules_to_preload(job),
        max_restarts=job.resilience.max_restarts,
        outage_s=job.resilience.outage_s,
        grace_s=job.resilience.grace_s,
        keeps_ranks=keeps_ranks(job, run.plan),
        hangs=HangSettings(job.resilience.hang_s, job.resilience.hang_long_s),
    )
    console = output.open_console(job)
    tail = follow_shown_events(run_dir, attempt)
    # What people see is mostly rank 0's; which rank is slow the steps of all ranks tell.
    steps = EventTail(run_dir, attempt_from=attempt, all_ranks=True, kinds=(StepFinished,))
    show_refused = build_refused_event_printer(console, tail)
    bus = open_supervisor_event_bus(run_dir, attempt, show_refused, fence)
    if resumed is not None:
        bus.emit(Note(RESUMED, resumed.facts()))

    def tick() -> None:
        if fence.is_lost():
            # The ranks end with the process that started them.
            raise fence.run_taken_error()
        bus.keep_file_in_place()
        for envelope in _print_new_events(console, tail):
            reliability.add_event(envelope)
            attempts.note_event(envelope.event)
        for event in find_slow_ranks(steps, slow_ranks):
            bus.emit(event)
        hour = reliability.take_hour(time.monotonic())
        if hour is not None:
            bus.emit(hour)

    with (
        observing_run(job, run_dir, attempt, bus, output.say),
        contextlib.ExitStack() as until_told,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(bus.close)
        stack.callback(console.close)
        outcome = supervise_ranks(
            spec,
            bus=bus,
            on_tick=tick,
            say=console.say,
            on_refused_event=lambda line: take_refused_event(line, bus, show_refused),
        )
        if outcome.exit_code in STOPPED_EXIT_CODES:
            # A scheduler may ask twice.
            until_told.enter_context(outliving_repeated_stops())
        require_run_still_owned(fence)
        # The end is recorded next.
        bus.keep_file_in_place(now=True)
        # What ranks wrote after the last tick.
        for envelope in _print_new_events(console, tail):
            reliability.add_event(envelope)
        hour = reliability.take_end(time.monotonic())
        if hour is not None:
            bus.emit(hour)
        if outcome.status == "finished":
            emit_ngram_baselines(run, bus)
            _print_new_events(console, tail)
        # Again: scoring took a while.
        require_run_still_owned(fence)
        refusal = find_refusal_before_first_step(run, outcome)
        return record_and_report_end_of_run(
            run, outcome, bus, stack, output, began_s=began_s, refusal=refusal
        )


def find_slow_ranks(steps: EventTail, slow_ranks: SlowRankWatch) -> list[Event]:
    """The events that follow from the steps which `steps` has read since the last call."""
    slow: list[Event] = []
    for envelope in steps.read_new_events():
        if isinstance(envelope.event, StepFinished):
            slow += slow_ranks.add(envelope.rank, envelope.attempt, envelope.event)
    return slow


def build_refused_event_printer(
    console: Console, tail: EventTail
) -> Callable[[Envelope | None], None]:
    """A function that shows an event which the disk refused, at once.

    It is not shown again when the tail finds it: it is written once that works. That events are
    refused is said once, and not again by each process.
    """
    reasons: set[str] = set()

    def show(envelope: Envelope | None) -> None:
        if envelope is None:
            return
        tail.ignore_event(envelope)
        event = envelope.event
        if isinstance(event, Note) and event.code == EVENTS_UNWRITTEN:
            reason = str(event.facts.get("why"))
            if reason in reasons:
                return
            reasons.add(reason)
        console.write(envelope)

    return show


def take_refused_event(
    line: str, bus: Bus, show_refused: Callable[[Envelope | None], None]
) -> None:
    """Show an event that a rank's disk refused; that events are lost is recorded, too, by this
    process, which lives until the disk may take it."""
    envelope = parse_valid_event_line(line.encode())
    event = None if envelope is None else envelope.event
    if isinstance(event, SinkDropped) and event.sink == "events":
        bus.emit(event)
    else:
        show_refused(envelope)


def open_supervisor_event_bus(
    run_dir: Path, attempt: int, show_refused: Callable[[Envelope], None], fence: RunOwnershipWatch
) -> Bus:
    """The bus of the process that holds the run; events that its disk refuses go to
    `show_refused`."""
    return Bus(
        rank=-1,
        attempt=attempt,
        run_dir=run_dir,
        on_unwritten=show_refused,
        may_write=lambda: not fence.is_lost(),
    )


def require_run_still_owned(fence: RunOwnershipWatch) -> None:
    """Raise RunTakenError if another job has the run: nothing is written into it any more,
    whatever came out."""
    if fence.is_lost(now=True):
        raise fence.run_taken_error()


def find_refusal_before_first_step(run: PreparedRun, outcome: RunOutcome) -> PhalanxError | None:
    """The error of a rank that refused the job before its first step was done: as if it had been
    seen before the start.

    None for any other end, where the message points to a log of the run, and where a checkpoint is
    there: events can be lost, and what was trained must not go with them.
    """
    kind = _ERROR_CLASS_OF_EXIT_CODE.get(ExitCode(outcome.exit_code))
    if kind is None or outcome.status != "failed" or str(run.run_dir) in outcome.message:
        return None
    # A step is done: there is a run to keep, whatever refused it later.
    if any(True for _ in read_recorded_events(run.run_dir, StepFinished, StepsSummed)):
        return None
    if _may_have_checkpoints(run):
        return None
    return kind(outcome.message)


def _may_have_checkpoints(run: PreparedRun) -> bool:
    """True if the run's store has checkpoints, whole or not, or does not say."""
    try:
        return bool(run.store.folders())
    except (OSError, CheckpointError):
        return True


def _print_new_events(console: Console, tail: EventTail) -> list[Envelope]:
    """Show the events since the last call, and return them."""
    envelopes = list(tail.read_new_events())
    for envelope in envelopes:
        console.write(envelope)
    console.tick()
    return envelopes
