"""Checkpoints written beside training: the state is copied between two steps, and a thread writes
the copy.

The thread's collectives go through a process group of its own, so that they never meet training's.
One write is in flight at a time. A rank's `flags` travel in the reduction of each step, which a
step has anyway, so that all ranks see a write end at the same step, and alike whether it failed. An
error of the thread is never lost: a CheckpointError (a full disk) is an event and a flag, and
anything else is raised in training.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from phalanx.checkpoint.all_ranks import run_on_all_ranks_or_raise
from phalanx.checkpoint.folder import format_place_in_run
from phalanx.checkpoint.run_storage import RunStorage
from phalanx.checkpoint.writing.background_task import BackgroundTask
from phalanx.checkpoint.writing.pruner import CheckpointPruner
from phalanx.checkpoint.writing.staging import HostStagingMemory
from phalanx.checkpoint.writing.write import (
    RankSnapshot,
    WrittenCheckpoint,
    select_blocks_to_write,
    write_checkpoint,
)
from phalanx.core.errors import CheckpointError, RunTakenError
from phalanx.core.open_files import check_free_descriptors
from phalanx.core.phases import PhaseTimer
from phalanx.job.schema import Checkpoint
from phalanx.mesh.logical import LogicalShard
from phalanx.mesh.mesh import Mesh
from phalanx.observe.bus import Bus
from phalanx.observe.events import CheckpointFailed, CheckpointSaved, Event, Note

# A rank that waits looks so long at its own thread before it hears of the others'.
POLL_INTERVAL_S = 0.2
# A connection to each, and as many while they are being made.
_DESCRIPTORS_PER_PEER = 2


@dataclass(frozen=True)
class SaveSeconds:
    """Seconds that training stood still for a save, and seconds until it was committed."""

    stall_s: float
    wall_s: float


class AsyncCheckpointer:
    """Writes Snapshots into a run's storage: `begin` leaves it to a thread, `save` waits.

    Both are collective. `options` are the job's: whether to write beside training, to link blocks
    that did not change, and to remove old checkpoints. `phases` are those of training. Rank 0 emits
    on `bus` what was saved, what failed and what was removed.
    """

    def __init__(
        self,
        storage: RunStorage,
        options: Checkpoint,
        mesh: Mesh,
        bus: Bus,
        phases: PhaseTimer,
        *,
        job_digest: str,
        timeout_s: float = 600.0,
    ) -> None:
        self.asynchronous = options.asynchronous
        self.last_cost: SaveSeconds | None = None
        self._storage, self._options, self._job_digest = storage, options, job_digest
        self._mesh, self._bus, self._phases = mesh, bus, phases
        self._timeout_s = timeout_s
        self._staging = HostStagingMemory(mesh.device)
        # Of the thread alone: its collectives must never meet training's in one group.
        self._thread_mesh: Mesh | None = None
        self._write: BackgroundTask | None = None
        self._pruner = CheckpointPruner(storage, options, self._emit)

    @property
    def staging_bytes(self) -> int:
        """Host memory that this rank holds for copies."""
        return self._staging.num_bytes

    def status_flags(self) -> tuple[float, float]:
        """Two flags to be summed over the ranks: a thread of this rank is at work; its write
        failed.

        Raises here, on this rank alone, what ended a thread and was no CheckpointError.
        """
        is_busy, has_failed = self._write_status()
        return float(is_busy or self._pruner.should_wait), float(has_failed)

    def wait(self, *, skip_pruning: bool = False) -> bool:
        """Wait until the threads of all ranks are done; collective.

        Returns True if their write failed; raises as `flags` does. No rank stands in a collective
        while another's thread is at work, however long that takes: again and again they agree that
        one is. `skip_pruning` leaves the removal of old checkpoints to the next save.
        """
        if skip_pruning:
            self._pruner.interrupt()
        else:
            self._pruner.clear_interrupt()
        is_busy, has_failed = self._sum_status_flags_over_ranks()
        if is_busy:
            with self._phases("ckpt_write", "wait for the save in flight"):
                while is_busy:
                    self._join_threads_of_rank(POLL_INTERVAL_S)
                    is_busy, has_failed = self._sum_status_flags_over_ranks()
        return has_failed

    def release_finished_write(self) -> None:
        """Forget a write that is over on all ranks.

        Raises RunTakenError, on every rank, if that is how it ended.
        """
        # Forgotten before anything is raised: the next save may begin.
        write, self._write = self._write, None
        assert write is None or write.is_done
        if write is not None and write.taken is not None:
            raise write.taken

    def abandon(self, timeout_s: float) -> None:
        """Training ends by an error: give the write in flight `timeout_s` to end. Never raises."""
        self._pruner.interrupt()
        write = self._write
        if write is None:
            return
        write.join(timeout_s)
        why = ""
        if not write.is_done:
            why = (
                f"training ended by an error, and the save in flight was not done {timeout_s:g} s"
                " later"
            )
        elif write.crash is not None:
            # In this rank's log: nobody raises it any more.
            traceback.print_exception(write.crash)
            why = (
                "training ended by an error, and the save in flight with it"
                f" ({type(write.crash).__name__})"
            )
        if why:
            self._emit(Note("save_left_behind", {"why": why}))

    def _write_status(self) -> tuple[bool, bool]:
        """(this rank's write is in flight, it failed). Raises what ended a thread."""
        self._pruner.raise_exception_of_thread()
        write = self._write
        if write is None:
            return False, False
        if not write.is_done:
            return True, False
        if write.crash is not None:
            self._write = None
            raise write.crash
        return False, write.failed

    def _sum_status_flags_over_ranks(self) -> tuple[bool, bool]:
        """(a thread of any rank is at work, the write of any rank failed)."""
        flags = torch.tensor(self.status_flags(), dtype=torch.float64, device=self._mesh.device)
        busy, failed = self._mesh.all_reduce_sum(flags).tolist()
        return busy > 0, failed > 0

    def _join_threads_of_rank(self, timeout_s: float) -> None:
        if self._write is not None and not self._write.is_done:
            self._write.join(timeout_s)
        elif self._pruner.should_wait:
            self._pruner.join(timeout_s)

    def require_saveable(self, take_snapshot: Callable[[], RankSnapshot]) -> None:
        """Raise CheckpointError, on every rank, if the snapshot of any rank has state that no
        checkpoint holds; collective."""
        url = self._storage.store.url
        with run_on_all_ranks_or_raise(self._mesh, url, "looking at what there is to save"):
            select_blocks_to_write(take_snapshot().shards)

    def begin_save(
        self,
        step: int,
        take_snapshot: Callable[[], RankSnapshot],
        *,
        record: Callable[[], None],
        waited_s: float = 0.0,
    ) -> bool:
        """Copy the state of `step` and write it beside training.

        Returns False, with nothing done, if a rank has no memory for the copy. `record` is called
        before the thread starts, so that what it records is there before the checkpoint is. Raises
        CheckpointError on every rank if there is something that cannot be saved.
        """
        assert self._write is None, "one save at a time"
        # Training stood still for the save before, too: that counts as this one's stall.
        began = time.perf_counter() - waited_s
        with self._phases("ckpt_stage"):
            staged = self._copy_snapshot_to_host(step, take_snapshot)
        if staged is None:
            return False
        stall_s = time.perf_counter() - began
        record()
        self._write = BackgroundTask(
            "phalanx-save", lambda: self._write_host_copy_in_thread(staged, began, stall_s)
        )
        self._write.start()
        return True

    def save(
        self,
        step: int,
        take_snapshot: Callable[[], RankSnapshot],
        *,
        record: Callable[[], None],
        prune: bool = True,
        is_last: bool = False,
    ) -> None:
        """Write the state of `step` while training waits. No write may be in flight.

        `prune`: start to remove old checkpoints afterwards. `is_last`: training ends if this save
        fails. Raises CheckpointError on every rank.
        """
        assert self._write is None, "one save at a time"
        began = time.perf_counter()
        snapshots: list[RankSnapshot] = []
        with self._phases("ckpt_prepare"):
            with (
                self._emitting_save_failure(step, is_last),
                run_on_all_ranks_or_raise(self._mesh, self._storage.store.url, "taking the state"),
            ):
                snapshots.append(take_snapshot())
            written = self._write_snapshot_as_checkpoint(
                snapshots[0], self._mesh, self._phases, record, is_last=is_last
            )
        wall_s = time.perf_counter() - began
        self._emit_saved_checkpoint(step, written, SaveSeconds(wall_s, wall_s))
        if prune and self._mesh.rank == 0:
            self._pruner.clear_interrupt()
            self._pruner.start()

    def _copy_snapshot_to_host(
        self, step: int, take_snapshot: Callable[[], RankSnapshot]
    ) -> RankSnapshot | None:
        """A copy of the state; None, on every rank, if one has no memory for it.

        All ranks agree that each can make the copy before it begins.
        """
        # Opened at the first such save: a run whose saves all wait needs no second group.
        if self._thread_mesh is None:
            self._thread_mesh = self._open_thread_mesh(step)
        snapshot: RankSnapshot | None = None
        blocks: dict[str, LogicalShard] = {}
        problem: CheckpointError | MemoryError | None = None
        try:
            snapshot = take_snapshot()
            # Reduced before memory is reserved: what other ranks write is not copied here.
            blocks = select_blocks_to_write(snapshot.shards)
            self._staging.reserve_for_shards(blocks)
        except (CheckpointError, MemoryError) as error:
            problem = error
        if self._is_true_on_any_rank(problem is not None) or snapshot is None:
            self._raise_copy_failure_on_all_ranks(step, problem)
            return None
        return RankSnapshot(
            step, self._staging.copy_shards(blocks), snapshot.aliases, snapshot.facts
        )

    def _open_thread_mesh(self, step: int) -> Mesh:
        """The mesh of the thread's collectives. Raises CheckpointError, on every rank, where one
        cannot open as many files as its connections need."""
        with (
            self._emitting_save_failure(step),
            run_on_all_ranks_or_raise(
                self._mesh, self._storage.store.url, "connecting the ranks for saves"
            ),
        ):
            # Before any rank waits for the others: gloo may abort a process that has none left.
            check_free_descriptors(_DESCRIPTORS_PER_PEER * (self._mesh.world_size - 1))
        return self._mesh.open_cpu_mesh(timeout_s=self._timeout_s, name="saving")

    def _is_true_on_any_rank(self, flag: bool) -> bool:
        """True if `flag` is set on any rank.

        One small reduction, while training stands still: a gather of JSON costs more.
        """
        flags = torch.tensor([float(flag)], device=self._mesh.device)
        return bool(self._mesh.all_reduce_sum(flags).item())

    def _raise_copy_failure_on_all_ranks(
        self, step: int, problem: CheckpointError | MemoryError | None
    ) -> None:
        """Raise a CheckpointError of any rank on all; without one memory is short, and training
        waits for saves from now on."""
        with (
            self._emitting_save_failure(step),
            run_on_all_ranks_or_raise(
                self._mesh, self._storage.store.url, "copying the state"
            ) as results,
        ):
            if isinstance(problem, CheckpointError):
                raise problem
            if problem is not None:
                results.local = f"rank {self._mesh.rank}: {problem}"
        # On all ranks: saves are collective.
        self.asynchronous = False
        self._staging.release()
        first = next(message for message in results.by_rank if message)
        why = (
            f"there is no memory for a copy of the state ({first}): training waits for saves from"
            " now on"
        )
        self._emit(Note("saves_are_waited_for", {"why": why}))

    def _write_host_copy_in_thread(
        self, staged: RankSnapshot, began: float, stall_s: float
    ) -> None:
        """The thread's work."""
        assert self._thread_mesh is not None
        phases = self._phases.for_thread(staged.step)
        written = self._write_snapshot_as_checkpoint(
            staged, self._thread_mesh, phases, lambda: None
        )
        self._emit_saved_checkpoint(
            staged.step, written, SaveSeconds(stall_s, time.perf_counter() - began)
        )
        if self._mesh.rank == 0:
            self._pruner.start()

    def _write_snapshot_as_checkpoint(
        self,
        snapshot: RankSnapshot,
        group: Mesh,
        phases: PhaseTimer,
        record: Callable[[], None],
        *,
        is_last: bool = False,
    ) -> WrittenCheckpoint:
        with self._emitting_save_failure(snapshot.step, is_last):
            return write_checkpoint(
                self._storage.store,
                snapshot,
                job_digest=self._job_digest,
                group=group,
                phases=phases,
                before_commit=record,
                fencing_token=self._storage.fencing_token,
                incremental=self._options.incremental,
            )

    @contextmanager
    def _emitting_save_failure(self, step: int, is_last: bool = False) -> Iterator[None]:
        """Emit an event of a CheckpointError of the body, which is the same on all ranks."""
        try:
            yield
        except RunTakenError:
            # The trainer reports it, and the run's record is another job's.
            raise
        except CheckpointError as error:
            self._emit(CheckpointFailed(step, error.where or "", str(error), not is_last))
            raise

    def _emit_saved_checkpoint(
        self, step: int, written: WrittenCheckpoint, cost: SaveSeconds
    ) -> None:
        self.last_cost = cost
        path = format_place_in_run(written.folder, self._storage.run_dir)
        self._emit(
            CheckpointSaved(
                step, path, written.num_bytes, cost.wall_s, cost.stall_s, written.num_new_bytes
            )
        )

    def _emit(self, event: Event) -> None:
        if self._mesh.rank == 0:
            self._bus.emit(event)
