"""The owner of an object store: owner.json beside its checkpoints, and the same in
RUN/checkpoint-owner.json.

Torch-free.

A directory of checkpoints is locked; an object store has no lock. Two runs that begin with one
empty URL would take each other's checkpoints for their own. So a run claims the store in a file,
reads it back, and reads it again before it loads, commits or removes anything there.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from phalanx.checkpoint.folder import LocalCheckpointFolder
from phalanx.checkpoint.ownership.fencing_token import FencingToken
from phalanx.checkpoint.ownership.run_lock import read_locked_epoch
from phalanx.checkpoint.stores.protocol import Store, StoreOwnerRecord
from phalanx.core.disk import Disk, write_json_durably
from phalanx.core.disk_errors import build_path_resource_error
from phalanx.core.errors import CheckpointError, RunLockedError, StoreTakenError
from phalanx.core.printable import printable

OWNER_COPY_FILE_NAME = "checkpoint-owner.json"
OWNER_FORMAT_VERSION = 1


@dataclass(frozen=True)
class StoreOwner:
    """The run that a store belongs to.

    `run_id` is random and goes where its directory goes; `run`, `host` and the time are for people.
    """

    run_id: str
    run: str
    host: str
    since_unix_s: float

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since_unix_s))
        return f"the run {self.run!r} of {self.host} since {since}"

    def to_json(self) -> dict[str, object]:
        return {"format": OWNER_FORMAT_VERSION, **asdict(self)}


def claim_store(store: Store, run_dir: Path) -> None:
    """Claim `store` for this run, unless a run has claimed it. For the holder of the run's lock.

    Raises RunLockedError if it is another run's, CheckpointError if the store does not answer,
    ResourceError if the run directory cannot be written. An earlier job's claim of the same run
    stays, also if the directory has moved since.
    """
    if store.owner is None:
        return
    # The run's copy first: a claim in the store without one would be nobody's.
    run_owner = _read_owner_copy_in_run(run_dir) or _write_owner_copy_in_run(run_dir)
    # The owner is read back below: two runs that write at once both read the one that stayed.
    if store.owner.read() is None:
        store.owner.write(json.dumps(run_owner.to_json(), sort_keys=True).encode())
    if (refusal := find_store_refusal_reason(store, run_dir)) is not None:
        raise refusal


def release_store(store: Store, run_dir: Path) -> None:
    """Take the run's claim back, as if it had never been: the run has not begun after all.

    Never raises. Where the store does not answer, the run's copy stays: a run that begins in this
    directory later has the claim.
    """
    if store.owner is None:
        return
    with suppress(OSError, CheckpointError):
        if _is_same_run_owner(store.owner, _read_owner_copy_in_run(run_dir)):
            store.owner.remove()
        # Last: without it the run could not tell that the store is its own.
        (run_dir / OWNER_COPY_FILE_NAME).unlink(missing_ok=True)


def find_store_refusal_reason(store: Store, run_dir: Path) -> RunLockedError | None:
    """The reason why this run must leave `store` alone; None if it is its own, or unclaimed.

    A run that never claimed a store (of an earlier version, or whose URL is new) has none of its
    own either. Raises CheckpointError.
    """
    if store.owner is None:
        return None
    text = store.owner.read()
    if text is None or _is_same_run_owner(store.owner, _read_owner_copy_in_run(run_dir)):
        return None
    owner = _parse_store_owner(text) or "another run, whose name cannot be read"
    fix = (
        f"choose another checkpoint.url; if that run is known to be gone, remove {store.owner.url}"
    )
    return RunLockedError(f"checkpoint.url belongs to {owner}", where=store.url, fix=fix)


def require_still_owner_of_run_and_store(fencing_token: FencingToken | None, store: Store) -> None:
    """Raise RunTakenError if another job took the run of `fencing_token` since, StoreTakenError if
    another run its store."""
    if fencing_token is None:
        return
    # The lock names the job's epoch, too.
    known = read_locked_epoch(fencing_token.run_dir)
    fencing_token.require_newest_token(if_damaged=known)
    if (refusal := find_store_refusal_reason(store, fencing_token.run_dir)) is not None:
        raise StoreTakenError(refusal.what, where=refusal.where, fix=refusal.fix)


def _is_same_run_owner(owner_object: StoreOwnerRecord, run_owner: StoreOwner | None) -> bool:
    text = owner_object.read()
    if text is None or run_owner is None:
        return False
    store_owner = _parse_store_owner(text)
    return store_owner is not None and run_owner.run_id == store_owner.run_id


def _read_owner_copy_in_run(run_dir: Path) -> StoreOwner | None:
    """The owner by the run's directory; None if it never claimed a store.

    Raises CheckpointError for a damaged file.
    """
    try:
        owner, why = (
            _parse_store_owner(LocalCheckpointFolder(run_dir).read(OWNER_COPY_FILE_NAME)),
            "it does not say whose",
        )
    except FileNotFoundError:
        return None
    except OSError as error:
        owner, why = None, str(error.strerror)
    if owner is None:
        raise CheckpointError(
            "whose the checkpoints are cannot be read",
            where=str(run_dir / OWNER_COPY_FILE_NAME),
            why=why,
            fix="if the store is this run's, put a copy of the store's owner.json there",
        )
    return owner


def _write_owner_copy_in_run(run_dir: Path) -> StoreOwner:
    # A name may hold any letter, and is shown on the terminals of others.
    run, host = printable(run_dir.resolve().name), printable(socket.gethostname())
    owner = StoreOwner(secrets.token_hex(16), run, host, round(time.time(), 3))
    try:
        write_json_durably(Disk(), run_dir / OWNER_COPY_FILE_NAME, owner.to_json())
    except OSError as error:
        path = run_dir / OWNER_COPY_FILE_NAME
        raise build_path_resource_error(error, "taking the store of checkpoints", path) from None
    return owner


def _parse_store_owner(text: bytes) -> StoreOwner | None:
    """The owner in `text`; None for text that no claim wrote: of another format, or without a
    run_id that can be one."""
    try:
        body = json.loads(text)
        run_id = str(body["run_id"])
        # Words for people decide nothing, and are made fit to be shown.
        run, host = printable(str(body["run"])), printable(str(body["host"]))
        owner = StoreOwner(run_id, run, host, float(body["since_unix_s"]))
        # It raises for a time that is none.
        str(owner)
        if body["format"] == OWNER_FORMAT_VERSION and run_id and run_id.isprintable():
            return owner
    except (ValueError, OverflowError, OSError, KeyError, TypeError):
        pass
    return None
