"""RUN/best.json: which checkpoint had the lowest held-out loss, or the best of another metric.

Torch-free.

Whoever removes checkpoints must leave this one.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from phalanx.checkpoint.folder import LocalFolder
from phalanx.checkpoint.manifest import checkpoint_directory
from phalanx.core.disk import Disk, write_json_durably

BEST = "best.json"


@dataclass(frozen=True)
class Best:
    """`loss` per target over `num_targets` held-out targets; `checkpoint` is relative to the run
    directory, or a URL.

    `value` is that of `metric`, by which it is the best.
    """

    step: int
    loss: float
    num_targets: int
    checkpoint: str
    metric: str = "loss"
    value: float = math.nan


def write_best(
    run_dir: Path,
    *,
    step: int,
    loss: float,
    num_targets: int,
    metric: str = "loss",
    value: float | None = None,
    place: str | None = None,
    disk: Disk | None = None,
) -> Best:
    """Name the checkpoint of `step`, which must be saved, the best by `metric`.

    Atomic; raises OSError.

    `place`: where it is, if that is not RUN/checkpoints/step-N.
    """
    place = place or str(checkpoint_directory(run_dir, step).relative_to(run_dir))
    best = Best(step, loss, num_targets, place, metric, loss if value is None else value)
    write_json_durably(disk or Disk(), run_dir / BEST, {"format": 1, **asdict(best)})
    return best


def read_best(run_dir: Path) -> Best | None:
    """What was kept as the best, or None if nothing was, or its file cannot be read."""
    try:
        body = json.loads(LocalFolder(run_dir).read(BEST))
        metric, loss = str(body.get("metric", "loss")), float(body["loss"])
        value = float(body.get("value", loss))
        return Best(
            int(body["step"]),
            loss,
            int(body["num_targets"]),
            str(body["checkpoint"]),
            metric,
            value,
        )
    except (OSError, ValueError, OverflowError, KeyError, TypeError, AttributeError):
        return None
