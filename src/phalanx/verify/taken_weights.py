"""Judges how a run takes the weights of model.init_from, by those that the row's own run has saved:
each tensor must have the bits that a run has which is resumed from the newest checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from phalanx.checkpoint.folder import CheckpointFolder
from phalanx.checkpoint.run_storage import RunStorage
from phalanx.core.errors import CheckpointError
from phalanx.core.phases import PhaseTimer
from phalanx.job.schema import Job
from phalanx.mesh.logical import LogicalShard
from phalanx.mesh.mesh import Mesh, open_mesh
from phalanx.observe.bus import Bus
from phalanx.plan.plan import Plan
from phalanx.run.one_process.original_module import build_original_module
from phalanx.run.weights import (
    build_training_state,
    fill_model_with_initial_weights,
    list_checkpoints_newest_first,
)
from phalanx.train.state import TrainState
from phalanx.verify.row import Difference, Row
from phalanx.verify.shard_blocks import describe_held_part

TAKEN_WEIGHTS_JUDGED = (
    "weights taken as those of model.init_from, from a checkpoint that the row's run has saved"
)
STAYS_AS_DRAWN_CAUSE = (
    "a run that begins with the weights of a checkpoint (model.init_from) leaves it as it was drawn"
)
OTHER_WEIGHTS_CAUSE = (
    "a run that begins with the weights of a checkpoint (model.init_from) has others than a run"
    " that is resumed from it"
)
REFUSED_CHECKPOINT_CAUSE = (
    "a run cannot begin with the weights of a checkpoint (model.init_from) that a run of the same"
    " job has saved: {}"
)
TAKER_ATTEMPT = 9
"""Of the events of the run that takes weights: no attempt of the row has this number."""


@dataclass(frozen=True)
class _WrongTensor:
    """A tensor that one rank has taken otherwise than it is in the checkpoint."""

    name: str
    error: float
    held: str
    stays: bool


def judge_taken_weights(row: Row, job: Job, plan: Plan, run_dir: Path) -> Row:
    """`row`, of a run in `run_dir` that has saved, with a difference where weights are not taken
    from what it saved as they are there. Collective; the row may be another one on each rank."""
    collectives = plan.parallel.collectives
    with open_mesh(plan.layout, device="cpu", collectives=collectives) as mesh:
        storage = RunStorage.open(run_dir)
        names = list_checkpoints_newest_first(storage, mesh)
        if not names:
            return row
        folder = storage.store.folder(names[0])
        bus = Bus(rank=mesh.rank, attempt=TAKER_ATTEMPT, run_dir=run_dir)
        try:
            wrong = _find_wrong_tensors(job, plan, mesh, folder, run_dir, bus)
        # Raised on every rank alike.
        except CheckpointError as error:
            cause = REFUSED_CHECKPOINT_CAUSE.format(error.why or error.what)
            first = Difference("initial weight", "", 0, 1.0, 0, (0,), "", cause)
            return _add_first_difference(row, first)
        finally:
            bus.close()
        by_rank = mesh.gather_json([vars(tensor) for tensor in wrong])
    ranks = tuple(rank for rank, bodies in enumerate(by_rank) if bodies)
    if not ranks:
        return replace(row, judged=(*row.judged, TAKEN_WEIGHTS_JUDGED))
    tensor = _WrongTensor(**by_rank[ranks[0]][0])
    cause = STAYS_AS_DRAWN_CAUSE if tensor.stays else OTHER_WEIGHTS_CAUSE
    first = Difference(
        "initial weight", tensor.name, 0, tensor.error, ranks[0], ranks, tensor.held, cause
    )
    return _add_first_difference(row, first)


def _find_wrong_tensors(
    job: Job, plan: Plan, mesh: Mesh, folder: CheckpointFolder, run_dir: Path, bus: Bus
) -> list[_WrongTensor]:
    """This rank's tensors that are others than in the checkpoint, the newest one of the run in
    `run_dir`. Collective."""
    restored = _build_state(job, plan, mesh)
    restored.restore(folder, phases=PhaseTimer())
    expected = [shard.tensor.clone() for _, shard in _list_shards(restored)]
    del restored
    state = _build_state(job, plan, mesh)
    drawn = [shard.tensor.clone() for _, shard in _list_shards(state)]
    # The run, of which the newest checkpoint is to be chosen.
    fill_model_with_initial_weights({"checkpoint": str(run_dir)}, job.model, state, bus)
    wrong: list[_WrongTensor] = []
    for (name, shard), reference, before in zip(_list_shards(state), expected, drawn, strict=True):
        if torch.equal(shard.tensor, reference):
            continue
        off = (shard.tensor.double() - reference.double()).norm() / reference.double().norm()
        stays = torch.equal(shard.tensor, before)
        wrong.append(_WrongTensor(name, float(off), describe_held_part(shard), stays))
    return wrong


def _list_shards(state: TrainState) -> list[tuple[str, LogicalShard]]:
    """This rank's parts of parameters and buffers, then of what the optimizer updates, which may be
    copies."""
    return [*state.model.shards().items(), *state.model.trained_shards().items()]


def _build_state(job: Job, plan: Plan, mesh: Mesh) -> TrainState:
    """A state of step 0 with weights of its own, in float64 as the row's run."""
    module, _ = build_original_module(job, plan, "float64", materialize=False)
    return build_training_state(job, plan, mesh, PhaseTimer(), module=module)


def _add_first_difference(row: Row, first: Difference) -> Row:
    errors = {**row.errors, "initial": first.error}
    return replace(row, ok=False, first=first, errors=errors)
