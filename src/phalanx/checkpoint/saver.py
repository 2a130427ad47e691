"""Saving beside training: a copy of the state is taken between two steps, and a thread writes it.

The thread's collectives go through a process group of its own, so that they never meet training's. One save is in
flight at a time. A rank's `votes` travel in the reduction of each step, so that all ranks see a save end at the same
step. An error of the thread is never lost: a CheckpointError (a full disk) is an event and a vote, and anything else
is raised in training.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from phalanx.checkpoint.agree import agreed
from phalanx.checkpoint.epoch import Epoch
from phalanx.checkpoint.folder import place_in_run
from phalanx.checkpoint.retention import Retention, prune
from phalanx.checkpoint.save import Saved, owned, save
from phalanx.checkpoint.staging import Staging
from phalanx.checkpoint.stores.protocol import Store
from phalanx.core.errors import CheckpointError
from phalanx.core.phases import Phases
from phalanx.mesh.logical import LogicalShard
from phalanx.mesh.mesh import Mesh
from phalanx.observe.bus import Bus
from phalanx.observe.events import CheckpointFailed, CheckpointSaved, CheckpointsRemoved, Event, Note

NICENESS = 5  # a third of the share of a core that a thread of training has


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint of `step` holds. Its tensors are those of training."""

    step: int
    shards: Mapping[str, LogicalShard]
    aliases: Mapping[str, str]
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Cost:
    """Seconds that training stood still for a save, and seconds until it was committed."""

    stall_s: float
    wall_s: float


@dataclass(frozen=True)
class Target:
    """Where the checkpoints of a run go, and which of them stay. `kept` names steps that retention never removes."""

    store: Store
    job_digest: str
    run_dir: Path
    epoch: Epoch | None = None
    incremental: bool = True
    keep_last: int | None = None
    keep_every: int | None = None
    kept: Callable[[], frozenset[int]] = frozenset


class _HurriedError(Exception):
    """Training stops, and nobody has time for old checkpoints."""


class _Flight:
    """A thread of this rank that saves, or tidies up, while training goes on."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.failed = False
        self.crash: BaseException | None = None
        self.in_haste = threading.Event()
        self._work = work
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="phalanx-save", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return self._is_done.is_set()

    def join(self, timeout_s: float | None = None) -> None:
        self._is_done.wait(timeout_s)

    def _run(self) -> None:
        try:
            _step_back()
            self._work()
        except CheckpointError:  # told where it was caught
            self.failed = True
        except BaseException as crash:
            self.crash = crash
        finally:
            self._is_done.set()


def _step_back() -> None:
    """Where cores are short, training's threads come first. Of a thread alone only Linux can be told that."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class Saver:
    """Writes Snapshots to a Target: `begin` leaves it to a thread, `save` waits. Both are collective.

    `phases` are those of training. Rank 0 says on `bus` what was saved, what failed and what was removed.
    """

    def __init__(
        self,
        target: Target,
        mesh: Mesh,
        bus: Bus,
        phases: Phases,
        *,
        asynchronous: bool = True,
        timeout_s: float = 600.0,
    ) -> None:
        self.asynchronous = asynchronous
        self.last_cost: Cost | None = None
        self._target, self._mesh, self._bus, self._phases = target, mesh, bus, phases
        self._timeout_s = timeout_s
        self._staging = Staging(mesh.device)
        self._beside: Mesh | None = None
        self._flight: _Flight | None = None

    @property
    def staging_bytes(self) -> int:
        """Host memory that this rank holds for copies."""
        return self._staging.num_bytes

    def votes(self) -> tuple[float, float]:
        """Whether this rank's thread is at work, and whether its save failed; to be summed over the ranks.

        Raises here, on this rank alone, what ended the thread and was no CheckpointError.
        """
        flight = self._flight
        if flight is None:
            return 0.0, 0.0
        if not flight.is_done:
            return 1.0, 0.0
        self._raise_crash(flight)
        return 0.0, float(flight.failed)

    def wait(self, *, in_haste: bool = False) -> bool:
        """Until this rank's thread is done. True if its save failed; raises as `votes` does.

        In haste the removal of old checkpoints, which first reads a whole one, is left to the next save.
        """
        flight = self._flight
        if flight is None:
            return False
        if in_haste:
            flight.in_haste.set()
        if not flight.is_done:
            with self._phases("ckpt_write", "wait for the save in flight"):
                flight.join()
        self._raise_crash(flight)
        return flight.failed

    def land(self) -> None:
        """Forget a flight that is over on all ranks."""
        assert self._flight is None or self._flight.is_done
        self._flight = None

    def leave(self, timeout_s: float) -> None:
        """Training ends by an error: let the save in flight end if it can. Never raises."""
        flight = self._flight
        if flight is None:
            return
        flight.join(timeout_s)
        why = ""
        if not flight.is_done:
            why = f"training ended by an error, and the save in flight was not done {timeout_s:g} s later"
        elif flight.crash is not None:
            why = f"training ended by an error, and the save in flight by {type(flight.crash).__name__}: {flight.crash}"
        if why:
            self._tell(Note("save_left_behind", {"why": why}))

    def begin(self, snapshot: Snapshot, *, record: Callable[[], None], waited_s: float = 0.0) -> bool:
        """Copy the state and write it beside training. False, with nothing done, if a rank has no memory for that.

        `record` is called before the thread starts, so that what it records is there before the checkpoint is. Raises
        CheckpointError on every rank if there is something that cannot be saved.
        """
        assert self._flight is None, "one save at a time"
        began = time.perf_counter() - waited_s
        with self._phases("ckpt_stage"):
            staged = self._staged(snapshot)
        if staged is None:
            return False
        stall_s = time.perf_counter() - began
        record()
        flight = self._flight = _Flight(lambda: self._write(staged, began, stall_s))
        flight.start()
        return True

    def save(self, snapshot: Snapshot, *, record: Callable[[], None], tidy: bool = True) -> None:
        """Save while training waits. No thread may be at work. Raises CheckpointError on every rank."""
        assert self._flight is None, "one save at a time"
        began = time.perf_counter()
        saved = self._save(snapshot, self._mesh, self._phases, record)
        wall_s = time.perf_counter() - began
        self._saved(snapshot.step, saved, Cost(wall_s, wall_s))
        if tidy and self._target.keep_last is not None and self._mesh.rank == 0:
            self._flight = _Flight(self._tidy)
            self._flight.start()

    def _staged(self, snapshot: Snapshot) -> Snapshot | None:
        if self._beside is None:
            self._beside = self._mesh.open_beside(timeout_s=self._timeout_s)
        mine: dict[str, LogicalShard] = {}
        problem: CheckpointError | MemoryError | None = None
        try:
            mine = owned(snapshot.shards)
            self._staging.reserve(mine)
        except (CheckpointError, MemoryError) as error:
            problem = error
        if self._is_anywhere(problem is not None):
            self._give_up_copy(snapshot.step, problem)
            return None
        return Snapshot(snapshot.step, self._staging.copy(mine), snapshot.aliases, snapshot.facts)

    def _is_anywhere(self, here: bool) -> bool:
        """Whether it is so on any rank: one small reduction, while training stands still."""
        return bool(self._mesh.all_reduce_sum(torch.tensor([float(here)], device=self._mesh.device)).item())

    def _give_up_copy(self, step: int, problem: CheckpointError | MemoryError | None) -> None:
        """What cannot be saved is a CheckpointError on all ranks; for want of memory all wait for saves from now on."""
        with self._said(step), agreed(self._mesh, self._target.store.url, "copying the state") as outcome:
            if isinstance(problem, CheckpointError):
                raise problem
            outcome["mine"] = None if problem is None else f"rank {self._mesh.rank}: {problem}"
        self.asynchronous = False
        self._staging.release()
        first = next(found for found in outcome["all"] if found)
        why = f"there is no memory for a copy of the state ({first}): training waits for saves from now on"
        self._tell(Note("saves_are_waited_for", {"why": why}))

    def _write(self, staged: Snapshot, began: float, stall_s: float) -> None:
        """The thread's work."""
        assert self._beside is not None
        phases = self._phases.beside(staged.step)
        saved = self._save(staged, self._beside, phases, lambda: None)
        self._saved(staged.step, saved, Cost(stall_s, time.perf_counter() - began))
        if self._target.keep_last is not None and self._mesh.rank == 0:
            self._tidy()

    def _save(self, snapshot: Snapshot, group: Mesh, phases: Phases, record: Callable[[], None]) -> Saved:
        target = self._target
        with self._said(snapshot.step):
            return save(
                target.store,
                snapshot.step,
                snapshot.shards,
                aliases=snapshot.aliases,
                facts=snapshot.facts,
                job_digest=target.job_digest,
                group=group,
                phases=phases,
                before_commit=record,
                epoch=target.epoch,
                incremental=target.incremental,
            )

    @contextmanager
    def _said(self, step: int) -> Iterator[None]:
        """A CheckpointError inside, which is the same on all ranks, is an event."""
        try:
            yield
        except CheckpointError as error:
            self._tell(CheckpointFailed(step, error.where or "", str(error)))
            raise

    def _saved(self, step: int, saved: Saved, cost: Cost) -> None:
        self.last_cost = cost
        path = place_in_run(saved.folder, self._target.run_dir)
        self._tell(CheckpointSaved(step, path, saved.num_bytes, cost.wall_s, cost.stall_s, saved.num_new_bytes))

    def _tidy(self) -> None:
        """Remove what retention does not keep. That it cannot be done is said, and ends nothing. On rank 0."""
        target, flight = self._target, self._flight
        assert flight is not None, "this is a flight"
        retention = Retention(target.keep_last, target.keep_every, target.kept())

        def go_on(num_bytes: int) -> None:
            if flight.in_haste.is_set():
                raise _HurriedError

        try:
            gone = prune(target.store, retention, say=self._say_why_old_stay, progress=go_on)
        except _HurriedError:
            return
        except (CheckpointError, OSError) as error:
            self._say_why_old_stay(str(error))
            return
        if gone:
            self._tell(CheckpointsRemoved([folder.step for folder in gone]))

    def _say_why_old_stay(self, why: str) -> None:
        self._tell(Note("old_checkpoints_stay", {"why": f"old checkpoints are not removed: {why}"}))

    def _tell(self, event: Event) -> None:
        if self._mesh.rank == 0:
            self._bus.emit(event)

    def _raise_crash(self, flight: _Flight) -> None:
        if flight.crash is not None:
            self._flight = None
            raise flight.crash
