"""One rank from start to end: open the mesh, build, restore, train, evaluate.

The supervisor forks into `main`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

import phalanx
from phalanx.checkpoint.folder import Folder
from phalanx.checkpoint.ownership.fence import Fence
from phalanx.checkpoint.stores import open_store
from phalanx.core.errors import ExitCode
from phalanx.core.phases import BlackBox, Phases
from phalanx.core.typed_json import JsonObject
from phalanx.data.corpus import load_corpus
from phalanx.job.schema import Job
from phalanx.launch.paths import black_box
from phalanx.launch.rank_env import read_rank_env
from phalanx.launch.rank_link import RankLink
from phalanx.mesh.determinism import deterministic_algorithms, explain_refusals
from phalanx.mesh.event_clock import clock_of
from phalanx.mesh.mesh import Mesh, leave_at_once, open_mesh
from phalanx.mesh.rendezvous import RENDEZVOUS_S, SUPERVISED_RENDEZVOUS_S
from phalanx.nn.build import build_objective
from phalanx.observe.bus import CLOSE_AFTER_ERROR_S, CLOSE_MORE_S, Bus, OpenSink
from phalanx.observe.events import Envelope, Note, RunStarted, SinkDropped
from phalanx.parallel.parallelize import transforms
from phalanx.plan.plan import Plan
from phalanx.resilience.fault import fault_listener
from phalanx.resilience.guards import SkippedStepsGuard
from phalanx.run.data import (
    check_masks,
    open_held_out,
    open_train_batches,
    require_same_samples,
    say_batch_change,
)
from phalanx.run.needs import sink_openers
from phalanx.run.rank_run import RankPayload, RankRun
from phalanx.run.sample import sample_text
from phalanx.run.weights import open_state
from phalanx.train.gpu_room import check_gpu_room
from phalanx.train.memory import MemoryMeter
from phalanx.train.state import TrainState
from phalanx.train.stop import StopFlags
from phalanx.train.trainer import Trainer

transforms()  # imported in the server, once, instead of in every rank


def main(document: JsonObject, link: RankLink) -> int:
    """Train as one supervised rank, of the JSON of a RankPayload. Returns the exit code."""
    payload = RankPayload.from_json(document)
    ranks = read_rank_env(os.environ)
    assert ranks is not None, "the supervisor sets RANK"
    started_s = payload.started_s
    if (
        ranks.attempt > payload.first_attempt
    ):  # a restart began with this process, not with the command
        started_s = time.monotonic()
    run = RankRun(
        job=payload.job,
        plan=payload.plan,
        run_dir=payload.run_dir,
        rank=ranks.rank,
        attempt=ranks.attempt,
        started_s=started_s,
        claim=payload.claim,
        link=link,
    )
    return run_rank(run)


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
    fence = Fence.for_rank(run.run_dir, run.claim)
    bus = Bus(
        rank=rank,
        attempt=run.attempt,
        run_dir=run.run_dir,
        sinks=sinks,
        on_unwritten=partial(_forward_event, run),
        may_write=lambda: not fence.is_lost(),
    )
    try:
        code = _train(run, bus, phases, meter, stop, store, fence)
    except BaseException:
        bus.close(CLOSE_AFTER_ERROR_S)
        raise
    bus.close(more_s=CLOSE_MORE_S if code == 0 else 0.0)  # whoever stops a run has little time
    return code


def _forward_event(run: RankRun, envelope: Envelope) -> None:
    """Rank 0's events are those that people watch; of other ranks they must know that some are
    lost."""
    if run.rank == 0 or isinstance(envelope.event, Note | SinkDropped):
        run.link.forward_event(envelope.to_line())


@contextlib.contextmanager
def _report_errors(run: RankRun) -> Iterator[None]:
    """Report an error of the body at once: what encloses it may block on the way out."""
    try:
        with explain_refusals(run.job.train.deterministic):
            yield
    except BaseException as error:
        run.link.report_error(error)
        raise


def _train(
    run: RankRun,
    bus: Bus,
    phases: Phases,
    meter: MemoryMeter,
    stop: StopFlags,
    store: Any,
    fence: Fence,
) -> int:
    job, plan, run_dir = run.job, run.plan, run.run_dir
    phases.enter("startup")
    limits = {
        "timeout_s": job.resilience.collective_timeout_s,
        "rendezvous_s": job.resilience.rendezvous_s
        or (SUPERVISED_RENDEZVOUS_S if store is None else RENDEZVOUS_S),
    }
    deterministic = deterministic_algorithms(
        job.train.deterministic, device=plan.device, compiles=plan.compile
    )
    with (
        deterministic,
        open_mesh(plan.layout, device=plan.device, store=store, **limits) as mesh,
        _report_errors(run),
    ):
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
            importlib.import_module(
                "torch._dynamo"
            )  # as FSDP's first use does: 100 MB of torch, not of training
        meter.start(mesh.device)
        lacks = check_gpu_room(mesh, plan)
        checkpoints = open_store(
            run_dir,
            job.checkpoint.url,
            say=lambda why: bus.emit(Note("store_is_slow", {"why": why})),
        )
        state, restored = open_state(
            job,
            plan,
            mesh,
            phases,
            bus,
            store=checkpoints,
            run_dir=run_dir,
            fence=fence,
            tokenizer=corpus.tokenizer_digest,
        )
        check_masks(job, state.model)
        require_same_samples(corpus, mesh)
        with (
            open_train_batches(job, plan, mesh, corpus, state, bus, run_dir) as data,
            _report_errors(run),
        ):
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
                fencing_token=fence.token,
                fence=fence,
                memory=meter,
            )
            if mesh.rank == 0:
                bus.emit(_build_run_started(job, plan, mesh, state, restored, run.started_s))
                _say_warnings(job, plan, state, bus, lacks)
            phases.leave("startup")
            ended = trainer.run()
        if ended == "finished":
            # All is saved: a rank that dies from here on has not failed the run, and no rank does
            # before all are here.
            run.link.report_done()
            mesh.barrier()
        has_all_ranks = ended != "finished" or sample_text(job, plan, mesh, corpus, trainer, meter)
        predicted = plan.memory_of_rank(mesh.rank)
        bus.emit(meter.measure(state.shards(), state.model, predicted, trainer.staging_bytes))
        meter.stop()
        if has_all_ranks:
            mesh.barrier()
        else:
            leave_at_once(
                mesh
                # closing it on a GPU would wait for a collective of the sample that the others are
                # in
            )
    return {"finished": ExitCode.OK, "sigterm": ExitCode.PREEMPTED, "sigint": ExitCode.INTERRUPTED}[
        ended
    ]


def _say_warnings(job: Job, plan: Plan, state: TrainState, bus: Bus, lacks: str) -> None:
    """Emit what the owner of a run may regret, before its first step."""
    if lacks:
        bus.emit(Note("warning", {"warning": "little_room", "text": lacks}))
    for warning in plan.warnings:
        bus.emit(Note("warning", {"warning": warning.code, "text": warning.text}))
    say_batch_change(job, plan, state, bus)
    if state.other_cpu:
        bus.emit(Note("another_cpu", {"why": state.other_cpu}))
    if state.lost_reduction:
        bus.emit(Note("compression_starts_anew", {"why": state.lost_reduction}))


def _build_run_started(
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
