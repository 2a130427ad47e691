"""Saving beside training: a copy of the state is taken between two steps, and a thread writes it.

The thread's collectives go through a process group of its own, so that they never meet training's.
One save is in flight at a time. A rank's `votes` travel in the reduction of each step, so that all
ranks see a save end at the same step. An error of the thread is never lost: a CheckpointError (a
full disk) is an event and a vote, and anything else is raised in training.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from phalanx.checkpoint.all_ranks import agreed
from phalanx.checkpoint.folder import place_in_run
from phalanx.checkpoint.ownership.fencing_token import Epoch
from phalanx.checkpoint.stores.protocol import Store
from phalanx.checkpoint.writing.background_write import Flight
from phalanx.checkpoint.writing.pruner import Tidier
from phalanx.checkpoint.writing.retention import Retention
from phalanx.checkpoint.writing.staging import Staging
from phalanx.checkpoint.writing.write import Saved, owned, save
from phalanx.core.errors import CheckpointError, RunTakenError
from phalanx.core.phases import Phases
from phalanx.mesh.logical import LogicalShard
from phalanx.mesh.mesh import Mesh
from phalanx.observe.bus import Bus
from phalanx.observe.events import CheckpointFailed, CheckpointSaved, Event, Note

POLL_S = (
    0.2  # how long a rank that waits for a thread looks at its own before it hears of the others
)


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
    """Where the checkpoints of a run go, and which of them stay.

    `kept` names steps that retention never removes.
    """

    store: Store
    job_digest: str
    run_dir: Path
    epoch: Epoch | None = None
    incremental: bool = True
    keep_last: int | None = None
    keep_every: int | None = None
    kept: Callable[[], frozenset[int]] = frozenset

    def retention(self) -> Retention:
        return Retention(self.keep_last, self.keep_every, self.kept())


class Saver:
    """Writes Snapshots to a Target: `begin` leaves it to a thread, `save` waits.

    Both are collective.

    `phases` are those of training. Rank 0 says on `bus` what was saved, what failed and what was
    removed.
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
        self._flight: Flight | None = None
        self._tidier = Tidier(target.store, target.retention, self._tell, target.epoch)

    @property
    def staging_bytes(self) -> int:
        """Host memory that this rank holds for copies."""
        return self._staging.num_bytes

    def votes(self) -> tuple[float, float]:
        """Whether a thread of this rank is at work, and whether its save failed; to be summed over
        the ranks.

        Raises here, on this rank alone, what ended a thread and was no CheckpointError.
        """
        is_busy, has_failed = self._of_save()
        return float(is_busy or self._tidier.is_waited_for), float(has_failed)

    def wait(self, *, in_haste: bool = False) -> bool:
        """Until the threads of all ranks are done.

        True if their save failed; raises as `votes` does. Collective.

        No rank stands in a collective while another's thread is at work, however long that takes:
        again and again they agree that one is. In haste the removal of old checkpoints is left to
        the next save.
        """
        if in_haste:
            self._tidier.hurry()
        else:
            self._tidier.take_time()
        is_busy, has_failed = self._agree()
        if is_busy:
            with self._phases("ckpt_write", "wait for the save in flight"):
                while is_busy:
                    self._look_at_own(POLL_S)
                    is_busy, has_failed = self._agree()
        return has_failed

    def land(self) -> None:
        """Forget a flight that is over on all ranks.

        Raises RunTakenError, on every rank, if that is how it ended.
        """
        flight, self._flight = self._flight, None
        assert flight is None or flight.is_done
        if flight is not None and flight.taken is not None:
            raise flight.taken

    def leave(self, timeout_s: float) -> None:
        """Training ends by an error: let the save in flight end if it can. Never raises."""
        self._tidier.hurry()
        flight = self._flight
        if flight is None:
            return
        flight.join(timeout_s)
        why = ""
        if not flight.is_done:
            why = (
                f"training ended by an error, and the save in flight was not done {timeout_s:g} s"
                " later"
            )
        elif flight.crash is not None:
            traceback.print_exception(flight.crash)  # in this rank's log
            why = (
                "training ended by an error, and the save in flight with it"
                f" ({type(flight.crash).__name__})"
            )
        if why:
            self._tell(Note("save_left_behind", {"why": why}))

    def _of_save(self) -> tuple[bool, bool]:
        """Whether this rank's save is in flight, and whether it failed.

        Raises what ended a thread.
        """
        self._tidier.raise_crash()
        flight = self._flight
        if flight is None:
            return False, False
        if not flight.is_done:
            return True, False
        if flight.crash is not None:
            self._flight = None
            raise flight.crash
        return False, flight.failed

    def _agree(self) -> tuple[bool, bool]:
        """The votes of all ranks."""
        votes = torch.tensor(self.votes(), dtype=torch.float64, device=self._mesh.device)
        busy, failed = self._mesh.all_reduce_sum(votes).tolist()
        return busy > 0, failed > 0

    def _look_at_own(self, timeout_s: float) -> None:
        """Wait for what of this rank is at work."""
        if self._flight is not None and not self._flight.is_done:
            self._flight.join(timeout_s)
        elif self._tidier.is_waited_for:
            self._tidier.join(timeout_s)

    def require_saveable(self, take: Callable[[], Snapshot]) -> None:
        """Raise CheckpointError, on every rank, if on any of them `take` gives what no checkpoint
        holds.

        Collective.
        """
        with agreed(self._mesh, self._target.store.url, "looking at what there is to save"):
            owned(take().shards)

    def begin(
        self,
        step: int,
        take: Callable[[], Snapshot],
        *,
        record: Callable[[], None],
        waited_s: float = 0.0,
    ) -> bool:
        """Copy the state of `step`, which `take` gives, and write it beside training.

        False, with nothing done, if a rank has no memory for that.

        `record` is called before the thread starts, so that what it records is there before the
        checkpoint is. Raises CheckpointError on every rank if there is something that cannot be
        saved.
        """
        assert self._flight is None, "one save at a time"
        began = time.perf_counter() - waited_s
        with self._phases("ckpt_stage"):
            staged = self._staged(step, take)
        if staged is None:
            return False
        stall_s = time.perf_counter() - began
        record()
        flight = self._flight = Flight("phalanx-save", lambda: self._write(staged, began, stall_s))
        flight.start()
        return True

    def save(
        self,
        step: int,
        take: Callable[[], Snapshot],
        *,
        record: Callable[[], None],
        tidy: bool = True,
        is_last: bool = False,
    ) -> None:
        """Save while training waits.

        No save may be in flight. Raises CheckpointError on every rank.

        `is_last`: training ends if this save fails.
        """
        assert self._flight is None, "one save at a time"
        began = time.perf_counter()
        taken: list[Snapshot] = []
        with (
            self._said(step, is_last),
            agreed(self._mesh, self._target.store.url, "taking the state"),
        ):
            taken.append(take())
        saved = self._save(taken[0], self._mesh, self._phases, record, is_last=is_last)
        wall_s = time.perf_counter() - began
        self._saved(step, saved, Cost(wall_s, wall_s))
        if tidy and self._target.keep_last is not None and self._mesh.rank == 0:
            self._tidier.take_time()
            self._tidier.begin()

    def _staged(self, step: int, take: Callable[[], Snapshot]) -> Snapshot | None:
        """A copy of the state. Before it begins all ranks agree that each can make it."""
        if self._beside is None:
            self._beside = self._mesh.open_beside(timeout_s=self._timeout_s)
        snapshot: Snapshot | None = None
        mine: dict[str, LogicalShard] = {}
        problem: CheckpointError | MemoryError | None = None
        try:
            snapshot = take()
            mine = owned(snapshot.shards)
            self._staging.reserve(mine)
        except (CheckpointError, MemoryError) as error:
            problem = error
        if self._is_anywhere(problem is not None) or snapshot is None:
            self._give_up_copy(step, problem)
            return None
        return Snapshot(step, self._staging.copy(mine), snapshot.aliases, snapshot.facts)

    def _is_anywhere(self, here: bool) -> bool:
        """Whether it is so on any rank: one small reduction, while training stands still."""
        return bool(
            self._mesh.all_reduce_sum(torch.tensor([float(here)], device=self._mesh.device)).item()
        )

    def _give_up_copy(self, step: int, problem: CheckpointError | MemoryError | None) -> None:
        """What cannot be saved is a CheckpointError on all ranks; for want of memory all wait
        for saves from now on."""
        with (
            self._said(step),
            agreed(self._mesh, self._target.store.url, "copying the state") as outcome,
        ):
            if isinstance(problem, CheckpointError):
                raise problem
            outcome["mine"] = None if problem is None else f"rank {self._mesh.rank}: {problem}"
        self.asynchronous = False
        self._staging.release()
        first = next(found for found in outcome["all"] if found)
        why = (
            f"there is no memory for a copy of the state ({first}): training waits for saves from"
            " now on"
        )
        self._tell(Note("saves_are_waited_for", {"why": why}))

    def _write(self, staged: Snapshot, began: float, stall_s: float) -> None:
        """The thread's work."""
        assert self._beside is not None
        phases = self._phases.beside(staged.step)
        saved = self._save(staged, self._beside, phases, lambda: None)
        self._saved(staged.step, saved, Cost(stall_s, time.perf_counter() - began))
        if self._target.keep_last is not None and self._mesh.rank == 0:
            self._tidier.begin()

    def _save(
        self,
        snapshot: Snapshot,
        group: Mesh,
        phases: Phases,
        record: Callable[[], None],
        *,
        is_last: bool = False,
    ) -> Saved:
        target = self._target
        with self._said(snapshot.step, is_last):
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
    def _said(self, step: int, is_last: bool = False) -> Iterator[None]:
        """A CheckpointError inside, which is the same on all ranks, is an event."""
        try:
            yield
        except RunTakenError:  # the trainer says it, and the run's record is another job's
            raise
        except CheckpointError as error:
            self._tell(CheckpointFailed(step, error.where or "", str(error), not is_last))
            raise

    def _saved(self, step: int, saved: Saved, cost: Cost) -> None:
        self.last_cost = cost
        path = place_in_run(saved.folder, self._target.run_dir)
        self._tell(
            CheckpointSaved(
                step, path, saved.num_bytes, cost.wall_s, cost.stall_s, saved.num_new_bytes
            )
        )

    def _tell(self, event: Event) -> None:
        if self._mesh.rank == 0:
            self._bus.emit(event)
