"""The store that writes a checkpoint late, so that what is no copy of a state shows."""

from __future__ import annotations

import threading
from pathlib import Path

from phalanx.checkpoint.stores.local import LocalStore
from phalanx.verify.late_store import DelayedCheckpointStore


def test_one_step_is_written_after_its_release_and_others_at_once(tmp_path: Path) -> None:
    store = DelayedCheckpointStore(LocalStore(tmp_path), 3)
    assert store.begin_draft(5).path.is_dir()
    begun: list[Path] = []
    thread = threading.Thread(target=lambda: begun.append(store.begin_draft(3).path))
    thread.start()
    thread.join(0.05)
    assert begun == []
    store.release()
    thread.join()
    assert not store.was_late
    assert [path.name.startswith(".step-3.") for path in begun] == [True]


def test_a_write_that_nobody_releases_is_done_and_said_to_be_late(tmp_path: Path) -> None:
    store = DelayedCheckpointStore(LocalStore(tmp_path), 3, max_delay_s=0.01)
    assert store.begin_draft(3).path.is_dir()
    assert store.was_late


def test_a_release_waits_for_the_thread_that_saves(tmp_path: Path) -> None:
    store = DelayedCheckpointStore(LocalStore(tmp_path), 3)
    thread = threading.Thread(target=lambda: store.begin_draft(3), name="phalanx-save")
    thread.start()
    store.release_and_wait()
    assert not thread.is_alive()
