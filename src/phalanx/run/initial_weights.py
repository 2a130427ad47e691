"""`model.init_from`: which weights a run starts from, decided and checked once, before there are
ranks.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.checkpoint.exchange.settings import normalize_shape_for_inference
from phalanx.checkpoint.folder import CheckpointFolder
from phalanx.checkpoint.manifest import Manifest, read_manifest
from phalanx.checkpoint.reading.mismatch import (
    ExpectedShapeAndDtype,
    MismatchError,
    find_tensor_mismatches,
)
from phalanx.checkpoint.reading.origin import find_model_of_checkpoint
from phalanx.checkpoint.reading.verify import require_files_of_manifest
from phalanx.checkpoint.stores import find_checkpoint_at_or_newest, is_store_url
from phalanx.core.errors import CheckpointError
from phalanx.core.files import read_json
from phalanx.core.places import expand_home
from phalanx.job.costs import ModelCosts
from phalanx.job.model import build_model_shape, find_vocab_size_of
from phalanx.job.schema import Job, Model
from phalanx.job.shapes.transformer import TransformerShape

# In the run directory: what was decided, for every attempt.
INIT_FILE_NAME = "init.json"
MASTER_WEIGHT_DTYPE = "float32"


@dataclass(frozen=True)
class InitialWeights:
    """`checkpoint` is an absolute path or a URL; `imported_from` what an import came from.

    `differences`: what the weights were made for and this model computes otherwise, though every
    tensor fits.
    """

    checkpoint: str
    step: int
    num_tensors: int
    dtypes: tuple[str, ...]
    imported_from: str = ""
    differences: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def summary_lines(self) -> list[str]:
        """Lines for the person who starts the run."""
        came, cast = f", step {self.step}", ""
        if self.imported_from:
            # The steps of imported weights are not known.
            came = f", imported from {self.imported_from}"
        if self.dtypes != (MASTER_WEIGHT_DTYPE,):
            cast = f", rounded to {MASTER_WEIGHT_DTYPE}"
        kinds = " and ".join(self.dtypes)
        first = f"init    {self.num_tensors} tensors of {kinds}{cast} from {self.checkpoint}{came}"
        return [first, *(f"warn    the weights were made for {text}" for text in self.differences)]


def find_initial_checkpoint(model: Model, shape: ModelCosts | None) -> InitialWeights | None:
    """Find the checkpoint that `model.init_from` names, and check it; None without that key.

    `shape` is None where the model is not known yet.

    Raises CheckpointError if there is no checkpoint, MismatchError if it is not one of this model's
    weights.
    """
    if model.init_from is None:
        return None
    location = model.init_from
    if not is_store_url(location):
        # Absolute: whoever continues the run may stand elsewhere.
        location = str(expand_home(location).absolute())
    folder = _find_checkpoint_folder(location)
    manifest = read_manifest(folder).keep_model_tensors()
    require_files_of_manifest(folder, manifest)
    differences: tuple[str, ...] = ()
    if isinstance(shape, TransformerShape):
        _require_fitting_weights(folder, manifest, shape, model.init_cast)
        origin = find_model_of_checkpoint(location, folder, manifest)
        if origin is not None and isinstance(origin.shape, TransformerShape):
            # Every tensor fits, and yet another rope base, say, would make another model of it.
            differences = _list_model_setting_differences(origin.shape, shape)
    dtypes = tuple(sorted({tensor.dtype for tensor in manifest.tensors.values()}))
    came_from = str(manifest.facts.get("imported_from") or "")
    return InitialWeights(
        folder.url, manifest.step, len(manifest.tensors), dtypes, came_from, differences
    )


def find_shape_known_before_data(job: Job) -> ModelCosts | None:
    """The model's shape before the data is known; None if it depends on the data, or for a
    user's module."""
    if job.model.is_foreign:
        return None
    vocab_size = find_vocab_size_of(job.model)
    shape = build_model_shape(job, vocab_size or 1)
    if vocab_size or shape.reads_images:
        return shape
    return None


def _find_checkpoint_folder(location: str) -> CheckpointFolder:
    if not is_store_url(location) and (Path(location) / "config.json").is_file():
        fix = f"phalanx checkpoint import {location} --out DIR makes a checkpoint of it"
        raise CheckpointError(
            "model.init_from is a Hugging Face directory", where=location, fix=fix
        )
    return find_checkpoint_at_or_newest(location)


def _require_fitting_weights(
    folder: CheckpointFolder, manifest: Manifest, shape: TransformerShape, cast: bool
) -> None:
    tensors = {
        name: ExpectedShapeAndDtype(size, MASTER_WEIGHT_DTYPE)
        for name, size in shape.list_stored_tensors().items()
    }
    misfits = find_tensor_mismatches(tensors, manifest.tensors, cast=cast)
    if not misfits:
        return
    fix = "[model] must have the widths of the weights"
    if all(misfit.kind == "dtype" for misfit in misfits):
        fix = "model.init_cast=true rounds them"
    message = "the weights of model.init_from do not fit the model"
    raise MismatchError(message, misfits, where=folder.url, fix=fix)


def _list_model_setting_differences(
    made_for: TransformerShape, shape: TransformerShape
) -> tuple[str, ...]:
    """Settings that the weights were made for and that the model has otherwise, though every
    tensor fits."""
    was, now = (
        normalize_shape_for_inference(made_for).to_json(),
        normalize_shape_for_inference(shape).to_json(),
    )
    differences = []
    for key in was:
        if was[key] != now[key]:
            differences.append(f"{key} {was[key]}, and model.{key} is {now[key]}")
    return tuple(differences)


def read_initial_weights(run_dir: Path) -> Mapping[str, Any] | None:
    """The decision that was written for the run; None if it starts from random weights."""
    try:
        decision = read_json(run_dir / INIT_FILE_NAME)
        if not isinstance(decision, dict) or not isinstance(decision.get("checkpoint"), str):
            raise ValueError("it names no checkpoint")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            "what the run starts from cannot be read",
            where=str(run_dir / INIT_FILE_NAME),
            why=str(error),
            fix="begin a new run with model.init_from",
        ) from None
    return decision
