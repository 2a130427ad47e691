"""From a run back to a plain module: what people do with a model once it is trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from phalanx.checkpoint.best import read_best
from phalanx.checkpoint.manifest import MANIFEST, list_checkpoints, read_manifest
from phalanx.checkpoint.store import require_same_names, stage_blocks
from phalanx.checkpoint.verify import require_whole_directory
from phalanx.core.errors import CheckpointError
from phalanx.mesh.logical import module_shards


def load_weights(module: nn.Module, run_dir: str | Path, *, best: bool = False) -> int:
    """Fill parameters and buffers of `module` from a run's newest checkpoint; returns the step it was written at.

    One process, no mesh: a checkpoint knows nothing of the layout that wrote it. `best` takes the one that
    eval.keep_best kept; `run_dir` may also be one checkpoint's own directory. Nothing is unpickled, and nothing of the
    module changes unless every checksum, name and shape is right. Raises CheckpointError.
    """
    directory = _checkpoint(Path(run_dir), best)
    manifest = read_manifest(directory)
    require_whole_directory(directory, manifest)
    weights = {name: entry for name, entry in manifest.tensors.items() if not name.startswith("optim/")}
    manifest = replace(manifest, tensors=weights)
    shards, _ = module_shards(module, replica=0, num_replicas=1)
    require_same_names(directory, manifest, shards)
    staged = stage_blocks(directory, manifest, shards)
    with torch.no_grad():
        for target, source in staged:
            target.copy_(source)
    return int(manifest.step)


def _checkpoint(run_dir: Path, best: bool) -> Path:
    if (run_dir / MANIFEST).is_file():
        return run_dir
    if best:
        kept = read_best(run_dir)
        if kept is None:
            raise CheckpointError(
                "no checkpoint was kept as the best", where=str(run_dir), fix="train with eval.keep_best=true"
            )
        return run_dir / kept.checkpoint
    saved = list_checkpoints(run_dir)
    if not saved:
        raise CheckpointError("no checkpoint is there", where=str(run_dir), fix="give a directory that training wrote")
    return saved[-1]
