"""When the state of a run is saved, and what follows from it: decisions that every rank makes
alike.

They rest on three things: the sums of the votes that each step's reduction carries, the step's
number, and, where training waits for a save, one collective that shares its outcome.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from phalanx.checkpoint.writing.async_checkpointer import Saver
from phalanx.core.errors import CheckpointError, RunTakenError
from phalanx.job.schema import Checkpoint
from phalanx.mesh.mesh import Mesh
from phalanx.observe.bus import Bus
from phalanx.observe.events import CheckpointPostponed, Event
from phalanx.train.cadence import Clock
from phalanx.train.state import TrainState

RETRY_SAVE_STEPS = 10  # steps between attempts while saving fails (a full disk, say)


class Saves:
    """The saves of one run.

    `record` puts the step that is done on record; it comes before every commit.
    """

    def __init__(
        self,
        saver: Saver,
        kept: Checkpoint,
        mesh: Mesh,
        state: TrainState,
        bus: Bus,
        *,
        record: Callable[[], None],
    ) -> None:
        self.saved_step = state.step
        self._saver, self._kept, self._mesh, self._state, self._bus = saver, kept, mesh, state, bus
        self._record = record
        self._first_step = state.step
        self._clock = Clock(kept, time.monotonic())
        self._saving_step: int | None = None  # in flight, on all ranks
        self._began_s = 0.0
        self._is_postponed = False
        self._retry_at: int | None = None
        self._once_saved: tuple[int, Callable[[], None]] | None = None

    @property
    def staging_bytes(self) -> int:
        return self._saver.staging_bytes

    def votes(self) -> tuple[float, float, float]:
        """A save is due by the clock; this rank's thread is at work; its save failed.

        Raises what ended the thread.
        """
        num_steps = self._state.step + 1 - self._first_step  # with the one that is being done
        is_due = (
            self._mesh.rank == 0
            and not self._is_measuring
            and self._clock.is_due(num_steps, time.monotonic())
        )
        return float(is_due), *self._saver.votes()

    @property
    def _is_measuring(self) -> bool:
        """every = "auto" and its first save in flight: when the next one is due follows from
        what this one costs."""
        return (
            self._kept.every is not None
            and self._clock.interval_s is None
            and self._saving_step is not None
        )

    def require_saveable(self) -> None:
        """Raise CheckpointError, on every rank, for state that no checkpoint holds: before hours
        of it are lost."""
        self._saver.require_saveable(self._state.snapshot)

    def after_step(
        self, votes: Sequence[float], *, is_stop: bool = False, is_end: bool = False
    ) -> None:
        """What the summed votes of a step ask for.

        At a stop or at the end as `save` where there is no later one.
        """
        due, busy, failed = votes
        if not busy:
            self._land(failed > 0)
        if is_stop or is_end:
            self.save(is_last_chance=True, tidy=not is_stop)
        elif self._is_due(due > 0) and busy and self._saver.asynchronous:
            self._postpone()
        elif self._is_due(due > 0):
            self.save()

    def save(self, *, is_last_chance: bool = False, tidy: bool = True) -> None:
        """Save this step if it is not saved yet.

        A failure is an event: training goes on and tries again later.

        Where there is no later, training waits for the save, and the CheckpointError is raised, on
        every rank. `tidy`: old checkpoints may be removed afterwards, for which nobody has time at
        a stop.
        """
        step = self._state.step
        if step == self.saved_step or (step == self._saving_step and not is_last_chance):
            return
        began = time.perf_counter()
        # The last save removes old checkpoints itself: nobody waits for a removal (that verifies)
        # before it.
        self.settle(in_haste=is_last_chance)
        if step == self.saved_step:
            return
        self._is_postponed = False
        waited_s = time.perf_counter() - began
        try:
            if is_last_chance or not self._saver.asynchronous or not self._begin(waited_s):
                self._save_now(tidy, is_last_chance)
        except RunTakenError:
            raise
        except CheckpointError:
            self._failed()
            if is_last_chance:
                self._record()
                raise

    def settle(self, *, in_haste: bool = False) -> None:
        """Wait for the save in flight, if there is one, and share its outcome; for removals only
        if not `in_haste`."""
        self._land(self._saver.wait(in_haste=in_haste))

    def leave(self, timeout_s: float) -> None:
        """Training ends by an error: a save in flight has this long to end. Never raises."""
        self._saver.leave(timeout_s)

    def once_saved(self, then: Callable[[], None]) -> None:
        """Call `then` as soon as the checkpoint of this step is there; never, if its save fails."""
        if self.saved_step == self._state.step:
            then()
        elif self._saving_step == self._state.step:
            self._once_saved = self._state.step, then

    def _is_due(self, voted: bool) -> bool:
        if self._retry_at is not None:  # the last save failed: wait, whatever asks for one
            return self._state.step >= self._retry_at
        every = self._kept.every_steps
        return voted or self._is_postponed or (every is not None and self._state.step % every == 0)

    def _postpone(self) -> None:
        if self._is_postponed or self._saving_step is None:
            return
        self._is_postponed = True
        since_s = time.monotonic() - self._began_s
        self._tell(CheckpointPostponed(self._state.step, self._saving_step, since_s))

    def _begin(self, waited_s: float) -> bool:
        step, take = self._state.step, self._state.snapshot
        if not self._saver.begin(step, take, record=self._record, waited_s=waited_s):
            return False
        self._saving_step, self._began_s = step, time.monotonic()
        self._clock.restart(self._began_s)
        return True

    def _save_now(self, tidy: bool, is_last: bool) -> None:
        self._saver.save(
            self._state.step, self._state.snapshot, record=self._record, tidy=tidy, is_last=is_last
        )
        self._clock.restart(time.monotonic())
        self._saved(self._state.step)

    def _land(self, failed: bool) -> None:
        """No thread is at work on any rank: take what became of the save in flight, if there was
        one."""
        self._saver.land()
        step, self._saving_step = self._saving_step, None
        if step is None:
            return
        if failed:
            self._failed()
        else:
            self._saved(step)

    def _failed(self) -> None:
        self._retry_at = self._state.step + RETRY_SAVE_STEPS
        self._is_postponed = False
        self._once_saved = None

    def _saved(self, step: int) -> None:
        self.saved_step, self._retry_at = step, None
        cost = self._saver.last_cost
        if self._mesh.rank == 0 and cost is not None:
            chosen = self._clock.learn(step, cost.stall_s, cost.wall_s)
            if chosen is not None:
                self._tell(chosen)
        if self._once_saved is not None:
            (wanted, then), self._once_saved = self._once_saved, None
            if wanted == step:
                then()

    def _tell(self, event: Event) -> None:
        if self._mesh.rank == 0:
            self._bus.emit(event)
