"""Whose an object store is: owner.json beside its checkpoints, and the same in
RUN/checkpoint-owner.json.

Torch-free.

A directory of checkpoints is locked; an object store has no lock. Two runs that begin with one
empty URL would take each other's checkpoints for their own. So a run writes down that the store is
its, reads it back, and asks again before it loads, commits or removes anything there.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from phalanx.checkpoint.folder import LocalFolder
from phalanx.checkpoint.ownership.fencing_token import Epoch
from phalanx.checkpoint.stores.protocol import OwnerObject, Store
from phalanx.core.disk import Disk, write_json_durably
from phalanx.core.errors import CheckpointError, RunLockedError, StoreTakenError
from phalanx.core.files import resource_error

KEPT = "checkpoint-owner.json"
FORMAT = 1


@dataclass(frozen=True)
class Owner:
    """A run.

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
        return {"format": FORMAT, **asdict(self)}


def claim(store: Store, run_dir: Path) -> None:
    """Write down that `store` is this run's, if nobody else did. For the holder of the run's lock.

    Raises RunLockedError if it is another run's, CheckpointError if the store does not answer,
    ResourceError if the run directory cannot be written. What an earlier job of the run wrote
    stays, also if the directory has moved since.
    """
    if store.owner is None:
        return
    ours = _kept(run_dir) or _keep_new(run_dir)
    if store.owner.read() is None:
        store.owner.write(json.dumps(ours.to_json(), sort_keys=True).encode())
    if (refusal := refusal_of(store, run_dir)) is not None:
        raise refusal


def release(store: Store, run_dir: Path) -> None:
    """The run has not begun after all: as if it had never claimed. Never raises."""
    if store.owner is None:
        return
    with suppress(OSError, CheckpointError):
        if _is_ours(store.owner, _kept(run_dir)):
            store.owner.remove()
    with suppress(OSError):
        (run_dir / KEPT).unlink(missing_ok=True)


def refusal_of(store: Store, run_dir: Path) -> RunLockedError | None:
    """Why this run must leave `store` alone; None if it is its own, or nobody has claimed it.

    Raises CheckpointError.

    A run that never claimed a store (of an earlier version, or whose URL is new) has none of its
    own either.
    """
    said = store.owner.read() if store.owner is not None else None
    if store.owner is None or said is None or _is_ours(store.owner, _kept(run_dir)):
        return None
    theirs = _parsed(said)
    fix = (
        f"choose another checkpoint.url; if that run is known to be gone, remove {store.owner.url}"
    )
    whose = str(theirs) if theirs else "another run, whose name cannot be read"
    return RunLockedError(f"checkpoint.url belongs to {whose}", where=store.url, fix=fix)


def require_claim(epoch: Epoch | None, store: Store) -> None:
    """Raise RunTakenError if another job took the run of `epoch` since, StoreTakenError if
    another run its store."""
    if epoch is None:
        return
    epoch.require_newest()
    if (refusal := refusal_of(store, epoch.run_dir)) is not None:
        raise StoreTakenError(refusal.what, where=refusal.where, fix=refusal.fix)


def _is_ours(there: OwnerObject, ours: Owner | None) -> bool:
    said = there.read()
    theirs = _parsed(said) if said is not None else None
    return ours is not None and theirs is not None and ours.run_id == theirs.run_id


def _kept(run_dir: Path) -> Owner | None:
    """What the run's directory says; None if it never claimed a store.

    Raises CheckpointError for a damaged file.
    """
    try:
        owner, why = _parsed(LocalFolder(run_dir).read(KEPT)), "it does not say whose"
    except FileNotFoundError:
        return None
    except OSError as error:
        owner, why = None, str(error.strerror)
    if owner is None:
        fix = "if the store is this run's, put a copy of the store's owner.json there"
        raise CheckpointError(
            "whose the checkpoints are cannot be read", where=str(run_dir / KEPT), why=why, fix=fix
        )
    return owner


def _keep_new(run_dir: Path) -> Owner:
    owner = Owner(
        secrets.token_hex(16), run_dir.resolve().name, socket.gethostname(), round(time.time(), 3)
    )
    try:
        write_json_durably(Disk(), run_dir / KEPT, owner.to_json())
    except OSError as error:
        raise resource_error(error, "taking the store of checkpoints", run_dir / KEPT) from None
    return owner


def _parsed(text: bytes) -> Owner | None:
    """None for what no claim wrote: of another format, or not fit to be shown to people."""
    try:
        body = json.loads(text)
        names = [str(body[key]) for key in ("run_id", "run", "host")]
        owner = Owner(names[0], names[1], names[2], float(body["since_unix_s"]))
        return (
            owner
            if body["format"] == FORMAT and all(map(str.isprintable, names)) and str(owner)
            else None
        )
    except (ValueError, OverflowError, OSError, KeyError, TypeError):
        return None
