"""Checkpoints that ranks could not use, as a later command of the run reads them from its events."""

from __future__ import annotations

from pathlib import Path

from phalanx.observe.bus import Bus
from phalanx.observe.events import CheckpointSaved, CheckpointUnusable, Event
from phalanx.run.training_attempts import _read_unusable_steps


def saved(step: int) -> Event:
    return CheckpointSaved(step, f"step-{step}", 1, 0.1)


def unusable(step: int) -> Event:
    return CheckpointUnusable(step, f"step-{step}", "a bit flipped")


def write(run_dir: Path, attempt: int, *events: Event) -> None:
    bus = Bus(rank=0, attempt=attempt, run_dir=run_dir)
    for event in events:
        bus.emit(event)
    bus.close()


def test_a_checkpoint_is_unusable_until_it_is_saved_again(tmp_path: Path) -> None:
    assert _read_unusable_steps(tmp_path) == set()
    write(tmp_path, 0, saved(10), saved(20), saved(30))
    assert _read_unusable_steps(tmp_path) == set()
    write(tmp_path, 2, unusable(30), unusable(20))
    assert _read_unusable_steps(tmp_path) == {20, 30}
    write(tmp_path, 10, saved(20))
    assert _read_unusable_steps(tmp_path) == {30}
    write(tmp_path, 11, saved(30), unusable(30))
    assert _read_unusable_steps(tmp_path) == {30}
