"""Checkpoints that ranks could not use, as a later command of the run reads them from its events."""

from __future__ import annotations

from pathlib import Path

from test_retention import save

from phalanx.checkpoint.stores import open_store_of_run
from phalanx.observe.bus import Bus
from phalanx.observe.events import CheckpointSaved, CheckpointUnusable, Event
from phalanx.run.training_attempts import _read_unusable_steps, describe_newest_checkpoint


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


def test_the_checkpoint_that_stands_is_the_newest_that_can_be_read(tmp_path: Path) -> None:
    """And the end of a run tells "none is there" from what it could not see."""
    store = open_store_of_run(tmp_path, None)
    assert describe_newest_checkpoint(store, ()) == "no checkpoint is there"
    save(tmp_path, 10)
    save(tmp_path, 20)
    assert describe_newest_checkpoint(store, ()) == "the checkpoint of step 20 stands"
    assert describe_newest_checkpoint(store, {20}) == "the checkpoint of step 10 stands"
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "step-20" / "manifest.json").write_text("garbage")
    assert describe_newest_checkpoint(store, ()) == "the checkpoint of step 10 stands"
    (checkpoints / "step-10" / "manifest.json").unlink()
    assert describe_newest_checkpoint(store, ()) == "no checkpoint can be used"
    checkpoints.rename(tmp_path / "aside")
    # As a mount leaves it that does not answer: there, and it cannot be listed.
    checkpoints.write_text("")
    assert describe_newest_checkpoint(store, ()) == "checkpoints cannot be seen now"
