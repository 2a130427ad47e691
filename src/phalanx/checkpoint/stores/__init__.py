"""Where checkpoints are kept: one module is one kind of place. `open_store` chooses by the URL. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from phalanx.checkpoint.folder import STEP_NAME, Folder, LocalFolder
from phalanx.checkpoint.manifest import MANIFEST
from phalanx.checkpoint.stores.local import LocalStore
from phalanx.checkpoint.stores.protocol import Draft, Store
from phalanx.core.errors import CheckpointError

__all__ = ["Draft", "Store", "find_checkpoint", "is_checkpoint", "is_url", "newest_step", "open_store", "store_of"]

Say = Callable[[str], None]


def open_store(run_dir: Path, url: str | None, *, say: Say = lambda text: None) -> Store:
    """The store of a run: under its own directory, or at `url` (anything fsspec opens: s3://bucket/path, ...).

    `say` gets a line each time something had to be tried again. Raises CheckpointError for a URL that cannot be used.
    """
    if url is None:
        return LocalStore(run_dir / "checkpoints")
    from phalanx.checkpoint.stores.object import ObjectStore

    return ObjectStore.open(url, say=say)


def is_url(place: str | Path) -> bool:
    return "://" in str(place)


def store_of(place: str | Path) -> Store:
    """The store of a run directory, whatever its job says of checkpoints, or the one at a URL."""
    if is_url(place):
        return open_store(Path(), str(place))
    return open_store(Path(place), _url_in_job(Path(place)))


def _url_in_job(run_dir: Path) -> str | None:
    try:
        url = json.loads((run_dir / "job.json").read_text(encoding="utf-8"))["checkpoint"]["url"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return url if isinstance(url, str) else None


def newest_step(store: Store) -> int:
    """The step of the newest committed checkpoint; 0 if there is none, or the store does not answer."""
    try:
        return max((folder.step for folder in store.folders()), default=0)
    except (OSError, CheckpointError):
        return 0


def is_checkpoint(place: str | Path) -> bool:
    """True if `place` is one checkpoint and not a run. A step-N in a folder "checkpoints" is one, whole or not."""
    if is_url(place):
        from phalanx.checkpoint.stores.object import folder_at

        return folder_at(str(place)) is not None
    path = Path(place)
    return (path / MANIFEST).is_file() or (path.parent.name == "checkpoints" and bool(STEP_NAME.fullmatch(path.name)))


def find_checkpoint(place: str | Path) -> Folder:
    """One checkpoint: the folder at `place`, or the newest of the run that is there. Raises CheckpointError."""
    if is_url(place):
        from phalanx.checkpoint.stores.object import folder_at

        if (found := folder_at(str(place))) is not None:
            return found
    elif is_checkpoint(place):
        return LocalFolder(Path(place))
    folders = store_of(place).folders()
    if not folders:
        fix = "give a run that has saved, a checkpoint's directory, or the URL of either"
        raise CheckpointError("no checkpoint is there", where=str(place), fix=fix)
    return folders[-1]
