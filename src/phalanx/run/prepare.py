"""What comes before and after the ranks of a run, whoever starts them."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.checkpoint.folder import Folder
from phalanx.checkpoint.locks import LOCK_NAME, Lock, hold_run_lock
from phalanx.checkpoint.owner import claim, release
from phalanx.checkpoint.stores import Store, newest_step, open_store
from phalanx.core.errors import (
    CheckpointError,
    ExitCode,
    LayoutError,
    PhalanxError,
    ResourceError,
    RunLockedError,
    UsageError,
)
from phalanx.core.files import open_run_directory, read_regular, resource_error, write_bytes_atomic, write_json_atomic
from phalanx.core.output import say
from phalanx.core.store_urls import local_directory
from phalanx.data.corpus import MANIFEST, Corpus, verify_corpus
from phalanx.data.prepare import prepare_corpus
from phalanx.job.foreign import foreign_shape
from phalanx.job.model import fixed_vocab_size, refuse_other_data
from phalanx.job.schema import Job
from phalanx.job.shape import ModelShape
from phalanx.launch.paths import next_attempt, refuse_linked_folders
from phalanx.launch.supervisor import Outcome
from phalanx.observe.bus import Bus
from phalanx.observe.events import RunFinished, RunStarted
from phalanx.observe.tail import EventTail
from phalanx.plan.cluster import detect_cluster
from phalanx.plan.describe import describe
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.plan.precision import keep_precision, with_precision
from phalanx.report.end_of_run import restart_lines, summary_lines
from phalanx.report.page import write_report
from phalanx.run.baselines import score
from phalanx.run.data_facts import data_facts
from phalanx.run.initial import INIT, find_initial, told_shape
from phalanx.run.mixed_rows import warnings_of_rows
from phalanx.run.needs import check_needs
from phalanx.run.next_command import after_training, this_command
from phalanx.run.resume import Resumed, plan_of_run
from phalanx.run.tokens import find_tokens

CHECKPOINT_BYTES_PER_PARAM = 12  # fp32 weights and two moments
DATA = "data"  # in RUN


@dataclass(frozen=True)
class Prepared:
    """All that is decided before the first rank starts."""

    job: Job
    plan: Plan
    corpus: Corpus
    run_dir: Path
    lock: Lock
    unverified: tuple[str, ...] = ()
    """What is to be said of tokens that were not compared with their checksums."""
    init: tuple[str, ...] = ()
    """What is to be said of the weights that it starts from."""
    forget: Callable[[], None] = lambda: None
    """Have a new run be as if it had never been: what is new of the directory goes when the run is left."""


@contextlib.contextmanager
def prepared_run(job: Job, run_dir: Path, *, resume: bool, num_ranks: int | None) -> Iterator[Prepared]:
    """Plan, lock the run directory and prepare the data. What cannot start leaves nothing behind."""
    _refuse_a_run_that_is_there(run_dir, resume)
    is_prepared = (run_dir / DATA / MANIFEST).exists()
    refuse_linked_folders(run_dir, more=[DATA] if resume and not is_prepared else [])
    cluster = detect_cluster(job.cluster.device)
    before = plan_of_run(run_dir) if resume else None
    if before is not None and job.precision.compute == "auto":  # started again with the job file: the run has begun
        job = with_precision(job, before.precision)
    shape = foreign_shape(job)
    check_needs(job, cluster.device)
    refuse_other_data(job, shape)
    if not resume:
        find_initial(job.model, told_shape(job))  # weights that are not there or do not fit: before data is prepared
    make_plan(job, cluster=cluster, num_ranks=num_ranks, shape=shape)  # refuse a bad layout before writing anything
    tokens = find_tokens(job, is_prepared=is_prepared)
    with _new_run_directory(run_dir) as (lock, keep), _store_held(job, run_dir, resume):
        is_new = not (run_dir / DATA / MANIFEST).exists()
        fixed_size = fixed_vocab_size(job.model)
        corpus = prepare_corpus(job.data, run_dir / DATA, vocab_size=fixed_size, default_tokenizer=tokens.default)
        unverified = verify_corpus(corpus, is_new=is_new)
        vocab_size = fixed_size or corpus.vocab_size
        plan = make_plan(
            job,
            cluster=cluster,
            vocab_size=vocab_size,
            num_ranks=num_ranks,
            shape=shape,
            data=data_facts(corpus),
            more=tokens.remarks(corpus),
        )
        _refuse_images(corpus, plan.model_shape)
        plan = keep_precision(plan, before, cluster)
        job = with_precision(job, plan.precision)  # a run is known by it, wherever it goes on
        plan = replace(plan, warnings=(*plan.warnings, *warnings_of_rows(job, plan, ask=not resume)))
        if not resume:
            open_run_directory(run_dir, needed_bytes=plan.num_params * CHECKPOINT_BYTES_PER_PARAM)
        initial, init_lines = _initial_weights(job, plan, run_dir)
        with _facts_written(run_dir, lock, {"job.json": job.to_json(), "plan.json": plan.to_json(), **initial}):
            keep(True)

            def forget() -> None:
                if not resume:
                    _forget(run_dir, keep)

            yield Prepared(job, plan, corpus, run_dir, lock, tuple(unverified), tuple(init_lines), forget)


def _refuse_images(corpus: Corpus, shape: ModelShape) -> None:
    """What every rank would refuse: samples of another size than a built-in model of images takes."""
    if corpus.user is None or not shape.reads_images:
        return
    known, wanted = corpus.user.first_shapes, [shape.num_channels, shape.image_size, shape.image_size]
    size = known.get("inputs", known.get("images", wanted))
    if size != wanted:
        found, takes = (" x ".join(map(str, numbers)) for numbers in (size, wanted))
        raise LayoutError(
            f"images are {found} (channels x height x width), and the model takes {takes}",
            where=f"data.source {corpus.user.source}",
            fix="set image_size and num_channels of the model, or resize the images",
        )


def _initial_weights(job: Job, plan: Plan, run_dir: Path) -> tuple[dict[str, Any], list[str]]:
    """What to write into the run directory and what to say of model.init_from. Only step 0 reads it."""
    if job.model.init_from is None:
        return {}, []
    if open_store(run_dir, job.checkpoint.url).folders():
        return {}, ["init    model.init_from is not read: the run continues from its own checkpoint"]
    initial = find_initial(job.model, plan.model_shape)
    assert initial is not None
    return {INIT: initial.to_json()}, initial.lines()


@contextlib.contextmanager
def _store_held(job: Job, run_dir: Path, resume: bool) -> Iterator[None]:
    """A store elsewhere can be written, now and not at the first save; a new run finds nobody's checkpoints there.

    A directory is locked as a run's is: two runs that begin with an empty one would take each other's checkpoints for
    their own. An object store has no lock: it says whose it is.
    """
    if job.checkpoint.url is None:
        yield
        return
    store = open_store(run_dir, job.checkpoint.url, say=say)
    store.probe()
    with contextlib.ExitStack() as held:
        directory = local_directory(job.checkpoint.url)
        if directory is not None and directory.resolve() != run_dir.resolve():
            _hold_store(held, directory)
        if not resume and store.folders():
            fix = "choose another checkpoint.url, or continue the run they belong to with --resume"
            raise UsageError("there are checkpoints of another run", where=store.url, fix=fix)
        held.enter_context(_claimed(store, run_dir))
        yield


@contextlib.contextmanager
def _claimed(store: Store, run_dir: Path) -> Iterator[None]:
    """Until there is no run: what cannot start leaves its claim behind nowhere."""
    try:
        claim(store, run_dir)
        yield
    finally:
        if not (run_dir / "job.json").exists():
            release(store, run_dir)


def _hold_store(held: contextlib.ExitStack, directory: Path) -> None:
    try:
        held.enter_context(hold_run_lock(directory))
    except RunLockedError as error:
        what = error.what.replace("the run directory", "checkpoint.url")
        fix = (error.fix or "").replace("run.dir", "checkpoint.url")
        raise RunLockedError(what, where=error.where, fix=fix) from None


@contextlib.contextmanager
def _facts_written(run_dir: Path, lock: Lock, facts: dict[str, Any]) -> Iterator[None]:
    """Write the facts of a run. Those of an old one return if the body starts no training: it was refused after all.

    Not a byte is written once another job has taken the run: this one may have stood still for hours before.
    """
    lock.require_ours()
    paths = [run_dir / name for name in facts]
    old = {path: read_regular(path) for path in paths if path.exists()}
    attempt = next_attempt(run_dir)
    try:
        for path, value in zip(paths, facts.values(), strict=True):
            write_json_atomic(path, value)
    except OSError as error:
        raise resource_error(error, "writing the run's facts", run_dir) from None
    try:
        yield
    finally:
        if (
            old
            and lock.is_ours()
            and not any(isinstance(e.event, RunStarted) for e in EventTail(run_dir, attempt).poll())
        ):
            with contextlib.suppress(OSError):
                for path, data in old.items():
                    write_bytes_atomic(path, data)


def _refuse_a_run_that_is_there(run_dir: Path, resume: bool) -> None:
    """At once, before anything slow: another live job's (exit 9), or an old one that is not to be resumed."""
    try:
        is_locked, is_run = (run_dir / LOCK_NAME).exists(), (run_dir / "job.json").exists()
    except OSError as error:  # a name that no file system takes
        raise resource_error(error, "opening the run directory", run_dir) from None
    if is_locked:
        with contextlib.suppress(ResourceError), hold_run_lock(run_dir):
            pass
    if not resume and is_run:
        raise UsageError("a run is there already", where=str(run_dir), fix=f"use --resume {run_dir} or another run.dir")


@contextlib.contextmanager
def _new_run_directory(run_dir: Path) -> Iterator[tuple[Lock, Callable[[bool], None]]]:
    """Create and lock `run_dir`. What is new of it goes away again unless the body calls what is yielded with True.

    Only the holder of the lock removes files: of two jobs that race for a new directory, the loser leaves it alone.
    """
    made = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    new = list(made)

    def keep(wanted: bool) -> None:
        new[:] = [] if wanted else made

    try:
        open_run_directory(run_dir)
        with hold_run_lock(run_dir) as lock:
            try:
                yield lock, keep
            finally:
                if run_dir in new and lock.is_ours():
                    shutil.rmtree(run_dir, ignore_errors=True)
    finally:
        for folder in new:
            with contextlib.suppress(OSError):  # somebody else's by now
                folder.rmdir()


def _forget(run_dir: Path, keep: Callable[[bool], None]) -> None:
    """A directory that was there before stays, but is no run any more."""
    keep(False)
    for name in ("job.json", "plan.json"):
        (run_dir / name).unlink(missing_ok=True)


def announce(run: Prepared, *, ranks: str = "", resumed: Resumed | None = None) -> None:
    """Print what is about to happen, before it does. `ranks`: where they were read, if a launcher started them.

    Of a run that is continued, what changed stands last, right before the first step.
    """
    data = [f"data    {line}" for line in (*_data_lines(run.corpus), *run.unverified)]
    launched = [f"ranks   {ranks}"] if ranks else []
    say(
        f"run     {run.run_dir}",
        *launched,
        *data,
        *run.init,
        *describe(run.plan, of_samples=run.corpus.user is not None),
        *(resumed.lines() if resumed is not None else ()),
    )


def _data_lines(corpus: Corpus) -> list[str]:
    """What is trained on: a line for each source."""
    if corpus.user is not None:
        held_out = f"{corpus.user.num_held_out:,} held out" if corpus.user.num_held_out else "none held out"
        return [f"{corpus.user.source}: {corpus.user.num_train:,} training samples, {held_out}"]
    lines, total = [], sum(corpus.weights)
    for component in corpus.components:
        train, held = component.splits["train"], component.splits["held_out"]
        share = f" ({component.weight / total:.1%} of the samples)" if len(corpus.components) > 1 else ""
        skipped = f", {component.num_skipped_files} binary files skipped" if component.num_skipped_files else ""
        how = "by position" if component.split_by == "position" else f"in {held.num_documents:,}"
        why = f" ({component.why_split})" if component.why_split else ""
        lines.append(
            f"{component.source}{share}: {train.num_tokens:,} training tokens in {train.num_documents:,} documents, "
            f"{held.num_tokens:,} held out {how if held.num_tokens else 'in 0'}{why}{skipped}"
        )
    return lines


def score_baselines(run: Prepared, bus: Bus) -> None:
    """Fit n-gram models on the same training split and score them on the same held-out tokens."""
    if run.job.eval.tokens and run.corpus.splits["held_out"].num_tokens > 1:
        for event in score(run.corpus, run.job.eval.tokens):
            bus.emit(event)


def finish_run(
    run: Prepared,
    outcome: Outcome,
    bus: Bus,
    opened: contextlib.ExitStack,
    *,
    elapsed_s: float,
    refused: PhalanxError | None = None,
) -> int:
    """Record how the run ended, close what is `opened` (the bus, the console), conclude. Returns the exit code.

    Raises `refused`, which makes the run as if it had never been; and ResourceError where a run is finished and its
    record does not say so: whoever starts it again then repeats what comes after the last step.
    """
    saved = newest_step(open_store(run.run_dir, run.job.checkpoint.url))
    bus.emit(RunFinished(outcome.status, outcome.exit_code, saved, elapsed_s))
    unrecorded = bus.refusal
    opened.close()
    if refused is not None:
        run.forget()
        raise refused
    code = conclude(run, outcome)
    if code == ExitCode.OK and unrecorded is not None:
        doing = "recording that the run is finished (its last step is saved)"
        raise resource_error(unrecorded, doing, run.run_dir / "events")
    return code


def conclude(run: Prepared, outcome: Outcome) -> int:
    """The page, and the last lines: what came out and where it is."""
    page = _page_written(run.run_dir)
    if outcome.status == "finished":
        say(*summary_lines(run.run_dir))
    elif outcome.message:
        print(outcome.message, file=sys.stderr)
    say(*restart_lines(run.run_dir, outcome.attempts - 1))
    saved, place = _saved(run), shlex.quote(str(run.run_dir))
    if outcome.exit_code == ExitCode.CHECKPOINT:
        if saved and not run.job.checkpoint.fallback:
            say(f"resume  {this_command()} train --resume {place} --fallback   (the newest checkpoint that verifies)")
    elif outcome.status != "finished" and saved:
        say(f"resume  {this_command()} train --resume {place}   (newest checkpoint: {saved[-1].name})")
    follows = outcome.status == "finished" and saved
    say(page, *([after_training(run.job, run.plan, run.corpus, run.run_dir)] if follows else []))
    say(f"run     {run.run_dir}")
    return outcome.exit_code


def _page_written(run_dir: Path) -> str:
    """Write the page and say where it is; a disk that refuses it must not hide how the run ended."""
    try:
        write_report(run_dir)
    except ResourceError as error:
        return f"report  is not written: {error.what} ({error.why}); phalanx report {run_dir} writes it once it can be"
    return f"report  {run_dir / 'report.html'}"


def _saved(run: Prepared) -> list[Folder]:
    """The run's checkpoints; none where the store does not answer, which whoever resumes will hear of."""
    try:
        return open_store(run.run_dir, run.job.checkpoint.url).folders()
    except (OSError, CheckpointError):
        return []
