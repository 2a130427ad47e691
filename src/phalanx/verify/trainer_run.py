"""Runs the real Trainer in a layout: stopped, resumed in the same and in another layout, and
observed between its steps beside the second loop."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from phalanx.checkpoint.run_storage import RunStorage
from phalanx.checkpoint.stores.local import LocalStore
from phalanx.core.block_sizes import (
    BlockSizes,
    get_block_sizes,
    shrink_block_sizes,
    use_block_sizes,
)
from phalanx.core.errors import CheckpointError, LayoutError, NumericsError
from phalanx.core.phases import PhaseTimer
from phalanx.core.roll_back import RollBackRequest
from phalanx.job.schema import Job
from phalanx.mesh.mesh import Mesh, open_mesh
from phalanx.nn.build import build_objective
from phalanx.observe.bus import Bus
from phalanx.plan.plan import Plan
from phalanx.run.build_trainer import build_trainer
from phalanx.run.one_process.original_module import build_original_module
from phalanx.run.rank_run import RollBacks
from phalanx.run.weights import (
    build_training_state,
    list_checkpoints_newest_first,
    restore_newest_readable_checkpoint,
)
from phalanx.train.state import TrainState
from phalanx.train.stop import StopSignalFlags
from phalanx.train.training_data import TrainingData
from phalanx.verify.late_store import DelayedCheckpointStore
from phalanx.verify.read_records import read_records_of_attempt
from phalanx.verify.trainer_batches import (
    SOURCE_WEIGHTS,
    GradientInjector,
    RankBatches,
    TrainerRunBatches,
)
from phalanx.verify.trainer_cases import (
    BACKGROUND_EVERY,
    LINKED_CHECKPOINT,
    LINKED_STEP,
    POSTPONED_STEP,
    SAME_LAYOUT,
    SAVE_EVERY,
    STOP_STEP,
    TrainerCase,
    choose_step_factors,
)
from phalanx.verify.trainer_checkpoint import (
    read_newest_checkpoint,
    try_to_save_infinite_weight,
)
from phalanx.verify.trainer_facts import (
    AttemptObservation,
)
from phalanx.verify.trainer_observer import CompressionStates, RunObserver
from phalanx.verify.trainer_reference import SecondLoopReader

# Of five steps of a small model on a busy machine.
MAX_HOLD_S = 120.0


@dataclass(frozen=True)
class TrainerRunResult:
    """One observation of this rank for each attempt that began. `other_refusal`: why the module
    cannot be resumed in the other layout; empty if it can."""

    attempts: list[AttemptObservation]
    other_refusal: str = ""


@dataclass(frozen=True)
class TrainerRun:
    """The attempts of one case. `reference` is that of the case's layout, `other_reference` that
    of the layout it is resumed in: of as many microbatches as those have."""

    job: Job
    case: TrainerCase
    batches: TrainerRunBatches
    run_dir: Path
    reference: SecondLoopReader
    other_reference: SecondLoopReader
    _compression_states: CompressionStates = field(init=False, default_factory=dict)

    def run(self) -> TrainerRunResult:
        """Train until the stop, resume in the same layout, and in the other; where that one refuses
        the module, in the same layout from the first checkpoint. Collective."""
        case = self.case
        observed = [self._run_trainer_attempt("", case.plan, self.reference, attempt=0)]
        if observed[0].error:
            return TrainerRunResult(observed)
        linked = AttemptObservation(LINKED_CHECKPOINT, first_step=LINKED_STEP + 1)
        resumed = self._run_trainer_attempt(
            SAME_LAYOUT, case.plan, self.reference, attempt=1, from_newest=True, linked=linked
        )
        observed.append(resumed)
        if resumed.error:
            return TrainerRunResult(observed)
        observed.append(linked)
        if linked.error:
            return TrainerRunResult(observed)
        refusal, reader = "", self.other_reference
        try:
            elsewhere = self._resume_from_first_checkpoint(case, reader, attempt=2)
        except LayoutError as error:
            # About the module, before any step, and the same on every rank.
            refusal, reader = str(error), self.reference
            own_case = case.without_other_layout()
            elsewhere = self._resume_from_first_checkpoint(own_case, reader, attempt=3)
        return TrainerRunResult([*observed, elsewhere], refusal)

    def _resume_from_first_checkpoint(
        self, case: TrainerCase, reader: SecondLoopReader, *, attempt: int
    ) -> AttemptObservation:
        name = f"resumed in {case.other_name}"
        return self._run_trainer_attempt(name, case.other_plan, reader, attempt=attempt)

    def _run_trainer_attempt(
        self,
        name: str,
        plan: Plan,
        reader: SecondLoopReader,
        *,
        attempt: int,
        from_newest: bool = False,
        linked: AttemptObservation | None = None,
    ) -> AttemptObservation:
        """Observe one attempt; with `linked`, which is filled, it saves each step, and restores the
        checkpoint of LINKED_STEP behind its end."""
        collectives = plan.parallel.collectives
        saves_elsewhere = bool(name) and linked is None
        with (
            use_block_sizes(_shrink_checkpoint_sizes(reads=saves_elsewhere)),
            open_mesh(plan.layout, device="cpu", collectives=collectives) as mesh,
        ):
            bus = Bus(rank=mesh.rank, attempt=attempt, run_dir=self.run_dir)
            observation = AttemptObservation(name, first_step=1)
            try:
                self._run_trainer_attempt_in_mesh(
                    mesh, plan, reader, bus, observation, from_newest=from_newest, linked=linked
                )
            # All are raised on every rank alike.
            except (CheckpointError, NumericsError, RollBackRequest) as error:
                observation.error = f"{type(error).__name__}: {error}"
            finally:
                bus.close()
            read_records_of_attempt(self.run_dir, mesh.rank, attempt, observation, linked)
            is_whole = not observation.error and observation.end == "finished"
            if mesh.rank == 0 and name and is_whole:
                self._read_checkpoints(observation, reader, saves_elsewhere=saves_elsewhere)
            return observation

    def _read_checkpoints(
        self, observation: AttemptObservation, reader: SecondLoopReader, *, saves_elsewhere: bool
    ) -> None:
        """Read the run's newest checkpoint; of the run that is resumed elsewhere the one that was
        saved late, which is not the newest."""
        if not saves_elsewhere:
            observation.read = (read_newest_checkpoint(self.run_dir, reader),)
            return
        folders = RunStorage.open(self._background_dir).store.folders()
        observation.saved = tuple(folder.step for folder in reversed(folders))
        late = [Path(folder.url) for folder in folders if folder.step == POSTPONED_STEP]
        if late:
            observation.read = (read_newest_checkpoint(late[0], reader),)

    @property
    def _background_dir(self) -> Path:
        """Where the run that is resumed elsewhere saves in the background."""
        return self.run_dir / "background"

    def _run_trainer_attempt_in_mesh(
        self,
        mesh: Mesh,
        plan: Plan,
        reader: SecondLoopReader,
        bus: Bus,
        observation: AttemptObservation,
        *,
        from_newest: bool,
        linked: AttemptObservation | None,
    ) -> None:
        is_resumed = bool(observation.name)
        job = self._make_attempt_job(reader, is_resumed=is_resumed, saves_all=linked is not None)
        storage, phases = self._open_run_storage(is_resumed), PhaseTimer()
        module, _ = build_original_module(self.job, plan, "float64", materialize=False)
        # With weights of its own, also where all of them are restored: they must not stay.
        state = build_training_state(job, plan, mesh, phases, module=module)
        if is_resumed:
            names = list_checkpoints_newest_first(storage, mesh)
            folders = [storage.store.folder(checkpoint) for checkpoint in names]
            observation.checkpoints = tuple(folder.step for folder in folders)
            if not names:
                return
            chosen = names[:1] if from_newest else names[-1:]
            restored = restore_newest_readable_checkpoint(
                storage, chosen, state, bus, fallback=False
            )
            observation.first_step = restored.step + 1
        stop = StopSignalFlags()
        observer = RunObserver(
            state, module, reader, observation, mesh, stop, self._compression_states
        )
        if not is_resumed:
            observer.stop_step = STOP_STEP
        if isinstance(storage.store, DelayedCheckpointStore):
            observer.last_update_hook = storage.store.release
        observation.why_not_repeated = _explain_no_repeated_step(plan, state, mesh)
        saves_elsewhere = is_resumed and linked is None
        held: DelayedCheckpointStore | None = None
        if saves_elsewhere:
            # What it is restored from stays as it is.
            store = RunStorage.open(self._background_dir).store
            assert isinstance(store, LocalStore)
            held = DelayedCheckpointStore(store, BACKGROUND_EVERY, max_delay_s=MAX_HOLD_S)
            storage = replace(storage, store=held)
            observer.release_step, observer.release_hook = (
                2 * BACKGROUND_EVERY,
                held.release_and_wait,
            )
        batches = RankBatches(self.batches, plan, mesh, observer.begin_step)
        injector = GradientInjector(
            batches, choose_step_factors(job, plan), not observation.why_not_repeated
        )
        data = TrainingData(
            batches,
            injector.wrap_objective(build_objective(job)),
            batches.held_out(),
            source_weights=SOURCE_WEIGHTS,
        )
        trainer = build_trainer(
            job,
            plan,
            state,
            bus,
            data,
            storage=storage,
            stop=stop,
            guards=(observer,),
            # It may go back, and has no reason to.
            roll_backs=RollBacks(),
        )
        with observer.observing_updates():
            observation.end = trainer.run()
        observer.compare_state_with_second_loop(state.step)
        if held is not None:
            observation.was_held_too_long = held.was_late
            observation.saved_infinite_weight = try_to_save_infinite_weight(state)
        if linked is not None:
            self._restore_linked_checkpoint(replace(observer, observation=linked), storage, bus)

    def _restore_linked_checkpoint(
        self, observer: RunObserver, storage: RunStorage, bus: Bus
    ) -> None:
        """Restore the checkpoint of LINKED_STEP into the state, which is that of the last step, and
        observe it."""
        linked, state = observer.observation, observer.state
        names = list_checkpoints_newest_first(storage, observer.mesh)
        steps = {storage.store.folder(name).step: name for name in names}
        linked.checkpoints = tuple(steps)
        if LINKED_STEP not in steps:
            return
        try:
            restore_newest_readable_checkpoint(
                storage, [steps[LINKED_STEP]], state, bus, fallback=False
            )
        except CheckpointError as error:
            linked.error = f"{type(error).__name__}: {error}"
            return
        observer.compare_state_with_second_loop(LINKED_STEP)
        linked.end = "restored"

    def _open_run_storage(self, is_resumed: bool) -> RunStorage:
        """The run's storage. What the first attempt saves in the background is written when the
        update of its last step is made: a copy of the state does not know of that."""
        storage = RunStorage.open(self.run_dir)
        if is_resumed or not isinstance(storage.store, LocalStore):
            return storage
        return replace(storage, store=DelayedCheckpointStore(storage.store, SAVE_EVERY))

    def _make_attempt_job(
        self, reader: SecondLoopReader, *, is_resumed: bool, saves_all: bool
    ) -> Job:
        """The job, which clips to what half of the steps exceed, or nothing as it says itself; an
        attempt that is resumed waits for a save after each step, or saves in the background and at
        its end."""
        body = self.job.to_json()
        body["optim"]["clip_norm"] = reader.recording_phase.max_norm
        if saves_all:
            body["checkpoint"] |= {"every_steps": 1, "asynchronous": False}
        elif is_resumed:
            body["checkpoint"] |= {"every_steps": BACKGROUND_EVERY, "at_end": True}
        if is_resumed and self.job.resilience.on_corruption == "stop":
            # The run would end in the step that is good when it is repeated.
            body["resilience"]["on_corruption"] = "warn"
        return Job.model_validate_json(json.dumps(body))


def _explain_no_repeated_step(plan: Plan, state: TrainState, mesh: Mesh) -> str:
    """Why the trainer does not repeat a step that was not finite; empty if it does. Collective."""
    if plan.compile:
        return "in compiled modules nothing is looked for"
    if plan.loss_scaling is not None and plan.loss_scaling.growth_steps:
        return "a smaller loss scale answers it"
    return next(filter(None, mesh.gather_json(state.why_step_is_done_once)), "")


def _shrink_checkpoint_sizes(*, reads: bool) -> BlockSizes:
    """The sizes in force, with files and blocks so small that those of a small model are linked,
    and blocks that ranks share out when they write them; with `reads` blocks are read in several
    turns, too."""
    small = shrink_block_sizes()
    sizes = replace(
        get_block_sizes(),
        reusable_file_bytes=small.reusable_file_bytes,
        reusable_block_bytes=small.reusable_block_bytes,
        replica_split_bytes=small.replica_split_bytes,
    )
    if reads:
        sizes = replace(sizes, checkpoint_read_bytes=small.checkpoint_read_bytes)
    return sizes
