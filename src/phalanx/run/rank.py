"""One rank from start to end: open the mesh, build, restore, train, evaluate.

The supervisor forks into `main`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

import phalanx
from phalanx.checkpoint.ownership.fence import RunOwnershipWatch
from phalanx.checkpoint.run_storage import RunStorage
from phalanx.core.errors import ExitCode, RanksDifferError
from phalanx.core.phases import PhaseListener, PhaseTimer
from phalanx.core.pulse import writing_pulse
from phalanx.core.typed_json import JsonObject
from phalanx.data.corpus import Corpus, load_corpus
from phalanx.data.loader import TrainBatches
from phalanx.launch.paths import call_board_path
from phalanx.launch.rank_env import read_rank_env
from phalanx.launch.rank_link import RankLink
from phalanx.mesh.collective_checks import (
    checking_collectives,
)
from phalanx.mesh.collective_recorder import record_collectives
from phalanx.mesh.determinism import (
    using_deterministic_algorithms,
)
from phalanx.mesh.event_clock import create_phase_clock_for_device
from phalanx.mesh.mesh import Mesh, abandon_mesh, open_mesh, release_abandoned_groups
from phalanx.mesh.nvtx import NvtxRanges
from phalanx.mesh.rendezvous import RENDEZVOUS_TIMEOUT_S, SUPERVISED_RENDEZVOUS_TIMEOUT_S
from phalanx.nn.build import build_objective
from phalanx.observe.bus import (
    CLOSE_AFTER_ERROR_TIMEOUT_S,
    SLOW_SINK_CLOSE_TIMEOUT_S,
    Bus,
    OpenSink,
)
from phalanx.observe.events import (
    Note,
    RunStarted,
    StepFinished,
)
from phalanx.observe.last_step import read_last_recorded_step, read_last_step_with_samples
from phalanx.parallel.parallelize import discover_transforms
from phalanx.resilience.fault import FaultSite, build_fault_listener
from phalanx.run.build_trainer import build_trainer
from phalanx.run.data import (
    emit_note_on_batch_size_change,
    open_held_out_batches,
    open_train_batches,
    require_document_mask_support,
    require_same_samples_on_all_ranks,
)
from phalanx.run.directory import DATA_FOLDER
from phalanx.run.rank_context import (
    RankContext,
    open_black_box_of_rank,
    open_bus_of_rank,
    open_storage_of_run,
    reporting_errors_at_once,
)
from phalanx.run.rank_run import RankPayload, RankRunInputs, RollBacks, keeps_ranks
from phalanx.run.sample import emit_sample_text
from phalanx.run.survivor import Survivor
from phalanx.run.user_code import (
    build_code_error,
    describe_code_differences,
    digest_user_modules,
    names_user_code,
)
from phalanx.run.weights import build_and_restore_state
from phalanx.train.gpu_room import describe_gpu_memory_shortage
from phalanx.train.memory import MemoryMeter
from phalanx.train.state import TrainState
from phalanx.train.trainer import Trainer
from phalanx.train.training_data import TrainingData

# Imported in the server, once, instead of in every rank.
discover_transforms()

_EXIT_CODE_OF_END = {
    "finished": ExitCode.OK,
    "sigterm": ExitCode.PREEMPTED,
    "sigint": ExitCode.INTERRUPTED,
}


def run_supervised_rank(document: JsonObject, link: RankLink) -> int:
    """Train as one supervised rank, of the JSON of a RankPayload. Returns the exit code.

    A rank that only lost another one, or whose dataset met an outage, takes part in the next
    attempt with what it holds.
    """
    survivor = Survivor()
    while True:
        run = _read_run_inputs(document, link)
        try:
            return run_rank(run, survivor=survivor)
        except Exception as error:
            if not (keeps_ranks(run.job, run.plan) and survivor.may_go_on(error)):
                raise
            # What hangs on its frames is the old model.
            error.__traceback__ = error.__context__ = error.__cause__ = None
        release_abandoned_groups()
        order = link.wait_for_next_attempt(survivor.held_step)
        if order is None:
            if survivor.last_bus is not None:
                # No attempt follows that could write what the disk has refused.
                survivor.last_bus.close_file()
            return int(ExitCode.INTERNAL)
        document = order


def _read_run_inputs(document: JsonObject, link: RankLink) -> RankRunInputs:
    payload = RankPayload.from_json(document)
    ranks = read_rank_env(os.environ)
    assert ranks is not None, "the supervisor sets RANK"
    started_s = payload.started_s
    if ranks.attempt > payload.first_attempt:
        # A restart began with this process, or with what it was told, and not with the command.
        started_s = time.monotonic()
    return RankRunInputs(
        job=payload.job,
        plan=payload.plan,
        run_dir=payload.run_dir,
        rank=ranks.rank,
        attempt=ranks.attempt,
        started_s=started_s,
        claim=payload.claim,
        link=link,
        is_restart=ranks.attempt > payload.first_attempt,
        roll_backs=payload.roll_backs,
        newest_saved_step=payload.newest_saved_step,
    )


def run_rank(
    run: RankRunInputs,
    *,
    sinks: Sequence[tuple[str, OpenSink]] = (),
    rendezvous: dist.Store | None = None,
    survivor: Survivor | None = None,
) -> int:
    """Train as one rank; `sinks` come on top of the job's. Returns the exit code.

    `rendezvous` is the ranks' key-value store of another launcher, where that is open already.
    `survivor` has what this rank holds of an earlier attempt, and gets what it holds at the end of
    this one.
    """
    job = run.job
    is_kept = survivor is not None and keeps_ranks(job, run.plan)
    survivor = survivor or Survivor()
    stop = survivor.stop
    # First: from here on a signal is a request, also while groups are opened.
    stop.request_stop_on_signals()
    meter = MemoryMeter()
    site = FaultSite(run.rank, run.run_dir)
    listeners: tuple[PhaseListener, ...] = ()
    if inject := job.resilience.inject:
        listeners = (
            build_fault_listener(
                inject, rank=run.rank, run_dir=run.run_dir, attempt=run.attempt, site=site
            ),
        )
    box = open_black_box_of_rank(run)
    phases = PhaseTimer(box, listeners, of_training=(meter.begin_phase,))
    fence = RunOwnershipWatch.for_rank(run.run_dir, run.claim)
    bus = open_bus_of_rank(run, sinks, fence, survivor)
    try:
        with (
            checking_collectives(
                job.resilience.check_collectives,
                wait_s=job.resilience.check_collectives_wait_s,
                report_error=run.link.report_error,
                board_path=call_board_path(run.run_dir, run.rank),
            ) as checks,
            writing_pulse(box),
            record_collectives(box, checks) as recorder,
        ):
            rank = RankContext(
                run, bus, phases, meter, stop, fence, survivor, checks, site, recorder
            )
            try:
                code = _join_ranks_and_train(rank, rendezvous)
            except BaseException:
                rank.emit_collectives()
                raise
    except BaseException as error:
        # Not longer: all others wait for a rank that failed.
        goes_on = is_kept and survivor.may_go_on(error)
        bus.close(CLOSE_AFTER_ERROR_TIMEOUT_S, goes_on=goes_on)
        survivor.last_bus = bus
        raise
    finally:
        # Phases outlive it in a process that is kept: its groups would stay open with it.
        site.trainer = None
    # Whoever stops a run (code 75, 130) has little time: sinks get theirs at its end alone.
    bus.close(more_s=SLOW_SINK_CLOSE_TIMEOUT_S if code == ExitCode.OK else 0.0)
    return code


def _join_ranks_and_train(rank: RankContext, rendezvous: dist.Store | None) -> ExitCode:
    """Join the other ranks, build and restore the state, train, and leave together."""
    run, plan = rank.run, rank.run.plan
    rank.phases.enter("startup")
    with (
        _open_mesh_of_ranks(run, rendezvous) as mesh,
        reporting_errors_at_once(rank),
        _compiling_if_planned(rank, mesh),
    ):
        # On a GPU work runs later than it is called for: there its events tell the seconds.
        rank.phases.replace_clock(create_phase_clock_for_device(mesh.device))
        if run.job.observe.nvtx and mesh.device.type == "cuda":
            rank.phases.observers += (NvtxRanges(),)
        corpus = load_corpus(run.run_dir / DATA_FOLDER)
        # Before anything is built: ranks of different jobs would wait for each other for ever.
        _require_same_inputs_on_ranks(run, mesh, corpus)
        if plan.parallel.zero_stage >= 2:
            # FSDP's first use imports it: 100 MB of torch's, which must not count as training's.
            importlib.import_module("torch._dynamo")
        # Before the model: its memory counts, that of torch and of the groups does not.
        rank.meter.start(mesh.device, rank.survivor.memory_before)
        rank.survivor.memory_before = rank.meter.before
        shortage = describe_gpu_memory_shortage(mesh, plan)
        storage = open_storage_of_run(rank)
        try:
            restored = build_and_restore_state(
                run.job,
                plan,
                mesh,
                rank.phases,
                rank.bus,
                storage=storage,
                tokenizer=corpus.tokenizer_digest,
                data_digest=corpus.content_digest,
                held_state=rank.survivor.held,
                expects_held_state=run.is_restart,
                roll_backs=run.roll_backs,
                newest_saved_step=run.newest_saved_step,
            )
        except RanksDifferError:
            # All ranks raise it together: where files were edited since, that is why.
            if run.is_restart:
                _compare_user_code_of_ranks(run, mesh)
            raise
        state = restored.state
        require_document_mask_support(run.job, state.model)
        require_same_samples_on_all_ranks(corpus, mesh)
        with (
            open_train_batches(
                run.job, plan, mesh, corpus, state, rank.bus, run.run_dir
            ) as batches,
            # Inside, too: closing the loader may block, and the supervisor must know before.
            reporting_errors_at_once(rank),
        ):
            trainer = _build_trainer_of_rank(rank, storage, state, corpus, batches)
            rank.faults.trainer = trainer
            # Now they have imported what they train with.
            code_differences = _compare_user_code_of_ranks(run, mesh)
            taken_signals = rank.stop.take_signals_back()
            if mesh.rank == 0:
                rank.bus.emit(_build_run_started(run, mesh, state, restored.origin))
                _emit_start_warnings(
                    run, state, rank.bus, shortage, taken_signals, code_differences
                )
            _record_step_that_was_not_recorded(run, trainer, batches, restored.finished)
            rank.phases.leave("startup")
            with rank.survivor.holding_state_of(trainer):
                end_reason = trainer.run(run.started_s)
        _finish_on_all_ranks(rank, trainer, corpus, is_finished=end_reason == "finished")
    return _EXIT_CODE_OF_END[end_reason]


def _compiling_if_planned(rank: RankContext, mesh: Mesh) -> contextlib.AbstractContextManager[None]:
    if not rank.run.plan.compile:
        return contextlib.nullcontext()
    # Not above: torch's compiler is a second of imports.
    from phalanx.run.compiling import compiling_for_run

    return compiling_for_run(rank.run, mesh.device, rank.phases, rank.bus)


@contextlib.contextmanager
def _open_mesh_of_ranks(run: RankRunInputs, rendezvous: dist.Store | None) -> Iterator[Mesh]:
    """Open the mesh of the plan for the body, in which algorithms are as deterministic as the job
    asks for."""
    job, plan = run.job, run.plan
    default_s = SUPERVISED_RENDEZVOUS_TIMEOUT_S if rendezvous is None else RENDEZVOUS_TIMEOUT_S
    with (
        using_deterministic_algorithms(
            bool(job.train.deterministic), device=plan.device, compiles=plan.compile
        ),
        open_mesh(
            plan.layout,
            device=plan.device,
            store=rendezvous,
            timeout_s=job.resilience.collective_timeout_s,
            rendezvous_s=job.resilience.rendezvous_s or default_s,
            collectives=plan.parallel.collectives,
        ) as mesh,
    ):
        if plan.is_layout_free:
            # Sums within an operation depend on how many threads share it, and that on how many
            # ranks share a machine.
            torch.set_num_threads(1)
        yield mesh


def _require_same_inputs_on_ranks(run: RankRunInputs, mesh: Mesh, corpus: Corpus) -> None:
    """Raise, on every rank, if job, plan, data or versions differ between ranks."""
    mesh.require_agreement(
        {
            "job": run.job.to_json(),
            "plan": run.plan.to_json(),
            "data": corpus.to_json(),
            "torch": torch.__version__,
            "phalanx": phalanx.__version__,
        }
    )


def _compare_user_code_of_ranks(run: RankRunInputs, mesh: Mesh) -> str:
    """Where the ranks differ in the code of the user's that they have imported; empty if nowhere.

    Raises RanksDifferError, on every rank, if they do in a run that was started again: some were
    kept, and files were edited since.
    """
    if not names_user_code(run.job):
        return ""
    differences = describe_code_differences(mesh.gather_json(digest_user_modules()))
    if differences and run.is_restart:
        raise build_code_error(differences)
    return differences


def _build_trainer_of_rank(
    rank: RankContext, storage: RunStorage, state: TrainState, corpus: Corpus, batches: TrainBatches
) -> Trainer:
    job, plan = rank.run.job, rank.run.plan
    data = TrainingData(
        batches,
        build_objective(job),
        open_held_out_batches(job, plan, state.model.mesh, corpus),
        source_weights=corpus.weight_of_name,
        records=batches.record,
        sample_numbers=batches.share.sample_indices,
    )
    return build_trainer(
        job,
        plan,
        state,
        rank.bus,
        data,
        storage=storage,
        stop=rank.stop,
        memory=rank.meter,
        roll_backs=rank.run.roll_backs,
    )


def _record_step_that_was_not_recorded(
    run: RankRunInputs, trainer: Trainer, batches: TrainBatches, finished: StepFinished | None
) -> None:
    """Record the step that training continues from, or its samples alone, where the process of this
    rank that did it was gone before it could."""
    if finished is None:
        return
    step, before = finished.step, run.attempt
    if read_last_step_with_samples(run.run_dir, run.rank, before_attempt=before) < step:
        batches.digest_step_again(step)
    if read_last_recorded_step(run.run_dir, run.rank, before_attempt=before) < step:
        trainer.record_step_of_other_rank(finished)
    else:
        trainer.record_samples_of_step(step)


def _finish_on_all_ranks(
    rank: RankContext, trainer: Trainer, corpus: Corpus, *, is_finished: bool
) -> None:
    """Sample text if the run is finished, emit the memory of this rank, and wait for the others."""
    run, mesh, state = rank.run, trainer.mesh, trainer.state
    has_all_ranks = True
    if is_finished:
        # All is saved: a rank that dies from here on has not failed the run, and no rank does
        # before all are here.
        run.link.report_work_done()
        mesh.barrier()
        has_all_ranks = emit_sample_text(run.job, run.plan, mesh, corpus, trainer, rank.meter)
    predicted = run.plan.memory_of_rank(mesh.rank)
    rank.bus.emit(
        rank.meter.build_memory_event(state.shards(), state.model, predicted, trainer.staging_bytes)
    )
    rank.meter.stop()
    rank.emit_collectives()
    trainer.record_ending()
    if has_all_ranks:
        mesh.barrier()
    else:
        # Closing the mesh on a GPU would wait for the collective of the sample that others are in.
        abandon_mesh(mesh)


def _emit_start_warnings(
    run: RankRunInputs,
    state: TrainState,
    bus: Bus,
    shortage: str,
    taken_signals: Sequence[str],
    code_differences: str,
) -> None:
    """Emit what the owner of a run may regret, before its first step; `shortage` says which GPU
    has little room, if one does, `taken_signals` which signals code of the user's handled, and
    `code_differences` where the ranks have other code."""
    if shortage:
        bus.emit(Note("warning", {"warning": "little_room", "text": shortage}))
    if taken_signals:
        text = (
            f"code of yours handles {' and '.join(taken_signals)}: in a rank that trains it asks"
            " for a save and a stop, and that handler is not called"
        )
        # "why" is what the console shows.
        bus.emit(Note("warning", {"warning": "signals_taken", "text": text, "why": text}))
    for warning in run.plan.warnings:
        bus.emit(Note("warning", {"warning": warning.code, "text": warning.text}))
    emit_note_on_batch_size_change(run.job, run.plan, state, bus, run.roll_backs or RollBacks())
    if state.other_cpu:
        bus.emit(Note("another_cpu", {"why": state.other_cpu}))
    # Trees of additions are the same, whatever carries what is added.
    if state.other_collectives and not run.plan.is_layout_free:
        bus.emit(Note("other_collectives", {"why": state.other_collectives}))
    if state.lost_reduction:
        bus.emit(Note("compression_starts_anew", {"why": state.lost_reduction}))
    if code_differences:
        # Machines may have files of their own on purpose.
        text = f"the ranks differ in code: {code_differences}"
        bus.emit(Note("warning", {"warning": "code_differs", "text": text, "why": text}))


def _build_run_started(
    run: RankRunInputs, mesh: Mesh, state: TrainState, restored_from: str
) -> RunStarted:
    return RunStarted(
        run=run.job.run.name,
        job_digest=run.plan.job_digest,
        world_size=mesh.world_size,
        step=state.step,
        total_steps=run.job.train.steps,
        device=str(mesh.device),
        layout=run.plan.layout.to_json(),
        restored_from=restored_from,
        startup_s=time.monotonic() - run.started_s,
        plain_bytes=state.model.plain_bytes,
        collectives=mesh.describe_collectives(),
    )
