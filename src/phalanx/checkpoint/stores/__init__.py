"""Where checkpoints are kept: one module is one kind of place.

`open_store` chooses by the URL. Torch-free.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from phalanx.checkpoint.folder import STEP_NAME, Folder, LocalFolder
from phalanx.checkpoint.manifest import MANIFEST, read_manifest
from phalanx.checkpoint.stores.local import LocalStore
from phalanx.checkpoint.stores.protocol import Draft, Store
from phalanx.core.errors import CheckpointError
from phalanx.core.files import read_json
from phalanx.core.secrets import secret_problem
from phalanx.core.store_urls import local_directory, refusal

__all__ = [
    "Draft",
    "Store",
    "find_checkpoint",
    "is_checkpoint",
    "is_url",
    "newest_step",
    "open_store",
    "run_at",
    "store_of",
]

Say = Callable[[str], None]


def open_store(run_dir: Path, url: str | None, *, say: Say = lambda text: None) -> Store:
    """The store of a run: under its own directory, or at `url` (s3://bucket/path,
    file:///data/run-7, ...).

    `say` gets a line each time something had to be tried again. Raises CheckpointError for a URL
    that cannot be used.
    """
    if url is None:
        return LocalStore(run_dir / "checkpoints")
    if (directory := local_directory(url)) is not None:
        return LocalStore(directory)
    from phalanx.checkpoint.stores.object import ObjectStore

    return ObjectStore.open(url, say=say)


def is_url(place: str | Path) -> bool:
    return "://" in str(place)


def run_at(place: str | Path) -> str | Path:
    """The run directory that is meant by a file:// URL of one, or by its own folder of
    checkpoints; else `place`."""
    path = local_directory(str(place))
    if path is None and is_url(place):
        return place
    path = path or Path(place)
    with suppress(OSError):
        if (path / "job.json").is_file():
            return path
        above = path.absolute().parent
        if (
            path.name == "checkpoints"
            and (above / "job.json").is_file()
            and _url_in_job(above) is None
        ):
            return above
    return place


def store_of(place: str | Path) -> Store:
    """The store of a run directory, whatever its job says of checkpoints, or the one at a URL."""
    place = run_at(place)
    if is_url(place):
        return open_store(Path(), str(place))
    url = _url_in_job(Path(place))
    if url is not None:
        _require_usable(url, Path(place) / "job.json")
    return open_store(Path(place), url)


def _require_usable(url: str, job_file: Path) -> None:
    """As when the job was loaded: since then anybody may have written into the file, or given us
    the directory."""
    refused = refusal(url, in_job=True)
    why = refused.what if refused else secret_problem("", url, os.environ)
    if why:
        raise CheckpointError(
            "its checkpoint.url cannot be used", where=str(job_file), why=f"it {why}"
        )


def _url_in_job(run_dir: Path) -> str | None:
    try:
        url = read_json(run_dir / "job.json")["checkpoint"]["url"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return url if isinstance(url, str) else None


def newest_step(store: Store) -> int:
    """The step of the newest checkpoint whose manifest can be read; 0 if there is none, or no
    answer of the store."""
    try:
        folders = store.folders()
    except (OSError, CheckpointError):
        return 0
    for folder in reversed(folders):
        with suppress(CheckpointError):
            read_manifest(folder)
            return folder.step
    return 0


def is_checkpoint(place: str | Path) -> bool:
    """True if `place` is one checkpoint and not a run.

    A step-N in a folder "checkpoints" is one, whole or not.
    """
    directory = local_directory(str(place))
    if directory is None and is_url(place):
        from phalanx.checkpoint.stores.object import folder_at

        return folder_at(str(place)) is not None
    path = directory or Path(place)
    return (path / MANIFEST).is_file() or (
        path.parent.name == "checkpoints" and bool(STEP_NAME.fullmatch(path.name))
    )


def find_checkpoint(place: str | Path) -> Folder:
    """One checkpoint: the folder at `place`, or the newest of the run that is there.

    Raises CheckpointError.
    """
    directory = local_directory(str(place))
    if directory is None and is_url(place):
        from phalanx.checkpoint.stores.object import folder_at

        if (found := folder_at(str(place))) is not None:
            return found
    elif is_checkpoint(place):
        return LocalFolder(directory or Path(place))
    folders = store_of(place).folders()
    if not folders:
        fix = "give a run that has saved, a checkpoint's directory, or the URL of either"
        raise CheckpointError("no checkpoint is there", where=str(place), fix=fix)
    return folders[-1]
