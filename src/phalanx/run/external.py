"""A run whose ranks another launcher started (torchrun, srun, ...): they exist, nothing is forked.

Rank 0 prepares the run directory and tells the others what it decided, or why it could not, through
the ranks' store. This module is torch-free: a guard may be forked after it is imported. torch comes
with the store.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.checkpoint.ownership.fence import RunOwnershipClaim, RunOwnershipWatch
from phalanx.core.errors import ExitCode, PhalanxError
from phalanx.core.stop_signals import (
    STOP_SIGNALS,
    ignore_stop_signals,
    stop_signals_for_phalanx,
)
from phalanx.job.schema import Job
from phalanx.launch.external import ExternalLaunch
from phalanx.launch.outcome import RunOutcome
from phalanx.launch.output_destination import record_output_destination
from phalanx.launch.paths import next_attempt_number
from phalanx.observe.events import RESUMED, Note
from phalanx.plan.precision import replace_precision
from phalanx.run.announce import format_run_announcement
from phalanx.run.conclude import RunEnd, emit_ngram_baselines, record_and_report_end_of_run
from phalanx.run.decision import RankZeroDecision
from phalanx.run.directory import JOB_FILE
from phalanx.run.finished import conclude_without_training, is_finished
from phalanx.run.observer.start import observing_run
from phalanx.run.output import RunOutput
from phalanx.run.prepare import PreparedRun, prepare_run
from phalanx.run.rank_run import RankRunInputs
from phalanx.run.resume import ResumedRun
from phalanx.run.supervised import open_supervisor_event_bus, require_run_still_owned

if TYPE_CHECKING:
    from phalanx.run.launched_rank import DecisionStore

STATUS_OF_EXIT_CODE = {
    ExitCode.OK: "finished",
    ExitCode.PREEMPTED: "preempted",
    ExitCode.INTERRUPTED: "interrupted",
}


class RankZeroError(PhalanxError):
    """Rank 0 could not prepare the run, and has said why. It has rank 0's exit code."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def train_as_rank(
    job: Job,
    run_dir: Path,
    launched: ExternalLaunch,
    resumed: ResumedRun | None,
    output: RunOutput,
    *,
    began_s: float,
    is_name_chosen: bool = False,
) -> RunEnd:
    """Train as one rank of another launcher. Rank 0 speaks for all.

    `began_s` (monotonic) is when the run was asked for. With `is_name_chosen` nobody asked for
    `run_dir`, and where another job has it by now the run gets one beside it.

    A launcher that starts failed ranks again (torchrun --max-restarts) continues the run in
    `run.dir`.
    """
    # Not before: it imports torch, and a guard that is forked needs none of it.
    from phalanx.run.launched_rank import DecisionStore

    ranks = launched.rank_env
    # Before anything can be refused: the others must be told of it.
    store = DecisionStore(job, ranks)
    if ranks.rank != 0:
        return _train_as_other_rank(job, launched, store, began_s, output)
    is_restart = ranks.attempt > 0 and (run_dir / JOB_FILE).exists()
    resume = resumed is not None or is_restart
    try:
        with prepare_run(
            job,
            run_dir,
            resume=resume,
            num_ranks=ranks.world_size,
            is_name_chosen=is_name_chosen and not resume,
            say=output.say,
        ) as prepared:
            run_dir = prepared.run_dir
            output.say(*format_run_announcement(prepared, ranks=launched.words, resumed=resumed))
            plan = prepared.plan
            if resume and is_finished(prepared):
                # The others wait for a decision also where nothing is trained.
                store.publish_decision(RankZeroDecision(run_dir, plan, exit_code=int(ExitCode.OK)))
                return conclude_without_training(prepared, output)
            # Before the others are told: ranks of an earlier attempt can no longer commit.
            attempt, epoch = (
                next_attempt_number(run_dir),
                prepared.lock.acquire_token_for_attempt().number,
            )
            store.publish_decision(RankZeroDecision(run_dir, plan, attempt, epoch))
            record_output_destination(run_dir, 0, attempt, launched.launcher)
            run = RankRunInputs(
                prepared.job,
                plan,
                run_dir,
                0,
                attempt,
                began_s,
                RunOwnershipClaim(epoch, prepared.lock.holder),
            )
            return _train_and_conclude_as_rank_zero(prepared, run, store, resumed, output)
    except PhalanxError as error:
        store.publish_decision(
            RankZeroDecision(run_dir, exit_code=int(error.exit_code), error=str(error))
        )
        raise
    except BaseException as error:
        # Whatever it was: the others wait for a decision, and must not wait for this rank.
        store.publish_decision(
            RankZeroDecision(run_dir, exit_code=int(ExitCode.INTERNAL), error=repr(error))
        )
        raise


def _train_and_conclude_as_rank_zero(
    prepared: PreparedRun,
    run: RankRunInputs,
    store: DecisionStore,
    resumed: ResumedRun | None,
    output: RunOutput,
) -> RunEnd:
    """Train as rank 0, then say what came out, also when it failed."""
    console = output.open_console(run.job)
    fence = RunOwnershipWatch.for_rank(run.run_dir, run.claim)
    bus = open_supervisor_event_bus(run.run_dir, run.attempt, console.write, fence)
    with (
        observing_run(run.job, run.run_dir, run.attempt, bus, output.say, console.say),
        contextlib.ExitStack() as stack,
    ):
        stack.callback(bus.close)
        if resumed is not None:
            bus.emit(Note(RESUMED, resumed.facts()))
        code = ExitCode.INTERNAL
        end: RunEnd | None = None
        handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        try:
            code = store.run_rank(run, sinks=[("console", lambda: console)])
            require_run_still_owned(fence)
            if code == ExitCode.OK:
                # The rank's own handlers would only take note of a stop.
                _restore_signal_handlers(handlers)
                emit_ngram_baselines(prepared, bus)
        except PhalanxError as error:
            code = error.exit_code
            raise
        except BaseException:
            code = ExitCode.INTERNAL
            raise
        finally:
            if code != ExitCode.OK and threading.current_thread() is threading.main_thread():
                # Once one rank of such a run leaves, the launcher ends the others, and this one
                # has to say how the run ended.
                ignore_stop_signals()
            # A run that another job has by now gets no end from us.
            if not fence.is_lost(now=True):
                outcome = RunOutcome(code, STATUS_OF_EXIT_CODE.get(code, "failed"), "", 1)
                end = record_and_report_end_of_run(
                    prepared, outcome, bus, stack, output, began_s=run.started_s
                )
    if end is None:
        raise fence.run_taken_error()
    return end


def _restore_signal_handlers(handlers: Mapping[signal.Signals, Any]) -> None:
    """Put handlers of stop signals back, but for those that code of the user's has or took."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in stop_signals_for_phalanx():
        signal.signal(number, handlers[number])


def _train_as_other_rank(
    job: Job, launched: ExternalLaunch, store: DecisionStore, began_s: float, output: RunOutput
) -> RunEnd:
    """Train as a rank other than 0.

    What it must not say itself is in the result: rank 0 says it.
    """
    ranks = launched.rank_env
    decision = store.wait_for_decision()
    run_dir, plan = decision.run_dir, decision.plan
    if decision.exit_code is not None or plan is None:
        code = ExitCode(decision.exit_code or ExitCode.OK)
        refusal = None
        if decision.error:
            refusal = RankZeroError(decision.error, code)
        return RunEnd(
            run_dir,
            STATUS_OF_EXIT_CODE.get(code, "failed"),
            int(code),
            decision.error,
            plan,
            refusal,
            ranks.rank,
        )
    # What the job leaves open, rank 0 has decided for all.
    job = replace_precision(job, plan.precision)
    run = RankRunInputs(
        job, plan, run_dir, ranks.rank, decision.attempt, began_s, RunOwnershipClaim(decision.epoch)
    )
    record_output_destination(run_dir, ranks.rank, decision.attempt, launched.launcher)
    try:
        code = store.run_rank(run)
    except PhalanxError as error:
        if ranks.local_rank == 0:
            # Another node: rank 0's words are not on this terminal.
            output.warn(f"phalanx: rank {ranks.rank}: {error}")
        return RunEnd(run_dir, "failed", int(error.exit_code), str(error), plan, error, ranks.rank)
    return RunEnd(
        run_dir, STATUS_OF_EXIT_CODE.get(code, "failed"), int(code), "", plan, rank=ranks.rank
    )
