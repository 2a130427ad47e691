"""The run and the model that a checkpoint comes from. An import records its model, a run its plan.
Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.checkpoint.folder import CheckpointFolder, LocalCheckpointFolder
from phalanx.checkpoint.manifest import Manifest
from phalanx.checkpoint.stores import (
    find_run_directory,
    is_location_of_one_checkpoint,
    is_store_url,
)
from phalanx.job.costs import ModelCosts
from phalanx.job.shapes.stored import parse_stored_shape
from phalanx.plan.stored_plan import read_stored_plan_or_none


@dataclass(frozen=True)
class ModelOfCheckpoint:
    """The model of a checkpoint. `seq_len`: the longest sequence it was trained on, 0 if that is
    not known.

    `settings` are those of the config.json that an import came with.
    """

    shape: ModelCosts
    seq_len: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)


def find_model_of_checkpoint(
    location: str, folder: CheckpointFolder, manifest: Manifest
) -> ModelOfCheckpoint | None:
    """The model that the checkpoint in `folder`, which was opened by `location`, comes from.

    None if nothing says it: a lone checkpoint in a store, or tensors that came without a
    config.json.
    """
    shape_facts = manifest.facts.get("model_shape")
    run_dir = find_run_directory_of_checkpoint(location, folder)
    try:
        if shape_facts:
            settings = dict(manifest.facts.get("hugging_face") or {})
            seq_len = int(settings.get("max_position_embeddings") or 0)
            return ModelOfCheckpoint(parse_stored_shape(shape_facts), seq_len, settings)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if run_dir is None:
        return None
    # A plan that is gone, or of another release: the checkpoint can be read without it.
    plan = read_stored_plan_or_none(run_dir / "plan.json")
    if plan is None:
        return None
    return ModelOfCheckpoint(plan.model_shape, plan.seq_len)


def find_run_directory_of_checkpoint(location: str, folder: CheckpointFolder) -> Path | None:
    """The run's directory: `location` itself, or the directory that holds the checkpoint. None in a
    store elsewhere.
    """
    location = str(find_run_directory(location))
    if not is_store_url(location) and not is_location_of_one_checkpoint(location):
        return Path(location)
    if isinstance(folder, LocalCheckpointFolder):
        # The folder is RUN/checkpoints/step-N.
        return folder.path.absolute().parents[1]
    return None
