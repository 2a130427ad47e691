"""What model a checkpoint is of: an import says it itself, of a run the plan does. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.checkpoint.folder import Folder, LocalFolder
from phalanx.checkpoint.manifest import Manifest
from phalanx.checkpoint.stores import is_checkpoint, is_url, run_at
from phalanx.core.files import read_json
from phalanx.job.shape import ModelShape
from phalanx.plan.plan import Plan


@dataclass(frozen=True)
class Origin:
    """`seq_len`: the longest sequence it was trained on. `settings`: of the config.json that an import came with."""

    shape: ModelShape
    seq_len: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)


def origin_of(place: str, folder: Folder, manifest: Manifest) -> Origin | None:
    """None where nothing says it: a lone checkpoint in a store, or tensors that came without a config.json."""
    told = manifest.facts.get("model_shape")
    run_dir = run_of(place, folder)
    try:
        if told:
            settings = dict(manifest.facts.get("hugging_face") or {})
            return Origin(ModelShape.from_json(told), int(settings.get("max_position_embeddings") or 0), settings)
        if run_dir is None:
            return None
        plan = Plan.from_json(read_json(run_dir / "plan.json"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return Origin(plan.model_shape, plan.seq_len)


def run_of(place: str, folder: Folder) -> Path | None:
    """The run's directory: what was named, or what holds the checkpoint that was named."""
    place = str(run_at(place))
    if not is_url(place) and not is_checkpoint(place):
        return Path(place)
    return folder.path.absolute().parents[1] if isinstance(folder, LocalFolder) else None
