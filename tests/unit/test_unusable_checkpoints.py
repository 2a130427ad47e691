"""Checkpoints that ranks could not use, as a later command of the run reads them from its events."""

from __future__ import annotations

from pathlib import Path

from test_retention import save

from phalanx.checkpoint.stores import open_store_of_run
from phalanx.observe.bus import Bus
from phalanx.observe.events import CheckpointSaved, CheckpointUnusable, Event
from phalanx.run.conclude import find_last_done_step
from phalanx.run.usable_checkpoints import UsableCheckpoints


def saved(step: int) -> Event:
    return CheckpointSaved(step, f"step-{step}", 1, 0.1)


def unusable(step: int) -> Event:
    return CheckpointUnusable(step, f"step-{step}", "a bit flipped")


def write(run_dir: Path, attempt: int, *events: Event) -> None:
    bus = Bus(rank=0, attempt=attempt, run_dir=run_dir)
    for event in events:
        bus.emit(event)
    bus.close()


def find_newest_step(run_dir: Path) -> int:
    """As a later command of the run finds it."""
    return UsableCheckpoints(run_dir, open_store_of_run(run_dir, None)).find_newest_step()


def test_a_checkpoint_is_unusable_until_it_is_saved_again(tmp_path: Path) -> None:
    assert find_newest_step(tmp_path) == 0
    for step in (10, 20, 30):
        save(tmp_path, step)
    write(tmp_path, 0, saved(10), saved(20), saved(30))
    assert find_newest_step(tmp_path) == 30
    write(tmp_path, 2, unusable(30), unusable(20))
    assert find_newest_step(tmp_path) == 10
    write(tmp_path, 10, saved(20))
    assert find_newest_step(tmp_path) == 20
    write(tmp_path, 11, saved(30), unusable(30))
    assert find_newest_step(tmp_path) == 20


def test_the_checkpoint_that_stands_is_the_newest_that_can_be_read(tmp_path: Path) -> None:
    """And the end of a run tells "none is there" from what it could not see."""
    known = UsableCheckpoints(tmp_path, open_store_of_run(tmp_path, None))
    assert known.describe_newest() == "no checkpoint is there"
    save(tmp_path, 10)
    save(tmp_path, 20)
    assert known.describe_newest() == "the checkpoint of step 20 stands"
    known.note_event(unusable(20))
    assert known.describe_newest() == "the checkpoint of step 10 stands"
    known.note_event(saved(20))
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "step-20" / "manifest.json").write_text("garbage")
    assert known.describe_newest() == "the checkpoint of step 10 stands"
    (checkpoints / "step-10" / "manifest.json").unlink()
    assert known.describe_newest() == "no checkpoint can be used"
    hide(checkpoints)
    assert known.describe_newest() == "checkpoints cannot be seen now"


def test_the_samples_of_a_step_are_counted_from_the_checkpoint_before_it(tmp_path: Path) -> None:
    known = UsableCheckpoints(tmp_path, open_store_of_run(tmp_path, None))
    assert known.find_data_cursor_before(5) == (0, 0)
    for step, samples in ((10, 80), (20, 170)):
        save(tmp_path, step, facts={"samples_seen": samples})
    assert known.find_data_cursor_before(20) == (10, 80)
    assert known.find_data_cursor_before(21) == (20, 170)
    known.note_event(unusable(20))
    assert known.find_data_cursor_before(21) == (10, 80)
    (tmp_path / "checkpoints" / "step-10" / "manifest.json").write_text("garbage")
    assert known.find_data_cursor_before(21) == (0, -1)


def test_a_store_that_does_not_answer_has_what_was_seen_in_it_before(tmp_path: Path) -> None:
    """A restart beside it does not say that it begins at step 0."""
    save(tmp_path, 10)
    known = UsableCheckpoints(tmp_path, open_store_of_run(tmp_path, None))
    assert known.find_newest_step() == 10
    hide(tmp_path / "checkpoints")
    assert known.find_newest_step() == 10
    # Saved by ranks to which it answered meanwhile.
    known.note_event(saved(20))
    assert known.find_newest_step() == 20
    known.note_event(unusable(20))
    assert known.find_newest_step() == 10


def test_the_last_step_is_none_of_a_checkpoint_that_ranks_went_back_behind(tmp_path: Path) -> None:
    """As with --fallback: what was done since is what counts."""
    store = open_store_of_run(tmp_path, None)
    save(tmp_path, 20)
    save(tmp_path, 40)
    write(tmp_path, 0, saved(20), saved(40))
    assert find_last_done_step(tmp_path, store) == 40
    write(tmp_path, 1, unusable(40))
    assert find_last_done_step(tmp_path, store) == 20
    hide(tmp_path / "checkpoints")
    assert find_last_done_step(tmp_path, store) == 0


def hide(checkpoints: Path) -> None:
    """As a mount leaves them that does not answer: there, and they cannot be listed."""
    checkpoints.rename(checkpoints.with_name("aside"))
    checkpoints.write_text("")
