"""RUN/best.json: which checkpoint had the lowest held-out loss. Torch-free.

Whoever removes checkpoints must leave this one.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from phalanx.checkpoint.manifest import checkpoint_directory
from phalanx.core.files import write_json_atomic

BEST = "best.json"


@dataclass(frozen=True)
class Best:
    """`loss` per target over `num_targets` held-out targets; `checkpoint` is relative to the run directory."""

    step: int
    loss: float
    num_targets: int
    checkpoint: str


def write_best(run_dir: Path, *, step: int, loss: float, num_targets: int) -> Best:
    """Name the checkpoint of `step`, which must be saved, the best. Atomic; raises OSError."""
    best = Best(step, loss, num_targets, str(checkpoint_directory(run_dir, step).relative_to(run_dir)))
    write_json_atomic(run_dir / BEST, {"format": 1, **asdict(best)})
    return best


def read_best(run_dir: Path) -> Best | None:
    """What was kept as the best, or None if nothing was, or its file cannot be read."""
    try:
        body = json.loads((run_dir / BEST).read_text(encoding="utf-8"))
        return Best(int(body["step"]), float(body["loss"]), int(body["num_targets"]), str(body["checkpoint"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
