"""The schedule of a run's checkpoints: decisions about when to save, which every rank makes alike.

They rest on three things: the sums of the flags that each step's reduction carries, the step's
number, and, where training waits for a save, one collective that shares its outcome.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from phalanx.checkpoint.writing.async_checkpointer import AsyncCheckpointer
from phalanx.checkpoint.writing.save_clock import SaveClock
from phalanx.checkpoint.writing.write import RankSnapshot
from phalanx.core.errors import CheckpointError, RunTakenError
from phalanx.job.schema import Checkpoint
from phalanx.mesh.mesh import Mesh
from phalanx.observe.bus import Bus
from phalanx.observe.events import CheckpointPostponed, Event

# A disk that is full is full for a while: trying at each step would stall each step.
RETRY_SAVE_STEPS = 10  # steps between attempts while saving fails (a full disk, say)


class StateToSave(Protocol):
    """The state that is saved: a TrainState, or what a loop of your own has."""

    @property
    def step(self) -> int: ...

    def snapshot(self) -> RankSnapshot:
        """The content of a checkpoint of this step. Its tensors are those of training."""


class CheckpointSchedule:
    """Saves the state of one run when it is due, and tries again later when a save fails.

    `record` puts the step that is done on record; it comes before every commit. `saved_step`: the
    last step that is saved already; None: the step of the state.
    """

    def __init__(
        self,
        checkpointer: AsyncCheckpointer,
        options: Checkpoint,
        mesh: Mesh,
        state: StateToSave,
        bus: Bus,
        *,
        record: Callable[[], None],
        saved_step: int | None = None,
    ) -> None:
        self.saved_step = state.step if saved_step is None else saved_step
        self._checkpointer, self._options = checkpointer, options
        self._mesh, self._state, self._bus = mesh, state, bus
        self._record = record
        self._first_step = state.step
        self._clock = SaveClock(options, time.monotonic())
        # In flight, on all ranks.
        self._saving_step: int | None = None
        self._began_s = 0.0
        self._is_postponed = False
        self._retry_at: int | None = None
        self._when_saved: tuple[int, Callable[[], None]] | None = None

    @property
    def staging_bytes(self) -> int:
        return self._checkpointer.staging_bytes

    def status_flags(self) -> tuple[float, float, float]:
        """Three flags to be summed over the ranks: a save is due by the clock; this rank's thread
        is at work; its save failed.

        Raises what ended the thread.
        """
        # With the step that is being done.
        num_steps = self._state.step + 1 - self._first_step
        is_due = (
            # Rank 0's clock alone: the sum of the flags tells the others.
            self._mesh.rank == 0
            and not self._is_measuring_first_save
            and self._clock.is_due(num_steps, time.monotonic())
        )
        return float(is_due), *self._checkpointer.status_flags()

    @property
    def _is_measuring_first_save(self) -> bool:
        """True with every = "auto" while its first save is in flight: when the next one is due
        follows from what this one costs."""
        return (
            self._options.every is not None
            and self._clock.interval_s is None
            and self._saving_step is not None
        )

    def require_saveable(self) -> None:
        """Raise CheckpointError, on every rank, for state that no checkpoint holds: before hours
        of it are lost."""
        self._checkpointer.require_saveable(self._state.snapshot)

    def save_if_due(
        self, flags: Sequence[float], *, is_stop: bool = False, is_end: bool = False
    ) -> None:
        """Save, or not, by the summed `flags` of a step.

        At a stop or at the end as `save` where there is no later one.
        """
        due, busy, failed = flags
        if not busy:
            self._record_save_outcome(failed > 0)
        if is_stop or is_end:
            self.save(is_last_chance=True, prune=not is_stop)
        elif self._is_save_due(due > 0) and busy and self._checkpointer.asynchronous:
            self._emit_postponed_save()
        elif self._is_save_due(due > 0):
            self.save()

    def save(self, *, is_last_chance: bool = False, prune: bool = True) -> None:
        """Save this step if it is not saved yet.

        A failure is an event: training goes on and tries again later. With `is_last_chance` there
        is no later: training waits for the save, and the CheckpointError is raised, on every rank.
        `prune`: old checkpoints may be removed afterwards, for which a stop has no time.
        """
        step = self._state.step
        if step == self.saved_step or (step == self._saving_step and not is_last_chance):
            return
        began = time.perf_counter()
        # The last save removes old checkpoints itself: it does not wait for a removal (that
        # verifies) before it.
        self.wait_for_save(skip_pruning=is_last_chance)
        if step == self.saved_step:
            return
        self._is_postponed = False
        waited_s = time.perf_counter() - began
        try:
            if (
                is_last_chance
                or not self._checkpointer.asynchronous
                or not self._begin_save(waited_s)
            ):
                self._save_while_waiting(prune, is_last_chance)
        except RunTakenError:
            raise
        except CheckpointError:
            self._schedule_retry_after_failure()
            if is_last_chance:
                # The step is on record all the same: it was done.
                self._record()
                raise

    def wait_for_save(self, *, skip_pruning: bool = False) -> None:
        """Wait for the save in flight, if there is one, and share its outcome; unless
        `skip_pruning` for removals, too."""
        self._record_save_outcome(self._checkpointer.wait(skip_pruning=skip_pruning))

    def abandon(self, timeout_s: float) -> None:
        """Training ends by an error: give a save in flight `timeout_s` to end. Never raises."""
        self._checkpointer.abandon(timeout_s)

    def call_when_saved(self, callback: Callable[[], None]) -> None:
        """Call `callback` as soon as the checkpoint of this step is there; never, if its save
        fails."""
        if self.saved_step == self._state.step:
            callback()
        elif self._saving_step == self._state.step:
            self._when_saved = self._state.step, callback

    def _is_save_due(self, is_due_by_clock: bool) -> bool:
        # The last save failed: wait, whatever asks for one.
        if self._retry_at is not None:
            return self._state.step >= self._retry_at
        if is_due_by_clock or self._is_postponed:
            return True
        every_steps = self._options.every_steps
        return every_steps is not None and self._state.step % every_steps == 0

    def _emit_postponed_save(self) -> None:
        if self._is_postponed or self._saving_step is None:
            return
        self._is_postponed = True
        since_s = time.monotonic() - self._began_s
        self._emit(CheckpointPostponed(self._state.step, self._saving_step, since_s))

    def _begin_save(self, waited_s: float) -> bool:
        step, take_snapshot = self._state.step, self._state.snapshot
        if not self._checkpointer.begin_save(
            step, take_snapshot, record=self._record, waited_s=waited_s
        ):
            return False
        self._saving_step, self._began_s = step, time.monotonic()
        self._clock.restart(self._began_s)
        return True

    def _save_while_waiting(self, prune: bool, is_last: bool) -> None:
        self._checkpointer.save(
            self._state.step,
            self._state.snapshot,
            record=self._record,
            prune=prune,
            is_last=is_last,
        )
        self._clock.restart(time.monotonic())
        self._record_saved_step(self._state.step)

    def _record_save_outcome(self, failed: bool) -> None:
        """Take note of the save in flight, if there was one, now that no thread is at work on any
        rank."""
        self._checkpointer.release_finished_write()
        step, self._saving_step = self._saving_step, None
        if step is None:
            return
        if failed:
            self._schedule_retry_after_failure()
        else:
            self._record_saved_step(step)

    def _schedule_retry_after_failure(self) -> None:
        self._retry_at = self._state.step + RETRY_SAVE_STEPS
        self._is_postponed = False
        self._when_saved = None

    def _record_saved_step(self, step: int) -> None:
        self.saved_step, self._retry_at = step, None
        cost = self._checkpointer.last_cost
        if self._mesh.rank == 0 and cost is not None:
            interval = self._clock.record_save_cost(step, cost.stall_s, cost.wall_s)
            if interval is not None:
                self._emit(interval)
        if self._when_saved is not None:
            (awaited_step, callback), self._when_saved = self._when_saved, None
            if awaited_step == step:
                callback()

    def _emit(self, event: Event) -> None:
        if self._mesh.rank == 0:
            self._bus.emit(event)
