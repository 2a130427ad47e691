"""Stores of checkpoints: one module is one kind of store.

`open_store_of_run` chooses by the URL. Torch-free.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from phalanx.checkpoint.folder import STEP_FOLDER_PATTERN, CheckpointFolder, LocalCheckpointFolder
from phalanx.checkpoint.manifest import MANIFEST_FILE_NAME, Manifest, read_manifest
from phalanx.checkpoint.stores.local import LocalStore
from phalanx.checkpoint.stores.protocol import Draft, Store
from phalanx.core.errors import CheckpointError
from phalanx.core.files import read_json
from phalanx.core.secrets import explain_secret_in_job
from phalanx.core.store_urls import find_url_problem, parse_file_url_directory

__all__ = [
    "Draft",
    "Store",
    "find_checkpoint_at_or_newest",
    "is_location_of_one_checkpoint",
    "is_store_url",
    "find_newest_readable_manifest",
    "find_newest_readable_step",
    "open_store_of_run",
    "find_run_directory",
    "open_store_of_location",
]

ReportRetry = Callable[[str], None]


def open_store_of_run(
    run_dir: Path,
    url: str | None,
    *,
    say: ReportRetry = lambda text: None,
    on_work: Callable[[], None] = lambda: None,
) -> Store:
    """The store of a run: under its own directory, or at `url` (s3://bucket/path,
    file:///data/run-7, ...).

    `say` gets a line each time something had to be tried again; `on_work` is called for each
    request or part of an upload that is done. Raises CheckpointError for a URL that cannot be used.
    """
    if url is None:
        return LocalStore(run_dir / "checkpoints")
    if (directory := parse_file_url_directory(url)) is not None:
        return LocalStore(directory)
    # Here, because a run in a directory needs none of it.
    from phalanx.checkpoint.stores.object import ObjectStore

    return ObjectStore.open(url, say=say, on_work=on_work)


def is_store_url(location: str | Path) -> bool:
    return "://" in str(location)


def find_run_directory(location: str | Path) -> str | Path:
    """The run directory that `location` means: by a file:// URL of it, or by its own folder of
    checkpoints; else `location`."""
    path = parse_file_url_directory(str(location))
    if path is None and is_store_url(location):
        return location
    path = path or Path(location)
    with suppress(OSError):
        if (path / "job.json").is_file():
            return path
        parent = path.absolute().parent
        is_run = path.name == "checkpoints" and (parent / "job.json").is_file()
        if is_run and _read_checkpoint_url_of_job(parent) is None:
            return parent
    return location


def open_store_of_location(location: str | Path) -> Store:
    """The store of a run directory, by its job's checkpoint.url, or the one at a URL."""
    location = find_run_directory(location)
    if is_store_url(location):
        return open_store_of_run(Path(), str(location))
    url = _read_checkpoint_url_of_job(Path(location))
    if url is not None:
        _require_valid_store_url(url, Path(location) / "job.json")
    return open_store_of_run(Path(location), url)


def _require_valid_store_url(url: str, job_file: Path) -> None:
    """Raise CheckpointError for a URL in job.json that no job may have.

    It was checked when the job was loaded, but the file may have been edited since, or the run
    directory may come from elsewhere.
    """
    refused = find_url_problem(url, in_job=True)
    why = refused.what if refused else explain_secret_in_job("", url, os.environ)
    if why:
        raise CheckpointError(
            "its checkpoint.url cannot be used", where=str(job_file), why=f"it {why}"
        )


def _read_checkpoint_url_of_job(run_dir: Path) -> str | None:
    try:
        url = read_json(run_dir / "job.json")["checkpoint"]["url"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if isinstance(url, str):
        return url
    return None


def find_newest_readable_step(store: Store) -> int:
    """The step of the newest checkpoint whose manifest can be read; 0 if there is none, or the
    store does not answer."""
    newest = find_newest_readable_manifest(store)
    return 0 if newest is None else newest.step


def find_newest_readable_manifest(store: Store) -> Manifest | None:
    """The manifest of the newest checkpoint that has one which can be read; None if there is none,
    or the store does not answer."""
    try:
        folders = store.folders()
    except (OSError, CheckpointError):
        return None
    for folder in reversed(folders):
        with suppress(CheckpointError):
            return read_manifest(folder)
    return None


def is_location_of_one_checkpoint(location: str | Path) -> bool:
    """True if `location` is one checkpoint and not a run.

    A step-N in a folder "checkpoints" is one, whole or not.
    """
    directory = parse_file_url_directory(str(location))
    if directory is None and is_store_url(location):
        from phalanx.checkpoint.stores.object import find_object_folder

        return find_object_folder(str(location)) is not None
    path = directory or Path(location)
    return (path / MANIFEST_FILE_NAME).is_file() or (
        path.parent.name == "checkpoints" and bool(STEP_FOLDER_PATTERN.fullmatch(path.name))
    )


def find_checkpoint_at_or_newest(location: str | Path) -> CheckpointFolder:
    """The checkpoint at `location`, or the newest one of the run there.

    Raises CheckpointError.
    """
    directory = parse_file_url_directory(str(location))
    if directory is None and is_store_url(location):
        from phalanx.checkpoint.stores.object import find_object_folder

        if (folder := find_object_folder(str(location))) is not None:
            return folder
    elif is_location_of_one_checkpoint(location):
        return LocalCheckpointFolder(directory or Path(location))
    folders = open_store_of_location(location).folders()
    if not folders:
        fix = "give a run that has saved, a checkpoint's directory, or the URL of either"
        raise CheckpointError("no checkpoint is there", where=str(location), fix=fix)
    return folders[-1]
