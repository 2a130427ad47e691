"""One rank from start to end: open the mesh, build, restore, train, evaluate. The supervisor forks into `main`."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import phalanx
from phalanx.checkpoint.agree import agreed
from phalanx.checkpoint.fence import Fence
from phalanx.checkpoint.fit import MisfitError
from phalanx.checkpoint.folder import Folder, place_in_run
from phalanx.checkpoint.owner import refusal_of
from phalanx.checkpoint.stores import Store, open_store
from phalanx.core.errors import CheckpointError, ExitCode, RunLockedError
from phalanx.core.phases import BlackBox, Phases
from phalanx.data.corpus import Corpus, load_corpus
from phalanx.job.rate import resolved_optim
from phalanx.job.schema import Job
from phalanx.launch.paths import black_box
from phalanx.launch.rank_env import read_rank_env
from phalanx.mesh.determinism import deterministic_algorithms, explained_refusals
from phalanx.mesh.event_clock import clock_of
from phalanx.mesh.mesh import Mesh, leave_at_once, open_mesh
from phalanx.mesh.rendezvous import RENDEZVOUS_S, SUPERVISED_RENDEZVOUS_S
from phalanx.nn.build import build_model, build_objective
from phalanx.observe.bus import CLOSE_AFTER_ERROR_S, CLOSE_MORE_S, Bus, OpenSink
from phalanx.observe.events import CheckpointUnusable, Envelope, Note, RunStarted, SinkDropped, TextGenerated
from phalanx.observe.progress import ProgressTeller
from phalanx.optim.build import build_optimizer
from phalanx.parallel.parallelize import parallelize, transforms
from phalanx.plan.plan import Plan
from phalanx.resilience.fault import fault_listener
from phalanx.resilience.guards import SkippedStepsGuard
from phalanx.run.data import (
    check_masks,
    check_same_samples,
    open_held_out,
    open_train_batches,
    prompt_tokens,
    say_batch_change,
)
from phalanx.run.needs import sink_openers
from phalanx.run.weights import find_initial_weights, take_initial_weights
from phalanx.train.generate import generate
from phalanx.train.gpu_room import missing_room
from phalanx.train.memory import MemoryMeter
from phalanx.train.state import TrainState
from phalanx.train.stop import StopFlags
from phalanx.train.trainer import Trainer

transforms()  # imported in the server, once, instead of in every rank


@dataclass(frozen=True)
class RankRun:
    """What one rank is to run. `started_s` (monotonic) is when the person pressed return."""

    job: Job
    plan: Plan
    run_dir: Path
    rank: int
    attempt: int
    started_s: float
    epoch: int = 0
    """Of the job's claim on the run directory; 0 where nobody counts."""
    holder: Mapping[str, Any] | None = None
    """Of the lock on the run directory, as JSON: the job's supervisor."""
    report_error: Callable[[BaseException], object] = lambda error: None
    """Tells the launcher why this rank fails, before anything that may wait for other ranks. May be called twice."""
    tell_done: Callable[[], object] = lambda: None
    """Tells the launcher that this rank's work is done, whatever comes of the sample of text and the way out."""
    pass_on: Callable[[str], object] = lambda line: None
    """Shows whoever watches the line of an event that the disk did not take."""


def main(payload: dict[str, Any]) -> int:
    """Train as one supervised rank. `payload`: run_dir, job, plan (JSON) and started_s. Returns the exit code."""
    ranks = read_rank_env(os.environ)
    assert ranks is not None, "the supervisor sets RANK"
    job = Job.model_validate_json(json.dumps(payload["job"]))
    plan, started_s = Plan.from_json(payload["plan"]), float(payload["started_s"])
    if ranks.attempt > payload["first_attempt"]:  # a restart began with this process, not with the command
        started_s = time.monotonic()
    run_dir, epoch = Path(payload["run_dir"]), int(payload["epoch"])
    tellers = payload["report_error"], payload["tell_done"], payload["pass_on_event"]
    claim = epoch, payload.get("holder"), *tellers
    return run_rank(RankRun(job, plan, run_dir, ranks.rank, ranks.attempt, started_s, *claim))


def run_rank(run: RankRun, *, sinks: Sequence[tuple[str, OpenSink]] = (), store: Any = None) -> int:
    """Train as one rank; `sinks` come on top of the job's. Returns the exit code."""
    job, rank = run.job, run.rank
    stop = StopFlags()
    stop.listen()
    inject = job.resilience.inject
    meter = MemoryMeter()
    faults = (fault_listener(inject, rank=rank, run_dir=run.run_dir),) if inject else ()
    phases = Phases(BlackBox(black_box(run.run_dir, rank)), faults, of_training=(meter.listen,))
    if rank == 0:
        sinks = [*sinks, *sink_openers(job, run.run_dir)]
    fence = Fence.of_rank(run.run_dir, run.epoch, run.holder)
    bus = Bus(
        rank=rank,
        attempt=run.attempt,
        run_dir=run.run_dir,
        sinks=sinks,
        on_unwritten=partial(_pass_on, run),
        may_write=lambda: not fence.is_lost(),
    )
    try:
        code = _train(run, bus, phases, meter, stop, store, fence)
    except BaseException:
        bus.close(CLOSE_AFTER_ERROR_S)
        raise
    bus.close(more_s=CLOSE_MORE_S if code == 0 else 0.0)  # whoever stops a run has little time
    return code


def _pass_on(run: RankRun, envelope: Envelope) -> None:
    """Rank 0's events are those that people watch; of other ranks they must know that some are lost."""
    if run.rank == 0 or isinstance(envelope.event, Note | SinkDropped):
        run.pass_on(envelope.to_line())


@contextlib.contextmanager
def _reported(run: RankRun) -> Iterator[None]:
    """Report an error of the body at once: what encloses it may block on the way out."""
    try:
        with explained_refusals(run.job.train.deterministic):
            yield
    except BaseException as error:
        run.report_error(error)
        raise


def _train(
    run: RankRun, bus: Bus, phases: Phases, meter: MemoryMeter, stop: StopFlags, store: Any, fence: Fence
) -> int:
    job, plan, run_dir = run.job, run.plan, run.run_dir
    phases.enter("startup")
    limits = {
        "timeout_s": job.resilience.collective_timeout_s,
        "rendezvous_s": job.resilience.rendezvous_s or (SUPERVISED_RENDEZVOUS_S if store is None else RENDEZVOUS_S),
    }
    deterministic = deterministic_algorithms(job.train.deterministic, device=plan.device, compiles=plan.compile)
    with deterministic, open_mesh(plan.layout, device=plan.device, store=store, **limits) as mesh, _reported(run):
        phases.time_by(clock_of(mesh.device))
        corpus = load_corpus(run_dir / "data")
        mesh.require_agreement(
            {
                "job": job.to_json(),
                "plan": plan.to_json(),
                "data": corpus.to_json(),
                "torch": torch.__version__,
                "phalanx": phalanx.__version__,
            }
        )
        if plan.zero_stage >= 2:
            importlib.import_module("torch._dynamo")  # as FSDP's first use does: 100 MB of torch, not of training
        meter.start(mesh.device)
        lacks = missing_room(mesh, plan)
        checkpoints = open_store(
            run_dir, job.checkpoint.url, say=lambda why: bus.emit(Note("store_is_slow", {"why": why}))
        )
        names = find_checkpoints(checkpoints, mesh, run_dir=run_dir, fence=fence)
        initial = None if names else find_initial_weights(mesh, run_dir)
        is_replaced = bool(names) or initial is not None
        state = build_state(job, plan, mesh, phases, tokenizer=corpus.tokenizer_digest, draws=not is_replaced)
        restored = None
        if names:
            restored = restore_newest(checkpoints, names, state, bus, run_dir=run_dir, fallback=job.checkpoint.fallback)
        elif initial is not None:
            take_initial_weights(initial, job.model, state, bus)
        check_masks(job, state.model)
        check_same_samples(corpus, mesh)
        with open_train_batches(job, plan, mesh, corpus, state, bus, run_dir) as data, _reported(run):
            trainer = Trainer(
                job,
                plan,
                mesh,
                state,
                bus,
                data=data,
                objective=build_objective(job),
                held_out=open_held_out(job, plan, mesh, corpus),
                source_weights=dict(zip(corpus.names, corpus.weights, strict=True)),
                records=data.record,
                guards=(SkippedStepsGuard(job.resilience.max_skipped_steps),),
                stop=stop,
                run_dir=run_dir,
                epoch=fence.epoch,
                fence=fence,
                memory=meter,
            )
            if mesh.rank == 0:
                bus.emit(_run_started(job, plan, mesh, state, restored, run.started_s))
                _say_warnings(job, plan, state, bus, lacks)
            phases.leave("startup")
            ended = trainer.run()
        if ended == "finished":
            # All is saved: a rank that dies from here on has not failed the run, and no rank does before all are here.
            run.tell_done()
            mesh.barrier()
        all_go_on = ended != "finished" or _sample_text(job, plan, mesh, corpus, trainer, meter)
        predicted = plan.predicted_of(mesh.rank)
        bus.emit(meter.measure(state.shards(), state.model, predicted, trainer.staging_bytes))
        meter.stop()
        if all_go_on:
            mesh.barrier()
        else:
            leave_at_once(mesh)  # closing it on a GPU would wait for a collective of the sample that the others are in
    return {"finished": ExitCode.OK, "sigterm": ExitCode.PREEMPTED, "sigint": ExitCode.INTERRUPTED}[ended]


def build_state(
    job: Job, plan: Plan, mesh: Mesh, phases: Phases, *, tokenizer: str = "", draws: bool = True
) -> TrainState:
    """The model of the job, made parallel by the plan, with its optimizer: step 0.

    Without `draws` a built-in model has zeros for weights, and all of its state must be restored.
    """
    module = build_model(job, plan.model_shape)
    initialize = draws or job.model.is_foreign  # a user's own may make more in there than a checkpoint holds
    model = parallelize(module, plan, mesh, phases=phases, seed=job.run.seed, initialize=initialize)
    return TrainState(model, build_optimizer(model, resolved_optim(job)), job.run.seed, tokenizer)


def find_checkpoints(store: Store, mesh: Mesh, *, run_dir: Path, fence: Fence | None = None) -> list[str]:
    """Names of the run's checkpoints, the newest first.

    Collective. The list is rank 0's, because a shared file system may show each rank another one. Raises RunLockedError
    if the store is another run's, and RunTakenError if another job has the run: what that one is writing must not be
    cleaned up.
    """
    found: list[str] = []
    refusal: RunLockedError | None = None
    with agreed(mesh, store.url, "looking for checkpoints") as outcome:
        if mesh.rank == 0 and fence is not None and fence.is_lost(now=True):
            raise fence.error()
        if mesh.rank == 0:
            refusal = refusal_of(store, run_dir)  # of two runs that claimed it at once, the later one has it
        if mesh.rank == 0 and refusal is None:
            store.clean_up()
            found = [folder.name for folder in reversed(store.folders())]
        outcome["mine"] = [found, refusal and [refusal.what, refusal.where, refusal.fix]]
    names, refused = outcome["all"][0]
    if refused is not None:
        raise RunLockedError(refused[0], where=refused[1], fix=refused[2])
    return names


def restore_newest(
    store: Store, names: Sequence[str], state: TrainState, bus: Bus, *, run_dir: Path, fallback: bool
) -> Folder:
    """Continue from the first of the checkpoints `names`, or with `fallback` from the first that can be read.

    Collective. Raises the first one's CheckpointError where none can be read: the state is then that of no step.
    """
    assert names, "weights that are not drawn must be restored"
    mesh = state.model.mesh
    first_error: CheckpointError | None = None
    for name in names:
        folder = store.folder(name)
        try:
            state.restore(folder, phases=state.model.phases)
            return folder
        except CheckpointError as error:  # on every rank, and nothing has changed
            first_error = first_error or error
            if not fallback:
                if len(names) > 1 and not isinstance(error, MisfitError):
                    error.fix = error.fix or "add --fallback to continue from the newest one before it that can be used"
                break
            if mesh.rank == 0:
                place = place_in_run(folder, run_dir)
                bus.emit(CheckpointUnusable(folder.step, place, error.why or str(error)))
    assert first_error is not None
    raise first_error


def _say_warnings(job: Job, plan: Plan, state: TrainState, bus: Bus, lacks: str) -> None:
    """What the owner of a run may regret, before its first step. `lacks`: room on a GPU."""
    if lacks:
        bus.emit(Note("warning", {"warning": "little_room", "text": lacks}))
    for warning in plan.warnings:
        bus.emit(Note("warning", {"warning": warning.code, "text": warning.text}))
    say_batch_change(job, plan, state, bus)
    if state.other_cpu:
        bus.emit(Note("another_cpu", {"why": state.other_cpu}))
    if state.lost_reduction:
        bus.emit(Note("compression_starts_anew", {"why": state.lost_reduction}))


def _run_started(
    job: Job, plan: Plan, mesh: Mesh, state: TrainState, restored: Folder | None, started_s: float
) -> RunStarted:
    return RunStarted(
        run=job.run.name,
        job_digest=plan.job_digest,
        world_size=mesh.world_size,
        step=state.step,
        total_steps=job.train.steps,
        device=str(mesh.device),
        layout=plan.layout.to_json(),
        restored_from=restored.name if restored else "",
        startup_s=time.monotonic() - started_s,
        plain_bytes=state.model.plain_bytes,
    )


def _sample_text(job: Job, plan: Plan, mesh: Mesh, corpus: Corpus, trainer: Trainer, meter: MemoryMeter) -> bool:
    """Sample text, once the last step is done and saved. False where that failed: it is noted, and the run is finished
    all the same. The other ranks may then be anywhere, and nobody waits for them."""
    step = trainer.state.step
    tokenizer = corpus.tokenizer()
    if not job.train.sample_tokens or tokenizer is None or job.model.objective is not None:
        return True
    meter.listen(step, "sample")
    num_tokens = job.train.sample_tokens
    progress = ProgressTeller(trainer.bus.emit, step, "sample", num_tokens)
    try:
        prompt = prompt_tokens(corpus, tokenizer, plan.seq_len)
        tokens = generate(
            trainer.state.model,
            prompt,
            num_tokens=num_tokens,
            context=plan.seq_len,
            seed=job.run.seed,
            told=progress.tell if mesh.rank == 0 else lambda num_done: None,
        )
        text = TextGenerated(step, tokenizer.decode(prompt), tokenizer.decode(tokens))
    except (Exception, SystemExit) as error:
        # A model that returns no logits says so itself, in the same words on every rank.
        why = str(error) if isinstance(error, TypeError) else f"{type(error).__name__}: {error}"
        trainer.bus.emit(Note("no_sample", {"why": why.partition("\n")[0]}))
        return False
    if mesh.rank == 0:
        trainer.bus.emit(text)
    return True
