"""A rank's part of `model.init_from`: read its own ranges of the weights, verified, at whatever layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.checkpoint.agree import agreed
from phalanx.checkpoint.load import load
from phalanx.checkpoint.stores import find_checkpoint
from phalanx.job.schema import Model
from phalanx.mesh.mesh import Mesh
from phalanx.observe.bus import Bus
from phalanx.observe.events import WeightsTaken
from phalanx.run.initial import read_initial
from phalanx.train.state import TrainState


def find_initial_weights(mesh: Mesh, run_dir: Path) -> dict[str, Any] | None:
    """What was decided of the weights that the run in `run_dir` starts from; None where it starts from random ones.

    Collective. It is rank 0's to read: a shared file system may show each rank another one.
    """
    with agreed(mesh, str(run_dir), "reading where to start") as outcome:
        outcome["mine"] = read_initial(run_dir) if mesh.rank == 0 else None
    initial: dict[str, Any] | None = outcome["all"][0]
    return initial


def take_initial_weights(initial: Mapping[str, Any], model: Model, state: TrainState, bus: Bus) -> None:
    """Fill the model of a run at step 0 with the weights that `find_initial_weights` found.

    Collective. Raises CheckpointError unless every tensor of the model is among them.
    """
    mesh = state.model.mesh
    folder, shards = find_checkpoint(initial["checkpoint"]), state.model.shards()
    manifest = load(folder, shards, group=mesh, phases=state.model.phases, cast=model.init_cast, weights_only=True)
    state.model.refresh()
    cast = [name for name, shard in shards.items() if manifest.tensors[name].dtype != shard.dtype]
    if mesh.layout.pp > 1:  # each stage knows of its own tensors
        cast = [name for names in mesh.gather_json(cast) for name in names]
    if mesh.rank == 0:
        num_cast, came_from = len(set(cast)), initial.get("imported_from", "")
        bus.emit(WeightsTaken(folder.url, manifest.step, len(manifest.tensors), came_from, num_cast))
