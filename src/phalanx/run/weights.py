"""The weights that a rank's run starts from: of its newest checkpoint, of `model.init_from`, or
drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from phalanx.checkpoint.all_ranks import run_on_all_ranks_or_raise
from phalanx.checkpoint.folder import CheckpointFolder, format_place_in_run
from phalanx.checkpoint.ownership.store_owner import find_store_refusal_reason
from phalanx.checkpoint.reading.load import load_checkpoint_into_shards
from phalanx.checkpoint.reading.mismatch import MismatchError
from phalanx.checkpoint.run_storage import RunStorage
from phalanx.checkpoint.stores import find_checkpoint_at_or_newest
from phalanx.core.errors import CheckpointError, RunLockedError
from phalanx.core.phases import PhaseTimer
from phalanx.job.learning_rate import resolve_optim_section
from phalanx.job.schema import Job, Model
from phalanx.mesh.mesh import Mesh
from phalanx.mesh.recorded_init import get_initial_values_of_module
from phalanx.nn.build import build_model
from phalanx.observe.bus import Bus
from phalanx.observe.events import CheckpointUnusable, StepFinished, WeightsTaken
from phalanx.observe.where_words import format_rank_list
from phalanx.optim.build import build_optimizer
from phalanx.parallel.parallelize import parallelize
from phalanx.plan.plan import Plan
from phalanx.run.initial_weights import read_initial_weights
from phalanx.run.left_checkpoints import remove_left_checkpoints
from phalanx.run.rank_run import RollBacks
from phalanx.train.held_state import HeldState, restore_from_held_states
from phalanx.train.state import TrainState

_FALLBACK_FIX = "add --fallback to continue from the newest one before it that can be used"


@dataclass(frozen=True)
class RestoredState:
    """The state that training continues from.

    `origin`: the checkpoint that it was restored from, or the ranks that still held it; empty for a
    fresh one. `finished`: what such a rank recorded of its last step.
    """

    state: TrainState
    origin: str = ""
    finished: StepFinished | None = None


def build_and_restore_state(
    job: Job,
    plan: Plan,
    mesh: Mesh,
    phases: PhaseTimer,
    bus: Bus,
    *,
    storage: RunStorage,
    tokenizer: str,
    data_digest: str = "",
    held_state: HeldState | None = None,
    expects_held_state: bool = False,
    roll_backs: RollBacks | None = None,
    newest_saved_step: int = 0,
) -> RestoredState:
    """The state that training continues from.

    Collective. A run without checkpoints starts from the weights of model.init_from, else from
    random ones. `held_state` is what this rank held when it lost another one;
    `expects_held_state`, equal on all ranks: one of them may hold something. Raises CheckpointError
    if nobody holds the state, and there is no checkpoint any more, where that of
    `newest_saved_step` was.
    """
    roll_backs = roll_backs or RollBacks()
    names = list_checkpoints_newest_first(storage, mesh, roll_backs=roll_backs, bus=bus)
    initial = None
    if not names:
        initial = read_initial_weights_on_all_ranks(mesh, storage.run_dir)
    is_replaced = bool(names) or initial is not None
    state = build_training_state(
        job, plan, mesh, phases, tokenizer=tokenizer, draws=not is_replaced
    )
    state.data_digest = data_digest
    if expects_held_state and not roll_backs.pending:
        newest = max((storage.store.folder(name).step for name in names), default=0)
        restored = restore_from_held_states(state, held_state, newest_saved_step=newest)
        if restored is not None:
            state.saved_step = newest
            origin = f"the memory of {format_rank_list(restored.holders)}"
            return RestoredState(state, origin, restored.finished)
    if names:
        fallback = job.checkpoint.fallback
        folder = restore_newest_readable_checkpoint(storage, names, state, bus, fallback=fallback)
        state.samples_seen = roll_backs.find_next_sample(state.step, state.samples_seen)
        return RestoredState(state, folder.name)
    if newest_saved_step:
        # To begin anew would throw away all that was done.
        raise CheckpointError(
            "the run's checkpoints are gone",
            where=storage.store.url,
            why=f"that of step {newest_saved_step} was there, and now there is none",
            fix="put them back (is their file system mounted?), or start a new run",
        )
    if initial is not None:
        fill_model_with_initial_weights(initial, job.model, state, bus)
    state.samples_seen = roll_backs.find_next_sample(0, 0)
    return RestoredState(state)


def build_training_state(
    job: Job,
    plan: Plan,
    mesh: Mesh,
    phases: PhaseTimer,
    *,
    module: nn.Module | None = None,
    tokenizer: str = "",
    draws: bool = True,
) -> TrainState:
    """The model of the job, made parallel by the plan, with its optimizer: step 0.

    `module`: the job's, where it is built already (in another type, say). Without `draws` a
    built-in model has zeros for weights, and all of its state must be restored.
    """
    if module is None:
        module = build_model(job, plan.model_shape, is_recorded=True)
    # The initialisation of a user's own model may make more than a checkpoint holds; where it is
    # recorded that is there already.
    initialize = draws or (job.model.is_foreign and get_initial_values_of_module(module) is None)
    model = parallelize(module, plan, mesh, phases=phases, seed=job.run.seed, initialize=initialize)
    return TrainState(
        model, build_optimizer(model, resolve_optim_section(job)), job.run.seed, tokenizer
    )


def list_checkpoints_newest_first(
    storage: RunStorage,
    mesh: Mesh,
    *,
    roll_backs: RollBacks | None = None,
    bus: Bus | None = None,
) -> list[str]:
    """Names of the run's checkpoints, the newest first.

    Those that the run has left behind with its `roll_backs` are removed, and those of which that is
    not known are left out; the latter `bus` is told.

    Collective. The list is rank 0's, because a shared file system may show each rank another one.
    Raises RunLockedError if the store is another run's, and RunTakenError if another job has the
    run: what that one is writing must not be cleaned up.
    """
    names: list[str] = []
    refusal: RunLockedError | None = None
    store, fence = storage.store, storage.fence
    with run_on_all_ranks_or_raise(mesh, store.url, "looking for checkpoints") as results:
        # First of all: `remove_leftovers` would take what another job is writing
        # for what an earlier one left.
        if mesh.rank == 0 and fence is not None and fence.is_lost(now=True):
            raise fence.run_taken_error()
        if mesh.rank == 0:
            # Of two runs that claimed the store at once, the later one has it.
            refusal = find_store_refusal_reason(store, storage.run_dir)
        if mesh.rank == 0 and refusal is None:
            store.remove_leftovers()
            # After `remove_leftovers`, which may put a checkpoint back.
            folders = list(reversed(store.folders()))
            if roll_backs is not None:
                emit = (lambda event: None) if bus is None else bus.emit
                folders = remove_left_checkpoints(store, folders, roll_backs, emit)
            names = [folder.name for folder in folders]
        # Shared, and not raised: `run_on_all_ranks_or_raise` shares no error of this class.
        results.local = [names, refusal and [refusal.what, refusal.where, refusal.fix]]
    names, refusal_parts = results.by_rank[0]
    if refusal_parts is not None:
        raise RunLockedError(refusal_parts[0], where=refusal_parts[1], fix=refusal_parts[2])
    return names


def restore_newest_readable_checkpoint(
    storage: RunStorage, names: Sequence[str], state: TrainState, bus: Bus, *, fallback: bool
) -> CheckpointFolder:
    """Continue from the first of the checkpoints `names`, or with `fallback` from the first that
    can be read.

    Collective. Raises the first one's CheckpointError where none can be read: the state is then
    that of no step.
    """
    assert names, "weights that are not drawn must be restored"
    mesh = state.model.mesh
    first_error: CheckpointError | None = None
    for name in names:
        folder = storage.store.folder(name)
        try:
            state.restore(folder, phases=state.model.phases)
            return folder
        except CheckpointError as error:
            # It is raised on every rank, and nothing has changed.
            first_error = first_error or error
            if not fallback:
                if len(names) > 1 and not isinstance(error, MismatchError):
                    error.fix = error.fix or _FALLBACK_FIX
                break
            if mesh.rank == 0:
                location = format_place_in_run(folder, storage.run_dir)
                bus.emit(CheckpointUnusable(folder.step, location, error.why or str(error)))
    assert first_error is not None
    raise first_error


def read_initial_weights_on_all_ranks(mesh: Mesh, run_dir: Path) -> dict[str, Any] | None:
    """The decision about the weights that the run in `run_dir` starts from; None for random ones.

    Collective. It is rank 0's to read: a shared file system may show each rank another one.
    """
    with run_on_all_ranks_or_raise(mesh, str(run_dir), "reading where to start") as results:
        if mesh.rank == 0:
            results.local = read_initial_weights(run_dir)
    initial: dict[str, Any] | None = results.by_rank[0]
    return initial


def fill_model_with_initial_weights(
    initial: Mapping[str, Any], model: Model, state: TrainState, bus: Bus
) -> None:
    """Fill the model of a run at step 0 with the weights of `read_initial_weights_on_all_ranks`.

    Collective. Each rank reads its own ranges, at whatever layout, and verifies them. Raises
    CheckpointError unless every tensor of the model is among them.
    """
    mesh = state.model.mesh
    folder, shards = find_checkpoint_at_or_newest(initial["checkpoint"]), state.model.shards()
    manifest = load_checkpoint_into_shards(
        folder,
        shards,
        group=mesh,
        phases=state.model.phases,
        cast=model.init_cast,
        weights_only=True,
    )
    state.model.refresh()
    cast_names: set[str] = set()
    for name, shard in shards.items():
        if manifest.tensors[name].dtype != shard.dtype:
            cast_names.add(name)
    # Each stage knows of its own tensors.
    if mesh.layout.pp > 1:
        cast_names = cast_names.union(*mesh.gather_json(sorted(cast_names)))
    if mesh.rank == 0:
        num_cast, imported_from = len(cast_names), initial.get("imported_from", "")
        bus.emit(
            WeightsTaken(folder.url, manifest.step, len(manifest.tensors), imported_from, num_cast)
        )
