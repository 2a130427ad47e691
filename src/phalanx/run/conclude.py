"""The end of a run: what is recorded, the page, and the lines that say what came out."""

from __future__ import annotations

import contextlib
import shlex
import time
from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpoint.folder import CheckpointFolder
from phalanx.checkpoint.stores import Store, find_newest_readable_step
from phalanx.core.disk_errors import build_path_resource_error
from phalanx.core.errors import CheckpointError, ExitCode, PhalanxError, ResourceError
from phalanx.launch.outcome import RunOutcome
from phalanx.launch.paths import next_attempt_number
from phalanx.observe.bus import Bus
from phalanx.observe.events import RunFinished
from phalanx.observe.last_step import read_last_recorded_step
from phalanx.plan.plan import Plan
from phalanx.report.end_of_run import list_end_of_run_lines, list_restart_lines
from phalanx.report.facts import RunFacts
from phalanx.report.page import write_report
from phalanx.report.reduce import collect_run_facts
from phalanx.report.trace.merge import list_traced_steps
from phalanx.report.trace.words import list_windows_in_words
from phalanx.run.baselines import compute_ngram_baseline_losses
from phalanx.run.next_command import (
    build_next_line_after_training,
    format_program_command,
    spell_path_as_argument,
)
from phalanx.run.output import RunOutput
from phalanx.run.prepare import PreparedRun
from phalanx.run.usable_checkpoints import UsableCheckpoints


@dataclass(frozen=True)
class RunEnd:
    """End of a run.

    `status` is "finished" | "preempted" | "interrupted" | "failed"; `message` is for a person.
    """

    run_dir: Path
    status: str
    exit_code: int
    message: str
    plan: Plan | None
    """None in a rank that was never told: rank 0 of its launcher could not prepare the run."""
    refusal: PhalanxError | None = None
    """The error of this rank, or of rank 0, where it was said already: a command says it once
    for all ranks."""
    rank: int = 0
    """The rank of another launcher that this process was; 0 where it started the ranks itself."""


def emit_ngram_baselines(run: PreparedRun, bus: Bus) -> None:
    """Fit n-gram models on the same training split and score them on the same held-out tokens."""
    if run.job.eval.tokens and run.corpus.splits["held_out"].num_tokens > 1:
        for event in compute_ngram_baseline_losses(run.corpus, run.job.eval.tokens):
            bus.emit(event)


def record_and_report_end_of_run(
    run: PreparedRun,
    outcome: RunOutcome,
    bus: Bus,
    stack: contextlib.ExitStack,
    output: RunOutput,
    *,
    began_s: float,
    refusal: PhalanxError | None = None,
) -> RunEnd:
    """Record how the run ended, close what `stack` holds (the bus, the console), say what came out.

    `began_s` (monotonic) is when the run was asked for.

    Raises `refusal`, which makes the run as if it had never been; and ResourceError where a run is
    finished and its record does not say so: whoever starts it again then repeats what comes after
    the last step.
    """
    emit_end_of_run(run.run_dir, run.store, outcome, bus, began_s)
    # Asked now: a closed bus no longer says it.
    bus_refusal = bus.refusal
    # The console first: lines that follow must not meet its own.
    stack.close()
    if refusal is not None:
        run.remove_run_directory()
        raise refusal
    _write_page_and_print_conclusion(run, outcome, output)
    # A run is finished by what is on record: without it, a second start would evaluate,
    # sample and conclude again.
    if outcome.exit_code == ExitCode.OK and bus_refusal is not None:
        doing = "recording that the run is finished (its last step is saved)"
        raise build_path_resource_error(bus_refusal, doing, run.run_dir / "events")
    return RunEnd(run.run_dir, outcome.status, outcome.exit_code, outcome.message, run.plan)


def emit_end_of_run(
    run_dir: Path, store: Store, outcome: RunOutcome, bus: Bus, began_s: float
) -> None:
    """Record the end of a run that was asked for at `began_s` (monotonic)."""
    last_step = find_last_done_step(run_dir, store)
    # Read last: a store may take seconds to answer, and the ledger charges the rank's end up to
    # the moment of the event.
    elapsed_s = time.monotonic() - began_s
    bus.emit(RunFinished(outcome.status, outcome.exit_code, last_step, elapsed_s))


def find_last_done_step(run_dir: Path, store: Store) -> int:
    """The last step that rank 0 has on record, or a later one that is saved and that ranks could
    use; 0 without either."""
    recorded = read_last_recorded_step(run_dir, 0, before_attempt=next_attempt_number(run_dir))
    saved = find_newest_readable_step(store)
    if saved <= recorded:
        return recorded
    # Perhaps one that ranks could not use, and went back behind: all events tell.
    with contextlib.suppress(OSError, CheckpointError):
        saved = UsableCheckpoints(run_dir, store).find_newest_readable_step()
    return max(recorded, saved)


def _write_page_and_print_conclusion(
    run: PreparedRun, outcome: RunOutcome, output: RunOutput
) -> None:
    """Write the page and say what came out and where it is."""
    facts = collect_run_facts(run.run_dir)
    page_line = _write_run_page(facts)
    is_finished = outcome.status == "finished"
    if is_finished:
        output.say(*list_end_of_run_lines(facts))
    elif outcome.message:
        output.warn(outcome.message)
    output.say(*list_restart_lines(run.run_dir, outcome.restarts))
    folders = _list_run_checkpoints(run)
    if folders and not is_finished:
        output.say(*_build_resume_command_lines(run, outcome, folders[-1]))
    output.say(page_line, *_list_trace_lines_of_run(run.run_dir))
    if folders and is_finished:
        output.say(build_next_line_after_training(run.job, run.plan, run.corpus, run.run_dir))
    output.say(f"run     {run.run_dir}")


def _list_trace_lines_of_run(run_dir: Path) -> list[str]:
    """The line that says which steps were traced; none where none were."""
    traced = list(list_traced_steps(run_dir))
    if not traced:
        return []
    argument = shlex.quote(spell_path_as_argument(run_dir))
    command = f"{format_program_command()} trace {argument} --steps {traced[-1][1]}"
    return [f"traces  of steps {list_windows_in_words(traced)}: {command} shows them"]


def _build_resume_command_lines(
    run: PreparedRun, outcome: RunOutcome, newest: CheckpointFolder
) -> list[str]:
    """The command that continues a run which did not finish; none if it would fail in the same
    way."""
    command = f"resume  {format_program_command()} train --resume {shlex.quote(str(run.run_dir))}"
    if outcome.exit_code != ExitCode.CHECKPOINT:
        return [f"{command}   (newest checkpoint: {newest.name})"]
    if run.job.checkpoint.fallback:
        return []
    return [f"{command} --fallback   (the newest checkpoint that verifies)"]


def _write_run_page(facts: RunFacts) -> str:
    """Write the page and return the line that says where it is.

    A disk that refuses it must not hide how the run ended.
    """
    run_dir = facts.run_dir
    try:
        write_report(run_dir, facts)
    except ResourceError as error:
        return (
            f"report  is not written: {error.what} ({error.why}); phalanx report {run_dir} writes"
            " it once it can be"
        )
    return f"report  {run_dir / 'report.html'}"


def _list_run_checkpoints(run: PreparedRun) -> list[CheckpointFolder]:
    """The run's checkpoints; none where the store does not answer, which whoever resumes will
    hear of."""
    try:
        return run.store.folders()
    except (OSError, CheckpointError):
        return []
