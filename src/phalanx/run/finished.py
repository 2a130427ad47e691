"""Whether a run has anything left to do."""

from __future__ import annotations

from phalanx.checkpoint.reading.verify import find_checkpoint_problems
from phalanx.checkpoint.stores import find_newest_readable_step
from phalanx.core.errors import ExitCode, UsageError
from phalanx.observe.events import RunFinished
from phalanx.observe.tail import read_recorded_events
from phalanx.run.conclude import RunEnd
from phalanx.run.output import RunOutput
from phalanx.run.prepare import PreparedRun


def is_finished(run: PreparedRun) -> bool:
    """True if the last step is saved and what comes after it (evaluation, sample) is on record.

    With checkpoint.fallback the user doubts what is saved: then it must verify, too.
    """
    num_steps = run.job.train.steps
    is_recorded = False
    for envelope in read_recorded_events(run.run_dir, RunFinished, rank=-1):
        event = envelope.event
        assert isinstance(event, RunFinished)
        # A run whose train.steps was raised since has finished with fewer: that does not count.
        is_recorded |= event.status == "finished" and event.step >= num_steps
    if not is_recorded or find_newest_readable_step(run.store) < num_steps:
        return False
    return not run.job.checkpoint.fallback or not find_checkpoint_problems(run.store.folders()[-1])


def conclude_without_training(run: PreparedRun, output: RunOutput) -> RunEnd:
    """The end of a run that was finished before: it says so, and nothing is trained."""
    output.say(
        f"run     {run.run_dir}: step {run.job.train.steps} is done and saved; nothing to do"
    )
    return RunEnd(run.run_dir, "finished", int(ExitCode.OK), "", run.plan)


def refuse_if_trained_beyond_last_step(run: PreparedRun) -> None:
    """Raise UsageError if a step after the job's last one is saved."""
    newest = find_newest_readable_step(run.store)
    if newest > run.job.train.steps:
        raise UsageError(
            f"train.steps is {run.job.train.steps}, and step {newest} is done and saved",
            where=str(run.run_dir),
            fix=f"set train.steps to more than {newest}",
        )
