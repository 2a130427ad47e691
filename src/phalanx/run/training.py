"""A training run from a job to its end, for whoever asks: the command line, a script, a
notebook."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.clocks import read_process_start_s
from phalanx.core.errors import ExitCode, PhalanxError
from phalanx.core.slurm import REQUEUE_COUNT_VARIABLE, count_slurm_requeues
from phalanx.job.schema import Job
from phalanx.launch.end_record import EndRecord
from phalanx.launch.external import ExternalLaunch, read_external_launch
from phalanx.launch.guard import fork_under_guard
from phalanx.run.announce import format_run_announcement
from phalanx.run.conclude import RunEnd
from phalanx.run.directory import JOB_FILE
from phalanx.run.external import train_as_rank
from phalanx.run.finished import (
    conclude_without_training,
    is_finished,
    refuse_if_trained_beyond_last_step,
)
from phalanx.run.output import RunOutput
from phalanx.run.prepare import prepare_run
from phalanx.run.resume import ResumedRun, load_requeued_run
from phalanx.run.stop_signals import raising_on_stop_signals
from phalanx.run.supervised import train_in_supervised_ranks


@dataclass(frozen=True)
class TrainRequest:
    """A job to train and its run directory. `resumed` is set where the run in it is continued.

    `is_name_chosen`: the job names no directory, and this one was chosen; the run takes another one
    if that is another job's by the time that it begins.
    """

    job: Job
    run_dir: Path
    resumed: ResumedRun | None = None
    is_name_chosen: bool = False

    @staticmethod
    def for_new_run(job: Job) -> TrainRequest:
        """A new run in run.dir, else in a fresh directory."""
        if job.run.dir:
            return TrainRequest(job, Path(job.run.dir))
        return TrainRequest(job, Path(_name_new_run_dir(job)), is_name_chosen=True)

    @staticmethod
    def for_resumed_run(resumed: ResumedRun) -> TrainRequest:
        """The run of `resumed`, continued."""
        return TrainRequest(resumed.job, resumed.run_dir, resumed)


def train_in_ranks_or_as_rank(
    request: TrainRequest, output: RunOutput, *, guards_rank: bool
) -> RunEnd:
    """Train in ranks that this process starts, or as one rank of another launcher.

    With `guards_rank` a rank of another launcher goes on in a child process, and this one becomes
    its guard. Raises PhalanxError for what the user can mend.
    """
    with raising_on_stop_signals():
        began_s = time.monotonic()
        ranks = read_external_launch(os.environ)
        if ranks is not None:
            if guards_rank:
                return _train_as_guarded_rank(request, ranks, output)
            return train_as_rank(
                request.job,
                request.run_dir,
                ranks,
                request.resumed,
                output,
                began_s=began_s,
                is_name_chosen=request.is_name_chosen,
            )
        request = _continue_requeued_run(request, output)
        job, resumed = request.job, request.resumed
        is_resumed = resumed is not None
        with prepare_run(
            job,
            request.run_dir,
            resume=is_resumed,
            num_ranks=None,
            is_name_chosen=request.is_name_chosen,
            say=output.say,
        ) as run:
            if is_finished(run):
                return conclude_without_training(run, output)
            refuse_if_trained_beyond_last_step(run)
            output.say(*format_run_announcement(run, resumed=resumed))
            return train_in_supervised_ranks(run, output, began_s=began_s, resumed=resumed)


def _continue_requeued_run(request: TrainRequest, output: RunOutput) -> TrainRequest:
    """The request itself; where Slurm has started its job again, one that goes on with the run that
    the job began."""
    num_requeues = count_slurm_requeues(os.environ)
    is_begun = (request.run_dir / JOB_FILE).is_file()
    if not num_requeues or request.resumed is not None or not is_begun:
        return request
    resumed = load_requeued_run(request.run_dir, request.job)
    output.say(
        f"ranks   Slurm has requeued this job ({REQUEUE_COUNT_VARIABLE} is {num_requeues}), and its"
        f" run goes on after step {resumed.step}"
    )
    return TrainRequest.for_resumed_run(resumed)


def _train_as_guarded_rank(
    request: TrainRequest, ranks: ExternalLaunch, output: RunOutput
) -> RunEnd:
    """Train as one rank whose guard tells the launcher how it ended.

    The guard is forked before torch is imported: it needs none of it.
    """
    record = fork_under_guard(ranks.rank_env.rank, request.run_dir)
    exit_code = int(ExitCode.INTERNAL)
    try:
        end = train_as_rank(
            request.job,
            request.run_dir,
            ranks,
            request.resumed,
            output,
            # Each rank of a command imports torch by itself: that counts as its start.
            began_s=read_process_start_s(),
            is_name_chosen=request.is_name_chosen,
        )
        exit_code = end.exit_code
        return end
    except PhalanxError as error:
        exit_code = int(error.exit_code)
        raise
    except KeyboardInterrupt:
        exit_code = int(ExitCode.INTERRUPTED)
        raise
    finally:
        # Also of what was raised: launchers believe exit codes, and the guard has no other source.
        record.write_end_record(EndRecord(exit_code))


def _name_new_run_dir(job: Job) -> str:
    """A name of this second; a clock that was set back names a run that is there, and gets a
    number."""
    name = f"runs/{job.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    fresh, number = name, 1
    while Path(fresh).exists():
        number += 1
        fresh = f"{name}-{number}"
    return fresh
