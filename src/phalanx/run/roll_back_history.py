"""How far a run has gone back so far, over all of its commands. Torch-free."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from phalanx.core.roll_back import RollBack
from phalanx.observe.events import CheckpointSaved, RolledBack
from phalanx.observe.tail import read_recorded_events
from phalanx.run.rank_run import RollBacks


class RollBackHistory:
    """`current` is what the ranks of the next attempt are told."""

    def __init__(self, run_dir: Path) -> None:
        self.current = _read_roll_backs(run_dir)

    def add(self, roll_back: RollBack, ended_epoch: int) -> None:
        """The attempt of fencing token `ended_epoch` ends by going back."""
        self.current = RollBacks((*self.current.done, roll_back), True, ended_epoch)

    def note_checkpoint(self) -> None:
        """A checkpoint was saved: it is of after the last one."""
        self.current = replace(self.current, pending=False)


def _read_roll_backs(run_dir: Path) -> RollBacks:
    roll_backs: list[RollBack] = []
    ended_attempt, ended_epoch = -1, 0
    for envelope in read_recorded_events(run_dir, RolledBack, rank=-1):
        event = envelope.event
        assert isinstance(event, RolledBack)
        ended_attempt, ended_epoch = envelope.attempt, event.epoch
        roll_backs.append(
            RollBack(
                kind=event.cause,
                step=event.step,
                not_after_step=event.not_after_step,
                why=event.why,
                skip_to_sample=event.skip_to_sample,
                rank=event.failed_rank,
            )
        )
    # By attempt and not by time, because wall clocks are set back.
    saved = read_recorded_events(run_dir, CheckpointSaved) if roll_backs else iter(())
    has_saved_since = any(envelope.attempt > ended_attempt for envelope in saved)
    pending = bool(roll_backs) and not has_saved_since
    return RollBacks(tuple(roll_backs), pending, ended_epoch)
