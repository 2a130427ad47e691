"""Loads weights of a run into a plain module."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from phalanx.checkpoint.manifest import read_manifest
from phalanx.checkpoint.reading.choose import find_newest_or_best_checkpoint
from phalanx.checkpoint.reading.load import (
    read_overlapping_blocks,
    require_checkpoint_of_same_tensors,
)
from phalanx.checkpoint.reading.verify import require_files_of_manifest
from phalanx.mesh.logical import collect_module_shards


def load_weights(
    module: nn.Module, run_dir: str | Path, *, best: bool = False, cast: bool = False
) -> int:
    """Fill parameters and buffers of `module` from a run's newest checkpoint; returns the step it
    was written at.

    One process, no mesh: a checkpoint knows nothing of the layout that wrote it. `best` takes the
    one that eval.keep_best kept; `run_dir` may also be one checkpoint's own directory, what
    `phalanx checkpoint import` wrote, or the URL of either. `cast` takes floating-point numbers of
    another type as they come. Nothing is unpickled, and nothing of the module changes unless every
    checksum, name and shape is right. Raises CheckpointError, with a table of what does not fit.
    """
    folder = find_newest_or_best_checkpoint(run_dir, best=best)
    manifest = read_manifest(folder).keep_model_tensors()
    require_files_of_manifest(folder, manifest)
    shards, _ = collect_module_shards(module)
    require_checkpoint_of_same_tensors(folder, manifest, shards, cast=cast)
    staged = read_overlapping_blocks(folder, manifest, shards)
    with torch.no_grad():
        for target, source in staged:
            target.copy_(source)
    return int(manifest.step)
