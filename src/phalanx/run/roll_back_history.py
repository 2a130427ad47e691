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

    def add(self, roll_back: RollBack) -> None:
        self.current = RollBacks((*self.current.done, roll_back), pending=True)

    def note_checkpoint(self) -> None:
        """A checkpoint was saved: it is of after the last one."""
        self.current = replace(self.current, pending=False)


def _read_roll_backs(run_dir: Path) -> RollBacks:
    roll_backs: list[RollBack] = []
    rolled_back_s = 0.0
    for envelope in read_recorded_events(run_dir, RolledBack, rank=-1):
        event = envelope.event
        assert isinstance(event, RolledBack)
        rolled_back_s = max(rolled_back_s, envelope.time_unix_s)
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
    saved = read_recorded_events(run_dir, CheckpointSaved) if roll_backs else iter(())
    saved_s = max((envelope.time_unix_s for envelope in saved), default=0.0)
    return RollBacks(tuple(roll_backs), pending=rolled_back_s > saved_s)
