"""RUN/best.json: the checkpoint with the lowest held-out loss, or the best of another metric.

Torch-free. Pruning must leave this checkpoint.
"""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from phalanx.checkpoint.folder import LocalCheckpointFolder
from phalanx.checkpoint.manifest import build_checkpoint_path
from phalanx.core.disk import Disk, write_json_durably
from phalanx.core.errors import CheckpointError
from phalanx.core.files import parse_json

BEST_FILE_NAME = "best.json"


@dataclass(frozen=True)
class BestStepRecord:
    """The best step of a run: its `loss` per target over `num_targets` held-out targets.

    `checkpoint` is relative to the run directory, or a URL. `value` is that of `metric`, by which
    the step is the best.
    """

    step: int
    loss: float
    num_targets: int
    checkpoint: str
    metric: str = "loss"
    value: float = math.nan


def record_best_step(
    run_dir: Path,
    *,
    step: int,
    loss: float,
    num_targets: int,
    metric: str = "loss",
    value: float | None = None,
    checkpoint: str | None = None,
    disk: Disk | None = None,
) -> BestStepRecord:
    """Record the checkpoint of `step`, which must be saved, as the best by `metric`.

    Atomic; raises OSError. `checkpoint`: its path in the run or its URL, if that is not
    RUN/checkpoints/step-N.
    """
    checkpoint = checkpoint or str(build_checkpoint_path(run_dir, step).relative_to(run_dir))
    if value is None:
        value = loss
    best = BestStepRecord(step, loss, num_targets, checkpoint, metric, value)
    write_json_durably(disk or Disk(), run_dir / BEST_FILE_NAME, {"format": 1, **asdict(best)})
    return best


def read_best_step_to_protect(run_dir: Path) -> frozenset[int]:
    """The best step, if one is recorded: its checkpoint must stay, whatever else is removed.

    Raises CheckpointError if a record is there and cannot be read: any checkpoint may be the best.
    """
    best = read_best_step(run_dir)
    path = run_dir / BEST_FILE_NAME
    if best is None and os.path.lexists(path):
        # Once more: it may have been written in between.
        best = read_best_step(run_dir)
        if best is None:
            raise CheckpointError(
                "what the best checkpoint is cannot be read",
                where=str(path),
                fix="put it right, or remove it if no checkpoint is to be kept as the best",
            )
    if best is None:
        return frozenset()
    return frozenset((best.step,))


def read_best_step(run_dir: Path) -> BestStepRecord | None:
    """The recorded best step; None if there is none, or its file cannot be read."""
    try:
        body = parse_json(LocalCheckpointFolder(run_dir).read(BEST_FILE_NAME))
        # An older file has neither metric nor value: it went by the loss.
        metric, loss = str(body.get("metric", "loss")), float(body["loss"])
        value = float(body.get("value", loss))
        return BestStepRecord(
            int(body["step"]),
            loss,
            int(body["num_targets"]),
            str(body["checkpoint"]),
            metric,
            value,
        )
    except (OSError, ValueError, OverflowError, KeyError, TypeError, AttributeError):
        return None
