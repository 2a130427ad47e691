"""A training run from the command line: prepare the run directory, start or join ranks, say what came out."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from phalanx.checkpoint.fence import Fence
from phalanx.checkpoint.stores import Store, newest_step, open_store
from phalanx.checkpoint.verify import verify_checkpoint
from phalanx.core.errors import (
    CheckpointError,
    DataError,
    EnvironmentProblem,
    ExitCode,
    LayoutError,
    PhalanxError,
    RunLockedError,
    UsageError,
)
from phalanx.job.load import load_job
from phalanx.job.schema import Job
from phalanx.launch.end_record import EndRecord
from phalanx.launch.external import ExternalRanks, external_ranks
from phalanx.launch.guard import fork_guarded
from phalanx.launch.paths import next_attempt
from phalanx.launch.supervisor import LaunchSpec, Outcome, supervise
from phalanx.observe.bus import Bus
from phalanx.observe.console import Console, open_console
from phalanx.observe.events import (
    EVENTS_UNWRITTEN,
    RESUMED,
    CheckpointSaved,
    CheckpointUnusable,
    Envelope,
    Note,
    RunFinished,
    StepFinished,
)
from phalanx.observe.tail import EventTail, read_event
from phalanx.observe.units import units_of
from phalanx.run.needs import preload
from phalanx.run.prepare import Prepared, announce, finish_run, prepared_run, score_baselines
from phalanx.run.resume import Resumed, resumed_job


class StoppedError(PhalanxError):
    """SIGTERM where no rank trains: before, or after."""

    exit_code = ExitCode.PREEMPTED


def train(job_file: str | None, overrides: Sequence[str], resume: str | None) -> tuple[int, Path | None]:
    """Train in ranks that this process starts, or as one rank of another launcher.

    Returns the exit code and the run directory, which of several launched ranks only rank 0 knows. Raises PhalanxError
    for what a user can mend.
    """
    with stopped_once():
        return _train(job_file, overrides, resume)


def explain_job(job_file: str | None, overrides: Sequence[str], resume: str | None, *, as_json: bool) -> None:
    """What `train` would do with these arguments, value by value."""
    from phalanx.run.explain import print_explained

    if resume is None:
        job, source = load_job(job_file, overrides), job_file
    else:
        job = resumed_job(resume, overrides).job
        source = str(Path(resume) / "job.json")
    print_explained(job, source, overrides, as_json=as_json)


@contextlib.contextmanager
def stopped_once() -> Iterator[None]:
    """SIGTERM and Ctrl-C end the body by an exception, once: ranks and their supervisor have handlers of their own.

    One stop often arrives twice: torchrun and Slurm signal a rank and its guard, which hands on what it gets. The
    second one would strike in the middle of what the first one has cleaned up. An ignored SIGINT stays ignored.
    """
    before: dict[signal.Signals, Any] = {signal.SIGTERM: signal.signal(signal.SIGTERM, _stop)}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        before[signal.SIGINT] = signal.signal(signal.SIGINT, _stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    for again in (signal.SIGTERM, signal.SIGINT):
        signal.signal(again, signal.SIG_IGN)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise StoppedError("stopped by SIGTERM while no rank was training", fix="run again, with --resume if it had begun")


def _train(job_file: str | None, overrides: Sequence[str], resume: str | None) -> tuple[int, Path | None]:
    """(exit code, run directory). Of several ranks of another launcher, only rank 0 knows the directory."""
    began = time.monotonic()
    ranks = external_ranks(os.environ)
    resumed: Resumed | None = None
    if resume is not None:
        resumed = resumed_job(resume, overrides)
        run_dir, job = resumed.run_dir, resumed.job
    else:
        job = load_job(job_file, overrides)
        run_dir = Path(job.run.dir or _fresh_name(job))
    if ranks is not None:
        code = _as_guarded_rank(job, run_dir, ranks, resumed)
        return code, run_dir if ranks.mine.rank == 0 else None
    with prepared_run(job, run_dir, resume=resume is not None, num_ranks=None) as run:
        if is_finished(run.run_dir, run.job):
            print(f"run     {run.run_dir}: step {run.job.train.steps} is done and saved; nothing to do")
            return ExitCode.OK, run_dir
        _require_steps_left(run.run_dir, run.job)
        announce(run, resumed=resumed)
        return _supervised(run, began, resumed), run_dir


def _as_guarded_rank(job: Job, run_dir: Path, ranks: ExternalRanks, resumed: Resumed | None) -> int:
    end = fork_guarded(ranks.mine.rank, run_dir)  # before torch is imported: the guard needs none of it
    from phalanx.run.external import train_as_rank

    code = int(ExitCode.INTERNAL)
    try:
        code = int(train_as_rank(job, run_dir, ranks, resumed))
    except PhalanxError as error:
        code = int(error.exit_code)
        raise
    except KeyboardInterrupt:
        code = int(ExitCode.INTERRUPTED)
        raise
    finally:
        end.tell(EndRecord(code))
    return code


def is_finished(run_dir: Path, job: Job) -> bool:
    """True if the last step is saved and what comes after it (evaluation, sample) is on record.

    With checkpoint.fallback somebody doubts what is saved: then it must verify, too.
    """
    steps = job.train.steps
    events = (envelope.event for envelope in EventTail(run_dir).poll())
    told = any(isinstance(e, RunFinished) and e.status == "finished" and e.step >= steps for e in events)
    store = open_store(run_dir, job.checkpoint.url)
    if not told or newest_step(store) < steps:
        return False
    return not job.checkpoint.fallback or not verify_checkpoint(store.folders()[-1])


def _require_steps_left(run_dir: Path, job: Job) -> None:
    saved = newest_step(open_store(run_dir, job.checkpoint.url))
    if saved > job.train.steps:
        raise UsageError(
            f"train.steps is {job.train.steps}, and step {saved} is done and saved",
            where=str(run_dir),
            fix=f"set train.steps to more than {saved}",
        )


def _fresh_name(job: Job) -> str:
    """A name of this second; a clock that was set back names a run that is there, and gets a number."""
    name = f"runs/{job.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(fresh for fresh in names if not Path(fresh).exists())


def _supervised(run: Prepared, began: float, resumed: Resumed | None) -> int:
    job, run_dir = run.job, run.run_dir
    attempt = next_attempt(run_dir)
    payload = {
        "first_attempt": attempt,
        "run_dir": str(run_dir.resolve()),
        "job": job.to_json(),
        "plan": run.plan.to_json(),
        "started_s": began,  # of the clock that all processes of this machine share
    }
    fence = Fence(run_dir, run.lock.holder)

    def claim() -> dict[str, Any]:
        fence.epoch = run.lock.take_epoch()
        return {"epoch": fence.epoch.number, "holder": asdict(run.lock.holder)}

    spec = LaunchSpec(
        entry="phalanx.run.rank:main",
        payload=payload,
        payload_of_attempt=claim,
        num_ranks=run.plan.world_size,
        run_dir=run_dir,
        preload=preload(job),
        max_restarts=job.resilience.max_restarts,
        grace_s=job.resilience.grace_s,
    )
    console = console_of(job)
    tail = EventTail(run_dir, attempt_from=attempt)
    show_refused = shows_refused(console, tail)
    bus = open_supervisor_bus(run_dir, attempt, show_refused, fence)
    if resumed is not None:
        bus.emit(Note(RESUMED, resumed.facts()))
    store = open_store(run_dir, job.checkpoint.url)

    def tick() -> None:
        if fence.is_lost():
            raise fence.error()  # the ranks end with what they are started by
        _show(console, tail)

    with contextlib.ExitStack() as opened:
        opened.callback(bus.close)
        opened.callback(console.close)
        outcome = supervise(
            spec,
            bus=bus,
            on_tick=tick,
            say=console.say,
            newest_step=lambda: _step_to_continue(store, run_dir),
            on_refused_event=lambda line: show_refused(read_event(line.encode())),
        )
        require_ours(fence)
        _show(console, tail)
        if outcome.status == "finished":
            score_baselines(run, bus)
            _show(console, tail)
        require_ours(fence)
        refused, elapsed_s = _refusal(run, outcome), time.monotonic() - began
        return finish_run(run, outcome, bus, opened, elapsed_s=elapsed_s, refused=refused)


def shows_refused(console: Console, tail: EventTail) -> Callable[[Envelope | None], None]:
    """What shows an event that the disk refused, at once, and not again when the tail finds it: it is written once that
    works. That events are refused is said once, and not again by each process."""
    reasons: set[str] = set()

    def show(envelope: Envelope | None) -> None:
        if envelope is None:
            return
        tail.skip(envelope)
        event = envelope.event
        if isinstance(event, Note) and event.code == EVENTS_UNWRITTEN:
            reason = str(event.facts.get("why"))
            if reason in reasons:
                return
            reasons.add(reason)
        console.write(envelope)

    return show


def open_supervisor_bus(run_dir: Path, attempt: int, show_refused: Callable[[Envelope], None], fence: Fence) -> Bus:
    """The bus of the process that holds the run; what its disk refuses goes to `show_refused`."""
    return Bus(
        rank=-1,
        attempt=attempt,
        run_dir=run_dir,
        on_unwritten=show_refused,
        may_write=lambda: not fence.is_lost(),
    )


def require_ours(fence: Fence) -> None:
    """Raise RunTakenError if another job has the run: nothing is written into it any more, whatever came out."""
    if fence.is_lost(now=True):
        raise fence.error()


def _step_to_continue(store: Store, run_dir: Path) -> int:
    """The newest checkpoint's, without those that ranks could not use and that were not written again since."""
    unusable: set[int] = set()
    for envelope in EventTail(run_dir).poll():
        if isinstance(envelope.event, CheckpointUnusable):
            unusable.add(envelope.event.step)
        elif isinstance(envelope.event, CheckpointSaved):
            unusable.discard(envelope.event.step)
    try:
        return max({folder.step for folder in store.folders()} - unusable, default=0)
    except (OSError, CheckpointError):
        return 0


def _refusal(run: Prepared, outcome: Outcome) -> PhalanxError | None:
    """What a rank said that refused the job before its first step was done: as if it had been seen before the start.

    None for any other end, and where the words point to a log of the run.
    """
    kinds = {kind.exit_code: kind for kind in (LayoutError, DataError, EnvironmentProblem, RunLockedError)}
    kind = kinds.get(ExitCode(outcome.exit_code))
    if kind is None or outcome.status != "failed" or str(run.run_dir) in outcome.message:
        return None
    has_begun = any(isinstance(envelope.event, StepFinished) for envelope in EventTail(run.run_dir).poll())
    return None if has_begun else kind(outcome.message)


def console_of(job: Job) -> Console:
    """What a person sees while `job` trains."""
    units = units_of(job.to_json())
    return open_console(sys.stdout, total_steps=job.train.steps, log_every=job.observe.log_every, units=units)


def _show(console: Console, tail: EventTail) -> None:
    for envelope in tail.poll():
        console.write(envelope)
    console.tick()
